"""Sample clips of held-out captions: a sheet with a row of frames each, and an animation.

    python sample_video.py --weights run_video/transformer.safetensors --pipeline pipeline \
        --out clips.jpg --count 12

The animation lies beside the sheet, as `clips.webp`: all clips side by side. Clip i has caption i
of the held-out list and the noise of seed i.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch
from diffusers import AutoencoderKL, WanTransformer3DModel
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import models
import tomesd_demo_model
import video
from config import DOWNSAMPLING, VIDEO
from flow import TextEncoder
from sample_transformer import arguments, load_parts
from sampling import save_sheet
from tokenizer import WordTokenizer

SHOWN = 8
PER_SECOND = 8


def write_clips(
    model: WanTransformer3DModel,
    vae: AutoencoderKL,
    text: TextEncoder,
    tokenizer: WordTokenizer,
    side: int,
    frames: int,
    count: int,
    path: Path,
    *,
    first: int = 0,
    guidance: float = 4.0,
    steps: int = 28,
) -> None:
    """Sheet and animation of held-out captions, at `side` x `side` latents a frame."""
    captions = tomesd_demo_model.held_out_captions()[first : first + count]
    seeds = [torch.Generator("cpu").manual_seed(first + i) for i in range(count)]
    shape = (1, 4, frames, side, side)
    noise = torch.cat([torch.randn(shape, generator=seed) for seed in seeds]).to(model.device)
    tokens, empty = (tokenizer.batch(words, model.device) for words in (captions, [""]))
    parts = [
        video.sample(model, text(words), text(empty), start, guidance=guidance, steps=steps)
        for words, start in zip(tokens.split(8), noise.split(8), strict=True)
    ]
    latents = torch.cat(parts).transpose(1, 2).flatten(0, 1)
    show(models.decode(vae, latents).unflatten(0, (-1, frames)), captions, path)


def show(clips: Tensor, captions: list[str], path: Path) -> None:
    """Write clips [B, F, 3, s, s] in [-1, 1] as a sheet of rows, and as an animation."""
    chosen = torch.linspace(0, clips.shape[1] - 1, min(SHOWN, clips.shape[1])).round().long()
    rows = clips[:, chosen.to(clips.device)]
    texts = [cell for caption in captions for cell in _cells(caption, *rows.shape[1:4:2])]
    save_sheet(rows.flatten(0, 1), path, rows.shape[1], texts)
    columns = min(4, len(clips))
    white = torch.ones_like(clips[: -len(clips) % columns])
    filled = torch.cat([clips, white]).unflatten(0, (-1, columns))
    # rows, columns, F, 3, y, x -> F, rows y, columns x, 3
    grid = filled.permute(2, 0, 4, 1, 5, 3).flatten(3, 4).flatten(1, 2)
    arrays = grid.add(1).mul(127.5).round().byte().cpu().numpy()
    pictures = [Image.fromarray(array) for array in arrays]
    pictures[0].save(
        path.with_suffix(".webp"),
        save_all=True,
        append_images=pictures[1:],
        duration=1000 // PER_SECOND,
        loop=0,
        quality=85,
    )


def _cells(caption: str, count: int, side: int) -> list[str]:
    """A caption cut to go on below the next picture, two lines each."""
    lines = textwrap.wrap(caption, side // 6)
    return [" ".join(lines[2 * i : 2 * i + 2]) for i in range(count)]


def main() -> None:
    args = arguments(__doc__.splitlines()[0], pixels=128, frames=16, count=12).parse_args()
    model = WanTransformer3DModel(**VIDEO)
    model.load_state_dict(load_file(args.weights))
    write_clips(
        model.to(args.device).eval(),
        *load_parts(args),
        args.pixels // DOWNSAMPLING,
        args.frames,
        args.count,
        args.out,
        first=args.first,
        guidance=args.guidance,
        steps=args.steps,
    )


if __name__ == "__main__":
    main()
