"""The rule `when="if_faster"`: what merging saves in a model, and what it costs there.

A model takes as long as its device or its host does, whichever is slower. So merging is judged for
the model as a whole: it pays where that time falls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from . import kernels
from .machine import Launcher, Machine, find_launcher, machine_of
from .outline import Layers, Level
from .segments import Segment, tokens_removed
from .selectors import Selector
from .settings import Settings

LeftAlone = Literal["", "not faster", "pays in CUDA graphs only", "attention is cached"]
"""Why blocks that could merge are left alone; empty if they merge. Merging costs more than it
saves; or it does unless CUDA graphs relieve the host of launching kernels; or a cache keeps the
output of attention for later steps, at which other tokens would be merged."""


@dataclass(frozen=True)
class Work:
    """What a part of a model takes in a call."""

    device: float = 0.0
    """Seconds."""
    launches: float = 0.0
    """Work of the host, counted in starts of PyTorch's kernels."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.device + other.device, self.launches + other.launches)

    __iadd__ = __add__  # PyTorch 2.11 does not compile `+=` without it

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.device - other.device, self.launches - other.launches)

    def __mul__(self, share: float) -> "Work":
        return Work(share * self.device, share * self.launches)

    def seconds(self, machine: Machine) -> float:
        host = self.launches * machine.launch
        return max(self.device, host) if machine.apart else self.device + host


@dataclass(frozen=True)
class Verdict:
    """Where merging pays, and what is expected of it."""

    pays: tuple[bool, ...]
    before: float
    """Seconds of a call without merging."""
    after: float
    """With it, where it pays."""
    everywhere: float
    """With it, also where it does not pay."""

    @property
    def gain(self) -> float:
        """How many times as fast a call is expected to be."""
        return self.before / self.after

    def __str__(self) -> str:
        before, after, everywhere = [
            f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"
            for seconds in (self.before, self.after, self.everywhere)
        ]
        if any(self.pays):
            return f"expected to be {self.gain:.2f}x as fast, {before} to {after} ms a call"
        return f"expected to take {everywhere} ms a call merged, and {before} ms unmerged"


def compare(
    machine: Machine,
    model: Work,
    changes: Sequence[tuple[Work, Work]],
    pays: tuple[bool, ...] | None = None,
) -> Verdict:
    """Which changes make a model faster, each on top of those before it.

    Args:
        model: all that it does unchanged.
        changes: for each, what a part of the model does without it and with it.
        pays: what has been decided already.
    """
    after = everywhere = model
    decided = []
    for number, (old, new) in enumerate(changes):
        more = after + (new - old)
        faster = bool(more.seconds(machine) < after.seconds(machine))
        decided.append(faster if pays is None else pays[number])
        after = more if decided[-1] else after
        everywhere += new - old
    works = (model, after, everywhere)
    return Verdict(tuple(decided), *[work.seconds(machine) for work in works])


@dataclass(frozen=True)
class Change:
    """What merging does to a level of a model."""

    level: Level
    share: float
    """Share of its blocks that merge."""
    tokens: int
    segments: dict[tuple[str, ...], tuple[Segment, ...]]
    """See `Decision`."""
    score_heads: int = 0
    """Heads of self-attention that writes its scores to memory; 0 if it is fused."""


def judge(
    settings: Settings,
    selector: Selector,
    x: Tensor,
    fullness: float,
    changes: Sequence[Change],
    around: Sequence[tuple[int, Layers]] = (),
) -> tuple[tuple[LeftAlone, ...], Verdict]:
    """Why to leave out each of the changes, or ""; and what is expected of the others.

    An image must not depend on how guidance is run, so a call with one half of it is judged like
    one with both.

    Args:
        x: what goes into the model, `[B, ...]`.
        fullness: how many times as many items it would have with both halves of guidance.
        around: what runs around the blocks, with how many places it runs on.
    """
    machine, launcher = machine_of(x.device, x.dtype), find_launcher(x.device)
    batch, here = x.shape[0], machine.run_by(launcher)
    triton, size = kernels.use_triton(settings.backend, x), x.element_size()
    full = _Estimate(machine, launcher, settings, selector, batch * fullness, size, triton)
    work = full.work(changes, around)
    verdict = compare(here, *work)
    pays_in_graphs = verdict.pays
    if machine.apart and x.device.type != "mps":
        pays_in_graphs = compare(machine.run_by("graph"), *work).pays
    if fullness != 1:  # decided above, but the times are those of the items there are
        verdict = compare(here, *replace(full, items=batch).work(changes, around), verdict.pays)
    left_alone: list[LeftAlone] = [
        "" if pays else "pays in CUDA graphs only" if in_graphs else "not faster"
        for pays, in_graphs in zip(verdict.pays, pays_in_graphs, strict=True)
    ]
    return tuple(left_alone), verdict


