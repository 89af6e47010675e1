"""What quality.py compares: the settings of each section of docs/quality.md."""

import json
import re
from dataclasses import dataclass
from typing import Any

from tomesd.presets import PRESETS

__all__ = ["SECTIONS", "Candidate", "Section"]

Options = dict[str, Any]

# What the paper means by merging everything, everywhere; this model has three levels.
EVERYTHING: Options = {"max_downsample": 4, "merge_crossattn": True, "merge_mlp": True}
# The whole image is searched, as in the paper.
AS_PAPER: Options = {"ratio": 0.5, "window": 0, **EVERYTHING}
TAU_40 = 0.806
"""The noise level below which 40 % of the steps lie."""


@dataclass(frozen=True)
class Candidate:
    """One row: a way to make the images."""

    variant: str
    """"unmerged", "original" or "tomesd"."""
    settings: Options
    """What `apply_patch` is given, of this library or of the original."""
    label: str
    group: str = ""
    """What it is compared within."""

    @property
    def name(self) -> str:
        """Of its folder: equal for candidates that make the same images."""
        words = json.dumps(self.settings, sort_keys=True)
        return f"{self.variant}{re.sub(r'[^A-Za-z0-9.]+', '-', words).rstrip('-')}"


UNMERGED = Candidate("unmerged", {}, "unmerged")


@dataclass(frozen=True)
class Section:
    """What is compared with no merging, how many images a row has, and how they are made."""

    merged: list[Candidate]
    images: int
    steps: int = 50
    scheduler: str = "plms"

    @property
    def candidates(self) -> list[Candidate]:
        return [UNMERGED, *self.merged]


def ours(label: str, group: str = "", **settings: Any) -> Candidate:
    """No rule may leave a layer alone: what a row says has to be merged."""
    return Candidate("tomesd", {"when": "always", **settings}, label, group)


def original(ratio: float, **settings: Any) -> Candidate:
    label = f"0.1.3 {ratio:g}" + (", everything" if "merge_mlp" in settings else "")
    return Candidate("original", {"ratio": ratio, **settings}, label)


def paper() -> list[Candidate]:
    """Both libraries at the ratios of the paper."""
    rows = []
    for ratio in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        rows += [original(ratio), ours(f"this library {ratio:g}", ratio=ratio)]
    return rows


def front() -> list[Candidate]:
    """The original, the presets, what is next to them, and where tokens look for their like."""
    rows = [original(r) for r in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75)]
    rows += [original(0.5, **EVERYTHING)]
    rows += [ours(f"preset {name}", "front", **options) for name, options in PRESETS.items()]
    more: list[Options] = [
        {"ratio": 0.3},
        {"ratio": 0.3, "window": 0},
        {"target": "kv", "ratio": 0.75, "proportional": True},
        {"target": "stack", "ratio": 0.5, "end": 0.8},
        {"ratio": 0.6, "window": 8, "proportional": True},
        {"ratio": 0.7, "window": 8, "proportional": True},
        {"ratio": 0.75, "proportional": True},
    ]
    return rows + [ours(in_words(options), "front", **options) for options in more]


def ablations() -> list[Candidate]:
    """Each from the paper's starting point: everything is merged at all levels, r = 0.5.

    The paper's fully random destinations cannot be had: each cell has one. Cells of 4x1 and 1x4
    stand for less evenly spread ones.
    """

    def one(group: str, label: str, **changes: Any) -> Candidate:
        return ours(label, group, **{**AS_PAPER, **changes})

    return [
        one("partition", "random in 2x2"),
        one("partition", "strided 2x2", use_rand=False),
        one("partition", "random in 4x1", sx=4, sy=1),
        one("partition", "random in 1x4", sx=1, sy=4),
        one("partition", "strided 4x1", sx=4, sy=1, use_rand=False),
        one("layers", "self-attention", merge_crossattn=False, merge_mlp=False),
        one("layers", "+ cross-attention", merge_mlp=False),
        one("layers", "+ feed-forward", merge_crossattn=False),
        one("layers", "everything"),
        one("levels", "level 1", max_downsample=1),
        one("levels", "levels 1-2", max_downsample=2),
        one("levels", "levels 1-4"),
        one("schedule", "flat 50 %"),
        one("schedule", "60 to 40 %", **linear(0.6, 0.4)),
        one("schedule", "40 to 60 %", **linear(0.4, 0.6)),
        one("schedule", "50 %, first half of the steps", end=0.5),
        one("schedule", "50 %, second half of the steps", start=0.5),
    ]


