"""Sample held-out captions with the shipped pipeline; goes on where it was interrupted.

    python sample_held_out.py samples --sets main=500 plms50=24 side32=100 --batch 50

Picture i of every set has caption i of the held-out list and seed i, so sets compare.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import PNDMScheduler, StableDiffusionPipeline

import tomesd_demo_model

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
    **{f"side{side}": {"side": side} for side in (32, 48, 80, 96)},
    "side32_plms50": {"side": 32, "scheduler": "plms", "num_inference_steps": 50},
    "side32_plms50_guidance7": {
        "side": 32,
        "scheduler": "plms",
        "num_inference_steps": 50,
        "guidance_scale": 7.5,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", nargs="+", default=["main=500"], metavar="NAME=COUNT")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    pipeline = StableDiffusionPipeline.from_pretrained(
        tomesd_demo_model.path(), safety_checker=None
    ).to(args.device)
    pipeline.set_progress_bar_config(disable=True)
    ddim, plms = pipeline.scheduler, PNDMScheduler.from_config(pipeline.scheduler.config)
    for entry in args.sets:
        name, _, count = entry.partition("=")
        options = dict(SETS[name])
        pipeline.scheduler = plms if options.pop("scheduler", "ddim") == "plms" else ddim
        sample_set(pipeline, args.out / name, int(count), args.batch, options)


def sample_set(
    pipeline: StableDiffusionPipeline, folder: Path, count: int, batch: int, options: dict
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"num_inference_steps": 30, "guidance_scale": 5.0} | options
    pixels = 4 * settings.pop("side", 64)
    captions = tomesd_demo_model.held_out_captions()
    todo = [i for i in range(count) if not (folder / f"{i:04d}.png").exists()]
    for start in range(0, len(todo), batch):
        chosen = todo[start : start + batch]
        began = time.time()
        pictures = pipeline(
            [captions[i] for i in chosen],
            height=pixels,
            width=pixels,
            # Noise drawn on the CPU is the same on every device.
            generator=[torch.Generator("cpu").manual_seed(i) for i in chosen],
            **settings,
        ).images
        for i, picture in zip(chosen, pictures, strict=True):
            picture.save(folder / f"{i:04d}.png")
        print(f"{folder.name} {chosen[-1] + 1}/{count}: {time.time() - began:.0f} s", flush=True)
    about = settings | {"pixels": pixels, "scheduler": type(pipeline.scheduler).__name__}
    about |= {"device": str(pipeline.device), "machine": platform.machine()}
    about |= {m.__name__: m.__version__ for m in (torch, diffusers, transformers)}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