# Attention that is not fused writes its scores, reads and writes them for the softmax, and reads
# them again. All that takes about as long as reading or writing them so many times in a copy.
_SCORE_PASSES = 10
# Kernels that plain PyTorch takes to match tokens, and to merge or restore them once.
_REFERENCE_MATCHING, _REFERENCE_MERGING = 50, 6
# Channels are added to queries, keys and values for proportional attention.
_WIDENING_KERNELS = 10
# How many times as long the host takes to start a kernel of this library as one of PyTorch's.
_EFFORT: dict[Launcher, float] = {"eager": 3.0, "compiled": 1.0, "graph": 1.0}


@dataclass(frozen=True)
class _Estimate:
    """Counts what a call of a model does, unmerged and merged."""

    machine: Machine
    launcher: Launcher
    settings: Settings
    selector: Selector
    items: float
    item_size: int
    """Bytes of a number."""
    triton: bool

    def work(
        self, changes: Sequence[Change], around: Sequence[tuple[int, Layers]]
    ) -> tuple[Work, list[tuple[Work, Work]]]:
        """What the whole model does unmerged; and for each change, what its level does without it
        and with it."""
        model, pairs = Work(), []
        for places, layers in around:
            model += self._layers(layers, places, places)
        for change in changes:
            before = Work()
            for kind in change.level.kinds:
                before += self._kind(change, kind, change.tokens, change.tokens)
            model += before
            pairs.append((before, self._merged(change) if change.segments else before))
        return model, pairs

    def _kind(self, change: Change, kind: str, queries: float, keys: float) -> Work:
        """What the layers of a kind do on so many tokens."""
        heads = change.score_heads if kind == "attn" else 0
        return self._layers(change.level.kinds[kind], queries, keys, heads)

    def _layers(self, layers: Layers, queries: float, keys: float, score_heads: int = 0) -> Work:
        """Layers on so many tokens. Keys and values are half of the linear layers of attention."""
        tokens, pairs = self.items * (queries + keys) / 2, self.items * queries * keys
        operations, attention = tokens * layers.operations, pairs * layers.pairs
        moved = tokens * layers.numbers
        if score_heads:  # the products are those of linear layers, and scores go through memory
            operations, attention = operations + attention, 0.0
            moved += _SCORE_PASSES * pairs * score_heads
        moved *= self.item_size
        seconds = self.machine.seconds(operations, attention, moved, layers.kernels)
        return Work(seconds, layers.kernels)

    def _merged(self, change: Change) -> Work:
        """What a level does merged, with matching, merging and restoring."""
        level, tokens, whole = change.level, change.tokens, self.settings.whole_blocks
        left_of = {
            kind: tokens - tokens_removed(parts)
            for kinds, parts in change.segments.items()
            for kind in kinds
        }
        total = self._matching(change)
        if whole:
            total += self._moving(change, self._runs(level), 2, min(left_of.values()))
        for kind in level.kinds:
            left = min(left_of.values()) if whole else left_of.get(kind, tokens)
            keys_only = kind == "attn" and self.settings.target == "kv"
            queries = tokens if keys_only else left
            before = self._kind(change, kind, tokens, tokens)
            after = self._kind(change, kind, queries, left)
            total += before + (after - before) * change.share
            if kind in left_of and not whole:
                total += self._moving(change, level.blocks, 1 if keys_only else 2, left)
                if self.settings.proportional and kind == "attn":
                    total += self._widening(change, queries + 2 * left)
        return total

    def _runs(self, level: Level) -> int:
        """Runs of blocks that are merged together."""
        return level.stacks if self.settings.target == "stack" else level.blocks

    def _moving(self, change: Change, regions: int, ways: int, left: float) -> Work:
        """Merging, and with two ways restoring too, in so many regions of a level."""
        times = ways * regions * change.share
        count = times * (1 if self.triton else _REFERENCE_MERGING)
        return self._ours(change, count, times * (change.tokens + left))

    def _widening(self, change: Change, rows: float) -> Work:
        """Adding channels to rows for proportional attention, and cutting them off."""
        times = change.level.blocks * change.share
        return self._ours(change, times * _WIDENING_KERNELS, 2 * times * rows)

    def _matching(self, change: Change) -> Work:
        """Making the plans of a level."""
        level, settings = change.level, self.settings
        plans = 1.0
        if settings.share == "block":
            plans = change.share * self._runs(level)
        elif settings.share == "steps":
            plans /= settings.refresh
        total = Work()
        for parts in change.segments.values():
            matched = [(part.cells, part) for part in parts if part.cells is not None]
            compare_in, launch_in = self.selector.comparisons, self.selector.launches
            comparisons = sum([p.groups * compare_in(cells, p.remove) for cells, p in matched])
            launches = sum([launch_in(cells) for cells, _ in matched])
            if not self.triton and launches > 0:
                launches = max(launches, _REFERENCE_MATCHING)
            products = 2.0 * plans * self.items * comparisons * level.channels
            total += self._ours(change, plans * launches, 2 * plans * change.tokens)
            total += Work(self.machine.seconds(operations=products))
        return total

    def _ours(self, change: Change, count: float, rows: float) -> Work:
        """Kernels of this library that read and write so many rows of each item."""
        moved = rows * self.items * change.level.channels * self.item_size
        effort = _EFFORT[self.launcher] if self.triton else 1.0
        return Work(self.machine.seconds(moved=moved, kernels=count), effort * count)
