"""Draws docs/figures/quality/gallery.jpg: captions of the embedded model, with every preset.

    python scripts/record_gallery.py --original FOLDER

The first held-out captions, not picked; 20 DDIM steps, guidance 5, on a CPU. FOLDER holds tomesd
0.1.3.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomesd_demo_model
import torch
from PIL import Image

import tomesd
from tomesd.bench import load_original
from tomesd.generation import Sampling, load_pipeline, sample_batch
from tomesd.generation.comparison import label_grid
from tomesd.presets import PRESETS

FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "quality" / "gallery.jpg"
CAPTIONS = tomesd_demo_model.held_out_captions()[:3]


def images(pipe: Any) -> Sequence[Image.Image]:
    sampling = Sampling.of(pipe, steps=20)
    return sample_batch(pipe, CAPTIONS, range(len(CAPTIONS)), sampling).images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", type=Path, required=True, help="folder with tomesd 0.1.3")
    original = load_original(parser.parse_args().original)
    pipe = load_pipeline("demo", device="cpu")
    columns = {"unmerged": images(pipe)}
    torch.manual_seed(0)  # the original draws from the global generator
    original.apply_patch(pipe, ratio=0.5)
    columns["0.1.3, r = .5"] = images(pipe)
    original.remove_patch(pipe)
    for name, options in {"r = .5": {"ratio": 0.5}, **PRESETS}.items():
        with tomesd.patched(pipe, **options, when="always"):
            columns[name] = images(pipe)
    picture = label_grid(list(zip(*columns.values(), strict=True)), list(columns), CAPTIONS)
    picture.save(FIGURE, quality=92)


if __name__ == "__main__":
    main()
