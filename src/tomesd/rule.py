"""The rule `when="if_faster"`: what merging saves in a model, and what it costs there."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import kernels
from .cost import Verdict, Work, compare, expect
from .machine import Launcher, Machine, find_launcher, machine_of
from .outline import Layers, Level
from .selectors import Selector
from .settings import Settings
from .state import Call, LeftAlone, Segment, tokens_removed

_log = logging.getLogger("tomesd")


@dataclass(frozen=True)
class Change:
    """What merging does to a level of a model."""

    level: Level
    share: float
    """Of its blocks that merge."""
    tokens: int
    segments: dict[tuple[str, ...], tuple[Segment, ...]]
    """See `Decision`."""
    score_heads: int = 0
    """Heads of self-attention that writes its scores to memory; 0 if it is fused."""


def judge(
    call: Call,
    x: Tensor,
    batch: int,
    changes: Sequence[Change],
    around: Sequence[tuple[int, Layers]] = (),
) -> tuple[LeftAlone, ...]:
    """Which changes to leave out, and why. What is expected of the others is noted in the call.

    An image must not depend on how guidance is run, so a call with one half of it is judged like
    one with both.

    Args:
        batch: items that go through the blocks.
        around: what runs around the blocks, with how many places it runs on.
    """
    machine, launcher = machine_of(x.device, x.dtype), find_launcher(x.device)
    triton = kernels.use_triton(call.settings.backend, x)
    items, size = batch * call.fullness, x.element_size()
    full = _Estimate(machine, launcher, call.settings, call.selector, items, size, triton)
    model, pairs = full.compared(changes, around)
    verdict = compare(machine.run_by(launcher), model, pairs)
    in_graphs = verdict.pays
    if machine.apart and x.device.type != "mps":
        in_graphs = compare(machine.run_by("graph"), model, pairs).pays
    if call.fullness != 1:
        model, pairs = replace(full, items=batch).compared(changes, around)
        verdict = expect(machine.run_by(launcher), model, pairs, verdict.pays)
    call.verdict = verdict
    if not torch.compiler.is_compiling():
        _tell_once(call, verdict)
    return tuple([_word(*found) for found in zip(verdict.pays, in_graphs, strict=True)])


def _word(pays: bool, in_graph: bool) -> LeftAlone:
    if pays:
        return ""
    return "pays in CUDA graphs only" if in_graph else "not faster"


def _tell_once(call: Call, verdict: Verdict) -> None:
    told = f"latent {call.size[0]}x{call.size[1]}: {expectation(verdict)}"
    if told not in call.patch.warned:
        call.patch.warned.add(told)
        _log.info(told)


def expectation(verdict: Verdict) -> str:
    """What the rule expects, in words."""
    before, after, everywhere = [
        f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"
        for seconds in (verdict.before, verdict.after, verdict.everywhere)
    ]
    if any(verdict.pays):
        return f"expected to be {verdict.gain:.2f}x as fast, {before} to {after} ms a call"
    return f"expected to take {everywhere} ms a call merged, and {before} ms unmerged"


# Attention that is not fused writes its scores, reads and writes them for the softmax, and reads
# them again. All that takes about as long as reading or writing them so many times in a copy.
_SCORE_PASSES = 10
# Kernels that plain PyTorch takes to match tokens, and to merge or restore them once.
_REFERENCE_MATCHING, _REFERENCE_MERGING = 50, 6
# Channels are added to queries, keys and values for proportional attention.
_WIDENING_KERNELS = 10
# What the host does for a kernel of this library, in what it does for one of PyTorch's.
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

    def compared(
        self, changes: Sequence[Change], around: Sequence[tuple[int, Layers]]
    ) -> tuple[Work, list[tuple[Work, Work]]]:
        """What the whole model does unmerged; and what each level does unmerged and merged."""
        model, pairs = Work(), []
        for places, layers in around:
            model += self._run(layers, places, places)
        for change in changes:
            before = self._unmerged(change)
            model += before
            pairs.append((before, self._merged(change) if change.segments else before))
        return model, pairs

    def _run(self, layers: Layers, queries: float, keys: float) -> Work:
        """Layers on so many tokens. Keys and values are half of the linear layers of attention."""
        tokens = self.items * (queries + keys) / 2
        seconds = self.machine.seconds(
            operations=tokens * layers.operations,
            attention=self.items * queries * keys * layers.pairs,
            moved=tokens * layers.numbers * self.item_size,
            kernels=layers.kernels,
        )
        return Work(seconds, layers.kernels)

    def _unmerged(self, change: Change) -> Work:
        """What a level does without merging."""
        total = Work()
        for kind in change.level.kinds:
            total += self._layers(change, kind, change.tokens, change.tokens)
        return total

    def _layers(self, change: Change, kind: str, queries: float, keys: float) -> Work:
        """What the layers of a kind do on so many tokens."""
        layers = change.level.kinds[kind]
        if kind != "attn" or change.score_heads == 0:
            return self._run(layers, queries, keys)
        # Unfused: the products are those of linear layers, and all scores go through memory.
        products = self.items * queries * keys * layers.pairs
        scores = self.items * queries * keys * change.score_heads
        work = self._run(replace(layers, pairs=0.0), queries, keys)
        moved = _SCORE_PASSES * scores * self.item_size
        return work + Work(self.machine.seconds(operations=products, moved=moved))

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
            runs = level.stacks if self.settings.target == "stack" else level.blocks
            total += self._moving(change, runs, 2, min(left_of.values()))
        for kind in level.kinds:
            left = min(left_of.values()) if whole else left_of.get(kind, tokens)
            keys_only = kind == "attn" and self.settings.target == "kv"
            queries = tokens if keys_only else left
            before = self._layers(change, kind, tokens, tokens)
            after = self._layers(change, kind, queries, left)
            total += before + (after - before) * change.share
            if kind in left_of and not whole:
                total += self._moving(change, level.blocks, 1 if keys_only else 2, left)
                if self.settings.proportional and kind == "attn":
                    total += self._widening(change, queries + 2 * left)
        return total

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
            plans = change.share * (level.stacks if settings.target == "stack" else level.blocks)
        elif settings.share == "steps":
            plans /= settings.refresh
        total = Work()
        for parts in change.segments.values():
            comparisons, launches = _count_matching(self.selector, parts)
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


def _count_matching(selector: Selector, parts: tuple[Segment, ...]) -> tuple[int, int]:
    """Pairs that are compared for a plan of one item, and kernels."""
    comparisons = launches = 0
    for segment in parts:
        if segment.volume is None:
            continue
        for group, remove in zip(segment.volume.parts, segment.removes, strict=True):
            comparisons += group.groups * selector.comparisons(group.cells, remove)
            launches += selector.launches(group.cells)
    return comparisons, launches
