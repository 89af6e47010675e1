"""Draws docs/figures/quality/gallery.jpg: captions of the embedded model, with every preset.

    python scripts/record_gallery.py [--original FOLDER]

The first held-out captions, not picked; 20 DDIM steps, guidance 5, on a CPU.
"""

import argparse
from pathlib import Path
from typing import Any

import tomesd_demo_model
from PIL import Image

from tomesd import Settings
from tomesd.evaluation.prompts import Item
from tomesd.evaluation.runs import Sampling
from tomesd.evaluation.sampling import sample_batch
from tomesd.evaluation.variants import UNMERGED, Variant, load_original, patched_with
from tomesd.generation import load_pipeline
from tomesd.generation.comparison import label_grid
from tomesd.presets import PRESETS

FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "quality" / "gallery.jpg"


def variants(original: Any) -> dict[str, Variant]:
    """By title."""
    found = {"unmerged": UNMERGED}
    if original is not None:
        found["0.1.3, r = .5"] = Variant("original", "original", {"ratio": 0.5})
    for name, options in {"r = .5": {"ratio": 0.5}, **PRESETS}.items():
        settings = vars(Settings(**{**options, "when": "always"}))
        found[name] = Variant(name, "merged", settings)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", type=Path)
    parser.add_argument("--captions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    pipe = load_pipeline("demo", device="cpu")
    captions = tomesd_demo_model.held_out_captions()[: args.captions]
    items = [Item(i, prompt, 0, i) for i, prompt in enumerate(captions)]
    original = load_original(args.original) if args.original else None
    sampling = Sampling(256, 256, steps=args.steps)
    columns: list[list[Image.Image]] = []
    titles = []
    for title, variant in variants(original).items():
        with patched_with(pipe, variant, original):
            images = list(sample_batch(pipe, items, sampling).images)
        print(title, flush=True)
        titles.append(title)
        columns.append(images)
    label_grid(list(zip(*columns, strict=True)), titles, captions).save(FIGURE, quality=92)


if __name__ == "__main__":
    main()
