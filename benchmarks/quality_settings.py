"""What quality.py compares: one list of settings for each section."""

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tomesd
from tomesd.bench.models import shared_copy
from tomesd.schedule import Noise, ratio_at

UNMERGED, ORIGINAL, OURS = "unmerged", "original", "tomesd"

# What the paper means by merging everything, everywhere; this model has three levels.
EVERYTHING = {"max_downsample": 4, "merge_crossattn": True, "merge_mlp": True}
# The whole image is searched, as in the paper.
AS_PAPER = {"ratio": 0.5, "window": 0, **EVERYTHING}


@dataclass(frozen=True)
class Candidate:
    """One row: a way to run the model."""

    variant: str
    settings: dict[str, Any]
    """What `apply_patch` is given, of this library or of the original."""
    label: str
    group: str = ""
    """What it is compared within."""
    shown: bool = False
    """Whether a few of its images are written down."""

    def apply(self, pipe: Any, unet: Any, original: Any = None) -> Any:
        """A patched copy of `unet` that shares its weights. `pipe` knows the noise levels."""
        patched = shared_copy(unet)
        if self.variant == ORIGINAL:
            if original is None:
                raise ValueError("original: give the folder of tomesd 0.1.3 with --original")
            torch.manual_seed(0)  # it draws from the global generators
            original.apply_patch(patched, **self.settings)
        elif self.variant == OURS:
            around = copy.copy(pipe)
            around.unet = patched
            tomesd.apply_patch(around, **_with_int_keys(self.settings))
        return patched

    def ratios(self, pipe: Any) -> set[float]:
        """The ratios that it goes through while an image is made."""
        if self.variant != OURS:
            return {self.settings.get("ratio", 0.0)}
        settings = tomesd.Settings(**_with_int_keys(self.settings))
        if not settings.changes:
            return {settings.ratio}
        kept = pipe.scheduler.alphas_cumprod
        noise = Noise(len(kept), tuple((1 - kept).tolist()))
        return {ratio_at(t, settings, noise) for t in range(len(kept))}


def _with_int_keys(settings: dict[str, Any]) -> dict[str, Any]:
    """Levels are numbers, but words in JSON."""
    ratios = settings.get("level_ratios")
    if ratios is None:
        return settings
    return {**settings, "level_ratios": {int(level): r for level, r in ratios.items()}}


def ours(label: str, group: str = "", *, shown: bool = False, **settings: Any) -> Candidate:
    """No rule may leave a layer alone: what a row says has to be merged."""
    return Candidate(OURS, {"when": "always", **settings}, label, group, shown)


def original(ratio: float, group: str = "", *, shown: bool = False, **settings: Any) -> Candidate:
    words = ", everything" if "merge_mlp" in settings else ""
    return Candidate(
        ORIGINAL, {"ratio": ratio, **settings}, f"0.1.3 {ratio:g}{words}", group, shown
    )


def unmerged(label: str = UNMERGED) -> Candidate:
    return Candidate(UNMERGED, {}, label, shown=label == UNMERGED)


def paper() -> list[Candidate]:
    rows = []
    for tenths in range(1, 7):
        ratio = tenths / 10
        rows.append(original(ratio, shown=tenths in (3, 5, 6)))
        rows.append(ours(f"this library {ratio:g}", ratio=ratio, shown=tenths in (3, 5, 6)))
    return rows


def windows() -> list[Candidate]:
    """Where tokens look for their like."""
    rows = [ours(f"windows of {side}x{side}", ratio=0.3, window=side) for side in (16, 4)]
    return [
        original(0.3),
        ours("whole image", ratio=0.3, window=0),
        ours("windows of 8x8", ratio=0.3),
        *rows,
    ]


def far() -> list[Candidate]:
    """The same where nearly every source has to merge; to be run on more tokens than usual."""
    rows = [ours(f"windows of {side}x{side}", ratio=0.75, window=side) for side in (64, 32, 8)]
    return [original(0.75), ours("whole image", ratio=0.75, window=0), *rows]


def ablations() -> list[Candidate]:
    """Each from the paper's starting point: everything is merged at all levels, r = 0.5.

    The paper's fully random destinations cannot be had: each cell has one. Cells of 4x1 and 1x4
    stand for less evenly spread ones.
    """
    at_attention = {**AS_PAPER, "merge_crossattn": False, "merge_mlp": False}
    return [
        ours("random in 2x2", "partition", **AS_PAPER),
        ours("strided 2x2", "partition", **AS_PAPER, use_rand=False),
        ours("random in 4x1", "partition", **AS_PAPER, sx=4, sy=1),
        ours("random in 1x4", "partition", **AS_PAPER, sx=1, sy=4),
        ours("strided 4x1", "partition", **AS_PAPER, sx=4, sy=1, use_rand=False),
        ours("self-attention", "layers", **at_attention),
        ours("+ cross-attention", "layers", **{**at_attention, "merge_crossattn": True}),
        ours("+ feed-forward", "layers", **{**at_attention, "merge_mlp": True}),
        ours("everything", "layers", **AS_PAPER),
        ours("level 1", "levels", **{**AS_PAPER, "max_downsample": 1}),
        ours("levels 1-2", "levels", **{**AS_PAPER, "max_downsample": 2}),
        ours("levels 1-4", "levels", **AS_PAPER),
        ours("flat 50 %", "schedule", **AS_PAPER),
        ours("60 to 40 %", "schedule", **{**AS_PAPER, **linear(0.6, 0.4)}),
        ours("40 to 60 %", "schedule", **{**AS_PAPER, **linear(0.4, 0.6)}),
        ours("50 %, first half of the steps", "schedule", **AS_PAPER, end=0.5),
        ours("50 %, second half of the steps", "schedule", **AS_PAPER, start=0.5),
    ]


