"""What front.py compares, the most important first."""

from dataclasses import dataclass, field
from typing import Any

from tomesd.presets import PRESETS

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
    levels: tuple[int, ...] = ()
    """Of the noise levels of the steps, those that the sampler keeps; none: all of them."""

    @property
    def variant(self) -> str:
        if self.cache:
            return "diffusers"
        fewer = self.steps < 1 or self.levels
        return "tomesd" if self.options else "unpatched" if fewer else "unmerged"


FEW, MERGED = 0.5, 0.19
"""Shares of the images of rows to explore with, and of those of merging, which are no match."""


def merged(label: str, share: float = FEW, **options: Any) -> Way:
    return Way("merging", label, options, share=share)


def cached(cache: str, label: str, share: float = FEW, **options: Any) -> Way:
    """A cache of others; the family is called what its labels begin with."""
    return Way(label.rstrip("0123456789., "), label, options, share=share, cache=cache)


def cheaper(share: float = FEW, *, steps: float = 1.0, **options: Any) -> Way:
    """Some steps at half the side, some left out, fewer in all, or several of these.

    Steps are left out from where the coarse ones end, if nothing else is said.
    """
    words = {}
    if "target" in options:
        words["merging"] = f"stack .5 to {options['end']:g}"
    if "coarse" in options:
        words["coarse"] = f"coarse to {options['coarse']:g}"
    if "reuse" in options:
        options = {"reuse_start": options.get("coarse"), **options}
        to = f" to {options['reuse_end']}" if "reuse_end" in options else ""
        blocks = ", all blocks" if "depth" in options else ""
        within = f", within {options['reuse_within']:g}" if "reuse_within" in options else ""
        attention = ", attention too" if "reuse_attention" in options else ""
        start = options["reuse_start"]
        told = f"reuse {options['reuse']}{to} from {start:g}"
        words["reuse"] = f"{told}{within}{blocks}{attention}"
    if steps < 1:
        words["fewer steps"] = f"{steps:.2g} of the steps"
    names = [*words]
    family = ", ".join(dict.fromkeys((names[0], names[-1])))
    # The library's own ratio is not 0: it would merge as well.
    options = {"ratio": 0.0, **options} if options else {}
    return Way(family, ", ".join(words.values()), options, steps, share)


ALL: Options = {"depth": (0.0, 1.0)}
"""Every block is left out at steps that reuse them."""
RUN_BY_BALANCED = (0, 1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27)
"""Of 28 steps."""
HALF: Options = {"ratio": 0.5, "end": 0.5}
MOST: Options = {"ratio": 0.75, "end": 0.5}
TAYLOR: Options = {"disable_cache_before_step": 3, "max_order": 1}

TRANSFORMER = [
    # At about four times the speed.
    cheaper(1, coarse=0.35, reuse=6, **ALL),
    cheaper(steps=0.25),
    cached(
        "magnitude", "MagCache 0.3, 6, 0.1", threshold=0.3, max_skip_steps=6, retention_ratio=0.1
    ),
    # From twice to three times.
    cheaper(1, reuse=2, reuse_start=0.2, reuse_end=8, **ALL),
    cached(
        "magnitude", "MagCache 0.12, 5", 1, threshold=0.12, max_skip_steps=5, retention_ratio=0.2
    ),
    cheaper(reuse=2, reuse_start=0.18, reuse_end=8, **ALL),
    cheaper(reuse=2, reuse_start=0.14, reuse_end=7, **ALL),
    cheaper(1, steps=0.36),
    cheaper(steps=0.5),
    cheaper(reuse=2, reuse_start=0.16, reuse_end=10, reuse_within=0.15, **ALL),
    cheaper(reuse=3, reuse_start=0.14, reuse_end=6, **ALL),
    cheaper(reuse=2, reuse_start=0.16, reuse_end=6, **ALL),
    cheaper(0.4, reuse=2, reuse_start=0.18, reuse_end=4, **ALL),
    cached(
        "magnitude", "MagCache 0.06, 3", 0.4, threshold=0.06, max_skip_steps=3, retention_ratio=0.2
    ),
    cheaper(coarse=0.35, reuse=4, **ALL),
    cheaper(0.4, reuse=2, reuse_start=0.25),
    cheaper(0.4, coarse=0.3),
    cached("taylor", "TaylorSeer 3", 0.4, cache_interval=3, **TAYLOR),
    cached("first block", "first block cache 0.2", 0.4, threshold=0.2),
    cached("taylor", "TaylorSeer 5", 0.25, cache_interval=5, **TAYLOR),
    # What the library did first.
    merged("merged to .5", MERGED, **HALF),
    merged("merged at all steps", MERGED, ratio=0.5, start=0.0, end=1.0),
    merged("three quarters merged to .5", MERGED, **MOST),
    merged("three quarters merged to .5, whole image", MERGED, **MOST, window=0),
    # Each family from slow to fast.
    cheaper(0.4, reuse=3, reuse_start=0.25, **ALL),
    cheaper(0.3, steps=0.71),
    cached("taylor", "TaylorSeer 2", 0.4, cache_interval=2, **TAYLOR),
    cached("first block", "first block cache 0.12", 0.4, threshold=0.12),
    Way("fewer steps", "the 12 steps that balanced runs", levels=RUN_BY_BALANCED),
    # With few steps, presets do something else than their rows above.
    *(Way("presets", f"preset {name}", o, share=FEW) for name, o in PRESETS["transformer"].items()),
]

STACK: Options = {"target": "stack", "ratio": 0.5}

# Reuse on a UNet is the idea of DeepCache: the levels below the finest are left out.
UNET = [
    merged("merged .5", 1, ratio=0.5),
    merged("kv 0.75, window 8", 1, target="kv", ratio=0.75, window=8),
    merged("kv 0.5, proportional", 1, target="kv", ratio=0.5, proportional=True),
    merged("stack 0.5, end 0.7", 1, **STACK, end=0.7),
    cheaper(1, reuse=2, reuse_start=0.25),
    cached("deep", "DeepCache 2", 1, cache_interval=2, cache_branch_id=0),
    cheaper(1, steps=0.75),
    cheaper(1, reuse=2, reuse_start=0.5, **STACK, end=0.4),
    cached("deep", "DeepCache 3", 1, cache_interval=3, cache_branch_id=0),
    cheaper(1, reuse=3, reuse_start=0.25),
    cheaper(1, steps=0.5),
    cheaper(1, coarse=0.3),
    cheaper(1, coarse=0.3, reuse=2),
    cheaper(1, reuse=2, reuse_start=0.0),
    cheaper(1, reuse=2, reuse_start=0.5),
    merged("stack .5 to .5", 1, **STACK, end=0.5),
    *(cheaper(1, reuse=2, reuse_start=start, reuse_end=8) for start in (0.2, 0.3, 0.4, 0.5)),
    *(cheaper(1, reuse=2, reuse_start=start, reuse_attention=True) for start in (0.0, 0.25, 0.5)),
    cheaper(1, reuse=2, reuse_start=0.1, reuse_end=6),
    cheaper(1, reuse=2, reuse_start=0.0, reuse_end=4),
    # Where tokens look for their like when three quarters of them go.
    *(merged(f"merged .75, window {side}", 1, ratio=0.75, window=side) for side in (0, 32, 16, 8)),
]

WAYS = {"transformer": TRANSFORMER, "unet": UNET}
