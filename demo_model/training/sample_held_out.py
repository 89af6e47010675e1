"""Sample held-out captions with the shipped pipeline; goes on where it was interrupted.

    python sample_held_out.py samples --sets main=500 plms50=24 side32=100 --batch 50

Picture i of every set has caption i of the held-out list and seed i, so sets compare.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import PNDMScheduler, StableDiffusionPipeline
from PIL import Image

import tomesd_demo_model
from sampling import first_noise

# What differs from 256 px, DDIM, 30 steps, guidance 5.
SETS: dict[str, dict] = {
    "main": {},
    "guidance3": {"guidance_scale": 3.0},
    "guidance7": {"guidance_scale": 7.5},
    "plms50": {"scheduler": "plms", "num_inference_steps": 50},
    "plms50_guidance7": {
        "scheduler": "plms",
        "num_inference_steps": 50,
        "guidance_scale": 7.5,
    },
    **{f"side{side}": {"side": side} for side in (32, 48, 64, 80, 96)},
    "side32_plms50": {"side": 32, "scheduler": "plms", "num_inference_steps": 50},
    "side32_plms50_guidance7": {
        "side": 32,
        "scheduler": "plms",
        "num_inference_steps": 50,
        "guidance_scale": 7.5,
    },
}
# Both are lossless; WebP takes two thirds of the space and more time.
FORMATS = {"png": {}, "webp": {"lossless": True, "method": 4}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", nargs="+", default=["main=500"], metavar="NAME=COUNT")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--format", choices=tuple(FORMATS), default="png")
    parser.add_argument("--steps", type=int, help="other than the set's own, for a quick trial")
    args = parser.parse_args()
    counts = dict(parse_set(entry, parser) for entry in args.sets)
    diffusers.utils.logging.disable_progress_bar()
    pipeline = StableDiffusionPipeline.from_pretrained(
        tomesd_demo_model.path(), safety_checker=None, torch_dtype=getattr(torch, args.dtype)
    ).to(args.device)
    pipeline.set_progress_bar_config(disable=True)
    ddim, plms = pipeline.scheduler, PNDMScheduler.from_config(pipeline.scheduler.config)
    for name, count in counts.items():
        options = dict(SETS[name])
        pipeline.scheduler = plms if options.pop("scheduler", "ddim") == "plms" else ddim
        if args.steps:
            options["num_inference_steps"] = args.steps
        sample_set(pipeline, args.out / name, count, args.batch, args.format, options)


def parse_set(entry: str, parser: argparse.ArgumentParser) -> tuple[str, int]:
    name, _, count = entry.partition("=")
    most = len(tomesd_demo_model.held_out_captions())
    if name not in SETS:
        parser.error(f"--sets {entry}: no such set; there are {', '.join(SETS)}")
    if not count.isdecimal() or not 1 <= int(count) <= most:
        parser.error(f"--sets {entry}: the number of pictures must be 1 to {most}")
    return name, int(count)


def sample_set(
    pipeline: StableDiffusionPipeline,
    folder: Path,
    count: int,
    batch: int,
    suffix: str,
    options: dict,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"num_inference_steps": 30, "guidance_scale": 5.0} | options
    pixels = 4 * settings.pop("side", 64)
    captions = tomesd_demo_model.held_out_captions()
    todo = [i for i in range(count) if not (folder / f"{i:04d}.{suffix}").exists()]
    # Pictures are written while the next batch is drawn.
    with ThreadPoolExecutor() as writers:
        written = []
        for start in range(0, len(todo), batch):
            chosen = todo[start : start + batch]
            began = time.time()
            noise = [first_noise(i, pixels // 4) for i in chosen]
            pictures = pipeline(
                [captions[i] for i in chosen],
                height=pixels,
                width=pixels,
                latents=torch.cat(noise).to(pipeline.device, pipeline.dtype),
                **settings,
            ).images
            for i, picture in zip(chosen, pictures, strict=True):
                path = folder / f"{i:04d}.{suffix}"
                written.append(writers.submit(save, picture, path))
            seconds = time.time() - began
            print(f"{folder.name} {chosen[-1] + 1}/{count}: {seconds:.1f} s", flush=True)
    for future in written:
        future.result()
    about = settings | {"pixels": pixels, "scheduler": type(pipeline.scheduler).__name__}
    about |= {"device": device_name(pipeline.device), "dtype": str(pipeline.dtype)}
    about |= {"batch": batch}
    about |= {m.__name__: m.__version__ for m in (torch, diffusers, transformers)}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def save(picture: Image.Image, path: Path) -> None:
    """Write under another name first: an interrupted run leaves no half of a picture behind."""
    part = path.with_suffix(".part")
    picture.save(part, format=path.suffix[1:], **FORMATS[path.suffix[1:]])
    part.replace(path)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


if __name__ == "__main__":
    main()
