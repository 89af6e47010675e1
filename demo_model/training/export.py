"""Assemble the trained parts into a diffusers pipeline with half-precision weights.

python export.py --run run --out ../src/tomesd_demo_model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file
from transformers import CLIPTokenizer

import models
import tokenizer as tokens
from sampling import scheduler
from tomesd_demo_model.captions import sample_captions

HELD_OUT = 2000


def tidy(folder: Path) -> None:
    """What `save_pretrained` leaves to be said in the configs."""
    # transformers would keep the text encoder in half precision while diffusers loads the rest
    # in single precision, and the two would not fit together.
    _edit(folder / "text_encoder" / "config.json", dtype="float32")
    # FluxPipeline, which uses the same autoencoder, asks for it.
    _edit(folder / "vae" / "config.json", shift_factor=0.0)
    # So that PNDMScheduler.from_config(pipeline.scheduler.config) is PLMS.
    _edit(folder / "scheduler" / "scheduler_config.json", skip_prk_steps=True)
    # vocab.json and merges.txt say it all; the copy would name the folder it was made in.
    (folder / "tokenizer" / "tokenizer.json").unlink(missing_ok=True)
    tokens.build(folder / "tokenizer")


def _edit(path: Path, **changes: object) -> None:
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    pipeline_folder = args.out / "pipeline"
    tokens.build(pipeline_folder / "tokenizer")

    denoiser = models.Denoiser(tokens.WordTokenizer(pipeline_folder / "tokenizer"))
    average = load_file(args.run / "average.safetensors")
    missing, unknown = denoiser.load_state_dict(average, strict=False)
    if unknown or any("position_ids" not in name for name in missing):
        raise SystemExit(f"weights do not fit: missing {missing}, unknown {unknown}")
    pipeline = StableDiffusionPipeline(
        vae=models.load_autoencoder(args.run / "autoencoder.safetensors", "cpu"),
        text_encoder=denoiser.text,
        tokenizer=CLIPTokenizer.from_pretrained(pipeline_folder / "tokenizer"),
        unet=denoiser.unet,
        scheduler=scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.to(torch.float16).save_pretrained(pipeline_folder, safe_serialization=True)
    tidy(pipeline_folder)
    captions = sample_captions(HELD_OUT)
    (args.out / "held_out_captions.txt").write_text("\n".join(captions) + "\n", encoding="utf-8")
    files = [f for f in pipeline_folder.rglob("*") if f.is_file()]
    for file in sorted(files):
        print(f"{file.stat().st_size:>10} {file.relative_to(pipeline_folder)}")
    print(f"{sum(f.stat().st_size for f in files) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
