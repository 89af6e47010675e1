"""What front.py compares, the most important first."""

from dataclasses import dataclass, field
from typing import Any

from tomesd.presets import PRESETS

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
    """A cache of diffusers, or DeepCache."""

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


def reuse(every: int, start: float, share: float = FEW, **options: Any) -> Way:
    """Steps left out from some progress on."""
    options = {"ratio": 0.0, "reuse": every, "reuse_start": start, **options}
    to = f" to {options['reuse_end']}" if "reuse_end" in options else ""
    return Way("reuse", f"reuse {every}{to} from {start:g}{_more(options)}", options, share=share)


def coarse(
    end: float,
    share: float = FEW,
    *,
    every: int | None = None,
    start: float | None = None,
    steps: float = 1.0,
    **options: Any,
) -> Way:
    """Half the side up to some progress; then steps may be left out, from `start` or at once."""
    options = {"ratio": 0.0, "coarse": end, **options}
    family, label = "coarse", f"coarse to {end:g}"
    if every is not None:
        start = end if start is None else start
        options |= {"reuse": every, "reuse_start": start}
        family, label = "coarse, reuse", f"{label}, reuse {every} from {start:g}{_more(options)}"
    if steps < 1:
        family, label = "coarse, fewer steps", f"{label}, {steps:.2g} of the steps"
    return Way(family, label, options, steps, share)


def _more(options: Options) -> str:
    words = {"depth": ", all blocks", "extrapolate": ", extrapolated"}
    return "".join(word for name, word in words.items() if options.get(name))


def first_block(threshold: float, share: float = FEW) -> Way:
    options, label = {"threshold": threshold}, f"first block cache {threshold:g}"
    return Way("first block cache", label, options, share=share, cache="first block")


def magnitude(threshold: float, skip: int, share: float = FEW, retained: float = 0.2) -> Way:
    options = {"threshold": threshold, "max_skip_steps": skip, "retention_ratio": retained}
    label = f"MagCache {threshold:g}, {skip}" + (f", {retained:g}" if retained != 0.2 else "")
    return Way("MagCache", label, options, share=share, cache="magnitude")


def taylor(interval: int, before: int = 3, share: float = FEW) -> Way:
    options = {"cache_interval": interval, "disable_cache_before_step": before, "max_order": 1}
    label = f"TaylorSeer {interval}" + (f" from step {before}" if before > 3 else "")
    return Way("TaylorSeer", label, options, share=share, cache="taylor")


def deep(interval: int) -> Way:
    """DeepCache at its defaults, from its own package."""
    options = {"cache_interval": interval, "cache_branch_id": 0}
    return Way("DeepCache", f"DeepCache {interval}", options, share=1, cache="deep")


ALL: Options = {"depth": (0.0, 1.0)}
"""Every block is left out at steps that reuse them."""

TRANSFORMER = [
    # At about three times the speed, and four times: with many images.
    coarse(0.35, 1, every=4, **ALL),
    fewer(0.36, 1),
    magnitude(0.12, 5, 1),
    coarse(0.35, every=6, **ALL),
    coarse(0.35, every=3, steps=0.71, **ALL),
    fewer(0.25),
    magnitude(0.3, 6, retained=0.1),
    # At about twice the speed.
    reuse(2, 0.2, 1, reuse_end=8, **ALL),
    reuse(2, 0.2, 1, reuse_end=12, **ALL),
    reuse(2, 0.15, 1, reuse_end=12, **ALL),
    reuse(2, 0.2, 1, reuse_end=4, **ALL),
    reuse(4, 0.25, **ALL),
    reuse(3, 0.25, 0.4, **ALL),
    taylor(3, share=0.4),
    first_block(0.2, 0.4),
    taylor(5, share=0.25),
    # What the library did first.
    merged("merged to .5", 0.128, ratio=0.5, end=0.5),
    merged("merged at all steps", 0.128, ratio=0.5, start=0.0, end=1.0),
    # Each part alone, as fast as all together.
    reuse(6, 0.2, 0.256, **ALL),
    merged("three quarters merged to .5", 0.128, ratio=0.75, end=0.5),
    # Each family from slow to fast.
    reuse(2, 0.5),
    reuse(2, 0.25),
    reuse(3, 0.25, share=1),
    reuse(3, 0.15, **ALL),
    reuse(2, 0.15, **ALL),
    coarse(0.3, share=1),
    fewer(0.71),
    fewer(0.5, share=1),
    first_block(0.12),
    magnitude(0.06, 3),
    taylor(2),
    coarse(0.15, every=2, **ALL),
    coarse(0.35, every=3, **ALL),
    *(coarse(end, every=every) for end in (0.15, 0.25, 0.35) for every in (2, 3, 4)),
    coarse(0.25, every=3, start=0.5),
    # With few steps, presets do something else than their rows above.
    *(Way("presets", f"preset {name}", o, share=FEW) for name, o in PRESETS["transformer"].items()),
]


def stack(end: float) -> Options:
    return {"target": "stack", "ratio": 0.5, "end": end}


def unet_reuse(every: int, start: float, **merging: Any) -> Way:
    """On UNets, the idea of DeepCache: the levels below the finest are left out."""
    if not merging:
        return reuse(every, start, 1)
    options = {**merging, "reuse": every, "reuse_start": start}
    label = f"stack .5 to {merging['end']:g}, reuse {every} from {start:g}"
    return Way("merging, reuse", label, options, share=1)


UNET = [
    merged("merged .5", share=1, ratio=0.5),
    merged("kv 0.75, window 8", 1, target="kv", ratio=0.75, window=8),
    merged("kv 0.5, proportional", 1, target="kv", ratio=0.5, proportional=True),
    merged("stack 0.5, end 0.7", 1, **stack(0.7)),
    unet_reuse(2, 0.25),
    deep(2),
    fewer(0.75, share=1),
    unet_reuse(2, 0.5, **stack(0.4)),
    deep(3),
    unet_reuse(3, 0.25),
    fewer(0.5, share=1),
    coarse(0.3, 1),
    coarse(0.3, 1, every=2),
    unet_reuse(2, 0.0),
    unet_reuse(2, 0.5),
    merged("stack .5 to .5", share=1, **stack(0.5)),
    *(reuse(2, start, 1, reuse_end=8) for start in (0.2, 0.3)),
    reuse(2, 0.1, 1, reuse_end=6),
    reuse(2, 0.0, 1, reuse_end=4),
    # Where tokens look for their like when three quarters of them go.
    *(merged(f"merged .75, window {side}", 1, ratio=0.75, window=side) for side in (0, 32, 16, 8)),
]

WAYS = {"transformer": TRANSFORMER, "unet": UNET}