def linear(first: float, last: float) -> Options:
    return {"ratio": first, "ratio_end": last, "schedule": "linear"}


def other_algorithms() -> list[Candidate]:
    """K-means, similarity to the mean, a noise threshold; and the paper's matching beside them."""
    ratios = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    rows = [ours(f"bipartite {r:g}", "paper", ratio=r) for r in ratios]
    for r in (0.25, 0.5, 0.7):
        rows.append(ours(f"k-means {r:g}", "kmeans", selector="kmeans", ratio=r))
        rows.append(ours(f"similarity to the mean {r:g}", "mean", metric="mean", ratio=r))
    both = {"selector": "kmeans", "metric": "mean"}
    late = "threshold at 40 % of the steps"
    return [
        *rows,
        ours("threshold 0.2, 0.5", "tau", ratio=0.5, tau=0.2),
        ours(f"{late}, 0.5", "tau", ratio=0.5, tau=TAU_40),
        ours(f"{late}, 0.7", "tau", ratio=0.7, tau=TAU_40),
        ours("k-means, mean, 0.5", "all", ratio=0.5, **both),
        ours("all three, 0.5", "all", ratio=0.5, tau=TAU_40, **both),
        ours("all three, 0.7", "all", ratio=0.7, tau=TAU_40, **both),
    ]


def search() -> list[Candidate]:
    """Each idea on its own, and those that go well together.

    In this model every stack has one block, so that `stack` is `block`.
    """
    for_each: list[Options] = [
        *({"ratio": ratio} for ratio in (0.25, 0.5, 0.75)),
        *({"selector": selector} for selector in ("grid", "kmeans")),
        {"metric": "keys"},
        {"share": "level"},
        {"max_downsample": 4},
        linear(0.75, 0.25),
        {"end": 0.6},
        {"end": 0.8},
        {"ratio": 0.75, "window": 8},
        {"ratio": 0.75, "window": 8, "end": 0.8},
    ]
    for_attention: list[Options] = [
        {"metric": "previous"},
        *({"ratio": ratio, "proportional": True} for ratio in (0.25, 0.5, 0.75)),
        {"ratio": 0.75, "window": 8, "proportional": True},
        {"ratio": 0.75, "selector": "grid"},
    ]
    single: dict[str, list[Options]] = {
        "attn": [
            {"protect": "guidance"},
            {"start": 0.3},
            {"ratio": 0.6, "window": 8, "proportional": True},
        ],
        "kv": [
            {"ratio": 0.75, "window": 8, "max_downsample": 2},
            {"level_ratios": {1: 0.75, 2: 0.5}},
            {"proportional": True, "window": 0},
            {"proportional": True, "end": 0.8},
            {"ratio": 0.75, "selector": "grid", "end": 0.8},
            {"ratio": 0.75, "selector": "grid", "start": 0.2},
        ],
        "block": [
            {"share": "steps"},
            *({"ratio": 0.75, "end": end} for end in (0.6, 0.8, 0.9)),
        ],
    }
    rows = [original(r) for r in (0.1, 0.25, 0.4, 0.5, 0.6, 0.75)]
    rows += [original(r, **EVERYTHING) for r in (0.25, 0.5, 0.75)]
    for target, own in single.items():
        shared = for_each if target == "block" else for_each + for_attention
        for changes in shared + own:
            options = {"target": target, "ratio": 0.5, **changes}
            rows.append(ours(in_words(options), target, **options))
    return rows


def in_words(settings: Options) -> str:
    """Settings in short: the target and the ratio, then the others by name."""
    parts = [f"{settings.get('target', 'attn')} {settings.get('ratio', 0.5):g}"]
    for name, value in settings.items():
        if name in ("target", "ratio"):
            continue
        if value is True:
            parts.append(name)
        elif isinstance(value, dict):
            parts.append(name + " " + "/".join(f"{ratio:g}" for ratio in value.values()))
        else:
            parts.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(parts)


SECTIONS = {
    "paper": Section(paper(), 2000),
    "front": Section(front(), 2000),
    "ablations": Section(ablations(), 250),
    "seed": Section(other_algorithms(), 250),
    "search": Section(search(), 128, 30, "ddim"),
}
