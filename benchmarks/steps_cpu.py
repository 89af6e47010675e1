"""A few images of the embedded transformer: fewer steps, steps left out, tokens merged.

    python benchmarks/steps_cpu.py [--images 3] [--variants NAME ...]

Each image is compared with the one that all steps make from the same seed, by PSNR. `work` is the
share of the operations in the blocks that a variant does, counted by the tokens they get. A sketch
for a CPU, not a measurement of quality: that takes many more images.
"""

import argparse
import functools
from contextlib import contextmanager
from typing import Any

import numpy as np
import tomesd_demo_model
import torch
from rows import RESULTS

from tomesd.bench import RowFile
from tomesd.generation import load_pipeline, sample
from tomesd.settings import Settings

STEPS = 20
EARLY = {"ratio": 0.5, "end": 0.25}
VARIANTS: dict[str, dict[str, Any]] = {
    "14 steps": {"steps": 14},
    "10 steps": {"steps": 10},
    "reuse 2 from .5": {"ratio": 0.0, "reuse": 2, "reuse_start": 0.5},
    "reuse 2 from .25": {"ratio": 0.0, "reuse": 2, "reuse_start": 0.25},
    "reuse 3 from .25": {"ratio": 0.0, "reuse": 3, "reuse_start": 0.25},
    "reuse 3 from .25, extrapolated": {
        "ratio": 0.0,
        "reuse": 3,
        "reuse_start": 0.25,
        "extrapolate": True,
    },
    "merged to .5": {"ratio": 0.5, "end": 0.5},
    "merged to .25, then reuse 3": {**EARLY, "reuse": 3, "reuse_start": 0.25},
}


@contextmanager
def counted_tokens(transformer: Any) -> Any:
    """Counts the image tokens that blocks work on, in a list of one number."""
    count, forwards = [0], {}
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        forwards.setdefault(type(block), type(block).forward)

    def counting(forward: Any) -> Any:
        @functools.wraps(forward)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            count[0] += kwargs["hidden_states"].shape[1]
            return forward(self, *args, **kwargs)

        return run

    for cls, forward in forwards.items():
        cls.forward = counting(forward)
    try:
        yield count
    finally:
        for cls, forward in forwards.items():
            cls.forward = forward


def psnr(image: Any, other: Any) -> float:
    one, two = (np.asarray(picture, dtype=float) / 255 for picture in (image, other))
    return float(-10 * np.log10(max(((one - two) ** 2).mean(), 1e-10)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    pipe = load_pipeline("transformer")
    prompts = tomesd_demo_model.held_out_captions()[: args.images]

    def make(steps: int = STEPS, **options: Any) -> tuple[list[Any], int]:
        settings = Settings(**options, when="always") if options else None
        with counted_tokens(pipe.transformer) as count:
            images = [
                sample(pipe, prompt, settings, seed=seed, size=(256, 256), steps=steps).image
                for seed, prompt in enumerate(prompts)
            ]
        return images, count[0]

    unmerged, full = make()
    file = RowFile(RESULTS / "steps_cpu.jsonl", torch.device("cpu"))
    for name in args.variants:
        images, tokens = make(**VARIANTS[name])
        scores = [psnr(*pair) for pair in zip(images, unmerged, strict=True)]
        row = {"benchmark": "steps", "model": "embedded transformer", "pixels": 256}
        row |= {"variant": name, "options": VARIANTS[name], "steps": STEPS}
        row = file.add({**row, "images": args.images, "psnr": scores, "work": tokens / full})
        print(f"{name}: work {row['work']:.2f}, PSNR {np.mean(scores):.1f} dB", flush=True)


if __name__ == "__main__":
    main()