def linear(first: float, last: float) -> dict[str, Any]:
    return {"ratio": first, "ratio_end": last, "schedule": "linear"}


def seed(tau_40: float) -> list[Candidate]:
    """The variants of the summary of the paper: k-means, similarity to the mean, a noise threshold.

    Args:
        tau_40: the threshold below which 40 % of the steps lie, as it says of its own.
    """
    rows = [ours(f"bipartite {r:g}", "paper", ratio=r) for r in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)]
    for ratio in (0.25, 0.5, 0.7):
        half = {"ratio": ratio}
        rows += [
            ours(f"k-means {ratio:g}", "kmeans", selector="kmeans", **half),
            ours(f"similarity to the mean {ratio:g}", "mean", metric="mean", **half),
        ]
    both = {"selector": "kmeans", "metric": "mean"}
    rows += [
        ours("threshold 0.2, 0.5", "tau", ratio=0.5, tau=0.2),
        ours("threshold at 40 % of the steps, 0.5", "tau", ratio=0.5, tau=tau_40),
        ours("threshold at 40 % of the steps, 0.7", "tau", ratio=0.7, tau=tau_40),
        ours("k-means, mean, 0.5", "all", ratio=0.5, **both),
        ours("all three, 0.5", "all", ratio=0.5, tau=tau_40, **both),
        ours("all three, 0.7", "all", ratio=0.7, tau=tau_40, **both),
    ]
    return rows


def search() -> list[Candidate]:
    """Each idea on its own, and those that go well together.

    In this model every stack has one block, so that `stack` is `block`.
    """
    rows = [original(r) for r in (0.1, 0.25, 0.4, 0.5, 0.6, 0.75)]
    rows += [original(r, **EVERYTHING) for r in (0.25, 0.5, 0.75)]
    targets = ("attn", "kv", "block")
    grids: list[dict[str, Any]] = [
        {"target": target, "ratio": ratio} for target in targets for ratio in (0.25, 0.5, 0.75)
    ]
    attn, kv, block = ({"target": target, "ratio": 0.5} for target in targets)
    for half in (attn, kv, block):
        grids += [{**half, "selector": "grid"}, {**half, "selector": "kmeans"}]
        grids += [{**half, "metric": "keys"}, {**half, "share": "level"}]
        grids += [{**half, "max_downsample": 4}, {**half, **linear(0.75, 0.25)}]
        grids += [{**half, "end": end} for end in (0.6, 0.8)]
    grids += [{**half, "metric": "previous"} for half in (attn, kv)]
    grids += [{**attn, "protect": "guidance"}, {**attn, "start": 0.3}, {**block, "share": "steps"}]
    most = {"ratio": 0.75, "window": 8}
    grids += [{"target": target, **most} for target in targets]
    grids += [{"target": target, **most, "end": 0.8} for target in targets]
    grids += [{"target": "block", "ratio": 0.75, "end": end} for end in (0.6, 0.8, 0.9)]
    grids += [{"target": "kv", **most, "max_downsample": 2}]
    grids += [{"target": "kv", "ratio": 0.5, "level_ratios": {1: 0.75, 2: 0.5}}]
    for half in (attn, kv):
        grids += [{**half, "ratio": ratio, "proportional": True} for ratio in (0.25, 0.5, 0.75)]
        grids += [{**half, **most, "proportional": True}]
    grids += [{**kv, "proportional": True, "window": 0}, {**kv, "proportional": True, "end": 0.8}]
    cells = {"target": "kv", "ratio": 0.75, "selector": "grid"}
    grids += [cells, {**cells, "end": 0.8}, {**cells, "start": 0.2}]
    grids += [{"ratio": 0.75, "selector": "grid", "target": "attn"}]
    grids += [{**most, "target": "attn", "ratio": 0.6, "proportional": True}]
    grids += [{**block, "start": start, "end": 0.8} for start in (0.1, 0.2)]
    return rows + [ours(words(settings), settings["target"], **settings) for settings in grids]


def words(settings: dict[str, Any]) -> str:
    """Settings in short: the target and the ratio, then the others by name."""
    rest = {k: v for k, v in settings.items() if k not in ("target", "ratio", "when")}
    parts = [f"{settings.get('target', 'attn')} {settings.get('ratio', 0.5):g}"]
    for name, value in rest.items():
        if value is True:
            parts.append(name)
        elif isinstance(value, dict):
            parts.append(name + " " + "/".join(f"{ratio:g}" for ratio in value.values()))
        else:
            parts.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(parts)


def front(file: Path) -> list[Candidate]:
    """The original, and the settings in a JSON list; an entry may have a "label" of its own."""
    rows = [original(tenths / 10) for tenths in range(1, 7)]
    rows += _listed(json.loads(file.read_text(encoding="utf-8")))
    return [*rows, original(0.75), original(0.5, **EVERYTHING, shown=True)]


def _listed(entries: Iterable[dict[str, Any]]) -> Iterable[Candidate]:
    for entry in entries:
        settings = {name: value for name, value in entry.items() if name != "label"}
        yield ours(entry.get("label", words(settings)), "front", shown=True, **settings)
