"""Composes scenes as those that the embedded model was trained on: what FID is a distance to.

    python compose_scenes.py FOLDER --sprites sprites.npz [--count 2000]

Their captions are held out as those of the images are, but others: scenes of the same captions
would be closer than independent ones. The README says where the sprites come from.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

import tomesd_demo_model
from data import describe
from scenes import Composer
from tokenizer import WordTokenizer
from tomesd_demo_model.captions import sample_scenes

AT_ONCE = 20
SEED = 11


def compose(
    sprites: Path, count: int, side: int, device: torch.device | str = "cpu"
) -> Iterator[Tensor]:
    """Scenes [20, 3, side, side] of uint8 on the device, until there are so many."""
    shipped = len(tomesd_demo_model.held_out_captions())
    scenes = sample_scenes(shipped + count)[shipped:]
    tokenizer = WordTokenizer(tomesd_demo_model.path() / "tokenizer")
    composer = Composer(sprites, device)
    for first in range(0, count, AT_ONCE):
        described = describe(scenes[first : first + AT_ONCE], tokenizer, SEED + first)
        composer.generator.manual_seed(SEED + first)
        pictures = composer(described, side, chunk=AT_ONCE)
        yield ((pictures + 1) * 127.5).round().clamp(0, 255).byte()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sprites", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2000)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    parts = compose(args.sprites, args.count, 256)
    pictures = (picture for part in parts for picture in part.permute(0, 2, 3, 1).numpy())
    for place, picture in enumerate(pictures):
        Image.fromarray(picture).save(args.folder / f"{place:05d}.png")


if __name__ == "__main__":
    main()
