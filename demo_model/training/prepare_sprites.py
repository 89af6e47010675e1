"""Make `sprites.npz` from two npm packages: the artwork and the Unicode names.

    npm pack @lobehub/fluent-emoji-3d@1.1.0 && npm pack unicode-emoji-json@0.9.0
    python prepare_sprites.py fluent-emoji-3d.tgz unicode-emoji-json.tgz sprites.npz

Every object becomes one RGBA picture of 256 x 256 in which it fills all but a small margin
(the margin leaves room for the soft shadow). The artwork itself is not part of the package.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from tomesd_demo_model.captions import objects

SIDE = 256
MARGIN = 14


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artwork", type=Path)
    parser.add_argument("names", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()

    emoji_of = _emoji_by_name(args.names)
    with tarfile.open(args.artwork) as archive:
        pictures = {Path(m.name).stem: m for m in archive.getmembers() if m.name.endswith(".webp")}
        sprites = []
        for thing in objects():
            member = next(pictures[k] for k in _keys(emoji_of[thing.unicode_name]) if k in pictures)
            data = archive.extractfile(member).read()
            sprites.append(_fit(Image.open(io.BytesIO(data)).convert("RGBA")))
    np.savez_compressed(args.out, sprites=np.stack(sprites))
    print(f"{len(sprites)} sprites, {args.out.stat().st_size / 1e6:.1f} MB")


def _emoji_by_name(package: Path) -> dict[str, str]:
    with tarfile.open(package) as archive:
        table = json.load(archive.extractfile("package/data-by-emoji.json"))
    return {entry["name"]: emoji for emoji, entry in table.items()}


def _keys(emoji: str) -> list[str]:
    """File names to try: the variation selector fe0f is sometimes part of them."""
    points = [f"{ord(c):04x}" for c in emoji]
    bare = [p for p in points if p != "fe0f"]
    return ["-".join(p) for p in (points, bare, [*bare, "fe0f"])]


def _fit(picture: Image.Image) -> np.ndarray:
    """Crop to what is visible and centre it: uint8 [SIDE, SIDE, 4]."""
    visible = picture.getchannel("A").point(lambda a: 255 * (a > 8)).getbbox()
    picture = picture.crop(visible)
    scale = (SIDE - 2 * MARGIN) / max(picture.size)
    # Premultiplied, or colours hidden under alpha 0 would bleed into the edges.
    rgba = np.asarray(picture, dtype=np.float32) / 255
    rgba[..., :3] *= rgba[..., 3:]
    size = [max(1, round(side * scale)) for side in picture.size]
    planes = [
        Image.fromarray(rgba[..., i]).resize(size, Image.Resampling.BICUBIC) for i in range(4)
    ]
    canvas = np.zeros((SIDE, SIDE, 4), dtype=np.float32)
    left, top = (SIDE - size[0]) // 2, (SIDE - size[1]) // 2
    canvas[top : top + size[1], left : left + size[0]] = np.stack(planes, axis=-1)
    return (canvas.clip(0, 1) * 255).round().astype(np.uint8)


if __name__ == "__main__":
    main()
