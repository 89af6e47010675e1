"""Sample held-out captions with trained transformer weights, and lay them out on a sheet.

    python sample_transformer.py --weights run/transformer.safetensors --pipeline pipeline \
        --out sheet.jpg --pixels 512 --count 24

Picture i has caption i of the held-out list and the noise of seed i, as in sample_held_out.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxTransformer2DModel
from safetensors.torch import load_file

import models
import tomesd_demo_model
from config import DOWNSAMPLING, TRANSFORMER
from flow import TextEncoder, sample
from sampling import first_noise, save_sheet
from tokenizer import WordTokenizer


def write_sheet(
    model: FluxTransformer2DModel,
    vae: AutoencoderKL,
    text: TextEncoder,
    tokenizer: WordTokenizer,
    side: int,
    count: int,
    path: Path,
    *,
    first: int = 0,
    guidance: float = 4.0,
    steps: int = 28,
    shown: int = 256,
) -> None:
    """Sheet of held-out captions at `side` x `side` latents, shrunk to `shown` pixels each."""
    captions = tomesd_demo_model.held_out_captions()[first : first + count]
    noise = torch.cat([first_noise(first + i, side) for i in range(count)]).to(model.device)
    wanted, without = (text(tokenizer.batch(words, model.device)) for words in (captions, [""]))
    latents = sample(model, wanted, without, noise, guidance=guidance, steps=steps)
    pictures = models.decode(vae, latents, chunk=8)
    if pictures.shape[-1] > shown:
        pictures = F.interpolate(pictures, size=(shown, shown), mode="area")
    save_sheet(pictures, path, 6, captions)


def arguments(description: str, **defaults: int) -> argparse.ArgumentParser:
    """What samplers of all transformers are told, and how many `pixels` and pictures (`count`)."""
    parser = argparse.ArgumentParser(description=description)
    for name in ("weights", "pipeline", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--first", type=int, default=0, help="index of the first caption")
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--device", default="cpu")
    return parser


def load_parts(args: argparse.Namespace) -> tuple[AutoencoderKL, TextEncoder, WordTokenizer]:
    vae = AutoencoderKL.from_pretrained(args.pipeline / "vae").to(args.device).eval()
    text = TextEncoder(args.pipeline, args.device)
    return vae, text, WordTokenizer(args.pipeline / "tokenizer")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], pixels=512, count=24)
    parser.add_argument("--shown", type=int, default=256, help="side of a picture on the sheet")
    args = parser.parse_args()
    weights = load_file(args.weights)
    takes_guidance = any("guidance_embedder" in name for name in weights)
    model = FluxTransformer2DModel(**TRANSFORMER, guidance_embeds=takes_guidance)
    model.load_state_dict(weights)
    write_sheet(
        model.to(args.device).eval(),
        *load_parts(args),
        args.pixels // DOWNSAMPLING,
        args.count,
        args.out,
        first=args.first,
        guidance=args.guidance,
        steps=args.steps,
        shown=args.shown,
    )


if __name__ == "__main__":
    main()
