"""What front.py compares, the most important first."""

from dataclasses import dataclass, field
from typing import Any

from tomesd.presets import PRESETS, TRANSFORMER_PRESETS

__all__ = ["WAYS", "Way"]

Options = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to make images."""

    family: str
    """What it is a setting of: the line in the figure."""
    label: str
    options: Options = field(default_factory=dict)
    """Of `apply_patch`; or of the cache."""
    steps: float = 1.0
    """Share of the steps."""
    share: float = 1.0
    """Of the images."""
    cache: str = ""
    """A cache of diffusers."""

    @property
    def variant(self) -> str:
        if self.cache:
            return "diffusers"
        return "tomesd" if self.options else "unpatched" if self.steps < 1 else "unmerged"


FEW = 0.5
"""Share of the images of rows to explore with."""
SLOW = 0.25
"""The same, where the model runs merged images one by one."""


def fewer(steps: float, share: float = FEW) -> Way:
    return Way("fewer steps", f"{steps:.2g} of the steps", {}, steps, share)


def merged(label: str, share: float = SLOW, **options: Any) -> Way:
    return Way("merging", label, options, share=share)


def reuse(every: int, start: float, share: float = FEW, *, extrapolate: bool = False) -> Way:
    options: Options = {"ratio": 0.0, "reuse": every, "reuse_start": start}
    label = f"reuse {every} from {start:g}"
    if extrapolate:
        options, label = {**options, "extrapolate": True}, f"{label}, extrapolated"
    return Way("reuse", label, options, share=share)


def coarse(
    end: float,
    share: float = FEW,
    *,
    every: int | None = None,
    start: float | None = None,
    steps: float = 1.0,
) -> Way:
    """Half the side up to some progress; then steps may be left out, from `start` or at once."""
    options: Options = {"ratio": 0.0, "coarse": end}
    family, label = "coarse", f"coarse to {end:g}"
    if every is not None:
        start = end if start is None else start
        options |= {"reuse": every, "reuse_start": start}
        family, label = "coarse, reuse", f"{label}, reuse {every} from {start:g}"
    if steps < 1:
        family, label = "coarse, fewer steps", f"{label}, {steps:.2g} of the steps"
    return Way(family, label, options, steps, share)


def first_block(threshold: float) -> Way:
    label = f"first block cache {threshold:g}"
    return Way("first block cache", label, {"threshold": threshold}, share=FEW, cache="first block")


def magnitude(threshold: float, skip: int) -> Way:
    options = {"threshold": threshold, "max_skip_steps": skip}
    return Way("MagCache", f"MagCache {threshold:g}, {skip}", options, share=FEW, cache="magnitude")


def taylor(interval: int, before: int = 3) -> Way:
    options = {"cache_interval": interval, "disable_cache_before_step": before, "max_order": 1}
    label = f"TaylorSeer {interval}" + (f" from step {before}" if before > 3 else "")
    return Way("TaylorSeer", label, options, share=FEW, cache="taylor")


def presets(options: dict[str, Options]) -> list[Way]:
    return [Way("presets", f"preset {name}", dict(chosen)) for name, chosen in options.items()]


ALL: Options = {"ratio": 0.0, "depth": (0.0, 1.0)}
"""Every block is left out at steps that reuse them."""

TRANSFORMER = [
    *presets(TRANSFORMER_PRESETS),
    Way(
        *("coarse, reuse", "coarse to 0.35, reuse 4 from 0.35, all blocks"),
        {**ALL, "coarse": 0.35, "reuse": 4, "reuse_start": 0.35},
    ),
    Way(
        *("coarse, reuse", "coarse to 0.15, reuse 2 from 0.15, all blocks"),
        {**ALL, "coarse": 0.15, "reuse": 2, "reuse_start": 0.15},
    ),
    # How the families compare at about twice the speed, with many images.
    reuse(3, 0.25, share=1),
    coarse(0.25, share=1, every=3),
    fewer(0.5, share=1),
    coarse(0.3, share=1),
    # Each family from slow to fast.
    first_block(0.12),
    magnitude(0.06, 3),
    taylor(2),
    reuse(2, 0.5),
    reuse(2, 0.25),
    fewer(0.71),
    fewer(0.36),
    fewer(0.25),
    coarse(0.2),
    coarse(0.5),
    # Both together.
    *(coarse(end, every=every) for end in (0.15, 0.25, 0.35) for every in (2, 4)),
    *(coarse(end, every=3) for end in (0.15, 0.35)),
    coarse(0.25, every=2, start=0.5),
    coarse(0.25, every=3, start=0.5),
    *(coarse(0.3, steps=steps) for steps in (0.71, 0.5)),
    # Caches that are slower and faster.
    first_block(0.2),
    magnitude(0.12, 5),
    taylor(3),
    first_block(0.08),
    magnitude(0.02, 3),
    taylor(2, before=10),
    first_block(0.3),
    taylor(5),
    # What the library did first.
    merged("merged to .5", ratio=0.5, end=0.5),
    merged("merged at all steps", ratio=0.5, start=0.0, end=1.0),
    # What is left of the grid.
    reuse(4, 0.25),
    reuse(2, 0.1),
    reuse(3, 0.1),
    reuse(4, 0.1),
    reuse(3, 0.5),
    reuse(4, 0.5),
    *(reuse(every, 0.25, extrapolate=True) for every in (2, 3, 4)),
    coarse(0.15, every=4, start=0.5),
    coarse(0.35, every=4, start=0.5),
    merged("merged to .25", ratio=0.5, end=0.25),
    merged("three quarters merged to .5", ratio=0.75, end=0.5),
    merged("three quarters merged at all steps", ratio=0.75, start=0.0, end=1.0),
]


def stack(end: float) -> Options:
    return {"target": "stack", "ratio": 0.5, "end": end}


def unet_reuse(every: int, start: float, **merging: Any) -> Way:
    """On UNets, the idea of DeepCache: the levels below the finest are left out."""
    options = {"ratio": 0.0, **merging, "reuse": every, "reuse_start": start}
    label = f"reuse {every} from {start:g}"
    if merging:
        label = f"stack .5 to {merging['end']:g}, {label}"
    return Way("merging, reuse" if merging else "reuse", label, options)


UNET = [
    *presets(PRESETS),
    merged("merged .5", share=1, ratio=0.5),
    unet_reuse(2, 0.25),
    unet_reuse(2, 0.5, **stack(0.4)),
    fewer(0.75, share=1),
    fewer(0.5, share=1),
    merged("stack .5 to .5", share=1, **stack(0.5)),
    unet_reuse(2, 0.0),
    unet_reuse(2, 0.5),
    *(unet_reuse(3, start) for start in (0.0, 0.25, 0.5)),
]

WAYS = {"transformer": TRANSFORMER, "unet": UNET}
