"""How many tokens to remove on a grid, and whether that pays. Nothing here has a state."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kernels
from .cost import Layers, Level, Verdict, Work, compare, expect
from .grids import level_merges, level_of, removable
from .machine import Launcher, find_launcher, machine_of
from .selectors import Selector
from .settings import Settings
from .state import Call, Decision, Grid, LeftAlone, Segment, tokens_removed
from .volume import Volume

__all__ = ["Layout", "LayoutPart", "decide", "decide_layout", "expectation", "explain_nothing"]


@dataclass(frozen=True)
class LayoutPart:
    tokens: int
    grid: Grid | None = None
    """None: not on a grid, and so left alone."""
    reference: bool = False
    """Whether it is a reference image, whose output is discarded."""


@dataclass(frozen=True)
class Layout:
    """What a transformer's sequence of image tokens is made of."""

    size: tuple[int, int]
    """Height and width of the latent."""
    grid: Grid
    """Of the image or video that is made."""
    parts: tuple[LayoutPart, ...]
    start: Tensor | None = None
    """Where they begin in a joint sequence, `[B]`, if items differ in that."""

    axes: tuple[int, ...] | None = None
    """How to turn what the model gets into `[B, C, F, H, W]`, if it is not that."""

    @property
    def tokens(self) -> int:
        return sum([part.tokens for part in self.parts])

    def tokens_of(self, latent: Any) -> Tensor:
        """What the model makes tokens of, in their order: `[B, N, C]`.

        Args:
            latent: `[B, N, C]`, `[B, C, H, W]` or `[B, C, F, H, W]`; or a list of its items.
                Tokens that are not in it are zeros.
        """
        if not isinstance(latent, Tensor):
            latent = torch.stack(list(latent))
        if latent.ndim in (3, 6):  # packed: tokens, or patches [B, N, C, 1, 2, 2]
            return latent.flatten(2)
        if self.axes is not None:
            latent = latent.permute(self.axes)
        if latent.ndim == 4:
            latent = latent.unsqueeze(2)
        (batch, channels, frames), (t, h, w) = latent.shape[:3], self.grid
        made = sum([part.tokens for part in self.parts if not part.reference])
        if made % (h * w) == 0:  # frames that are given count too
            t = made // (h * w)
        # Whole patches: models leave out what is over, or pad what is missing.
        sides = ((frames, t), (latent.shape[3], h), (latent.shape[4], w))
        long, high, wide = (max(1, (2 * side + n) // (2 * n)) for side, n in sides)
        more = (w * wide - latent.shape[4], h * high - latent.shape[3], t * long - frames)
        latent = F.pad(latent, (0, more[0], 0, more[1], 0, more[2]))
        patches = latent.reshape(batch, channels, t, long, h, high, w, wide)
        tokens = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, t * h * w, -1)
        return F.pad(tokens, (0, 0, 0, self.tokens - t * h * w))


_log = logging.getLogger("tomesd")

_Answer = TypeVar("_Answer")

Segments = dict[tuple[str, ...], tuple[Segment, ...]]


def decide(call: Call, grid: Grid, blocks: int, x: Tensor, score_heads: int = 0) -> Decision:
    """What merges in the blocks of a UNet on a grid; it is noted in the call.

    Args:
        blocks: that follow each other.
        x: what goes into them, `[B, ...]`.
        score_heads: heads of self-attention that writes its scores to memory; 0 if it is fused.
    """
    # In a UNet, the first attention is the finest.
    finest = call.decisions[0].grid if call.decisions else grid
    segments = _segments_on(call, grid, finest)
    decision = _note(call, Decision(grid, blocks, grid[1] * grid[2], segments))
    if decision.segments and call.settings.when == "if_faster":
        if call.left_alone is None:
            judge = partial(_judge_unet, call, x, score_heads)
            call.left_alone = _once(call, x, score_heads, judge)
        found = call.left_alone.get(decision.level)
        # A level that the outline of the model does not have.
        decision.left_alone = "not faster" if found is None else found
    return decision


def decide_layout(call: Call, layout: Layout, blocks: int, x: Tensor) -> Decision:
    """What merges in the blocks of a transformer; it is noted in the call.

    Args:
        blocks: that merge.
        x: the latent, `[B, ...]`.
    """
    settings, ratio = call.settings, _ratio(call)
    of_references = ratio if settings.reference_ratio is None else settings.reference_ratio
    parts = []
    for part in layout.parts:
        wanted = of_references if part.reference else ratio
        if part.grid is None or call.ratio == 0:  # nothing merges at this time
            parts.append(Segment(part.tokens))
        else:
            parts.append(_segment(settings, part.grid, wanted))
    decision = Decision(layout.grid, blocks, layout.tokens, {settings.kinds: tuple(parts)})
    decision.start = layout.start
    _note(call, decision)
    if decision.segments and settings.when == "if_faster":
        (level,) = call.patch.outline.levels
        change = _Change(level, blocks / level.blocks, layout.tokens, decision.segments)
        judge = partial(_judge, call, x, x.shape[0] if x.ndim > 2 else 1, [change])
        (decision.left_alone,) = _once(call, x, (blocks, layout.parts), judge)
    return decision


def _note(call: Call, decision: Decision) -> Decision:
    """Drops what removes nothing, and notes the decision in the call."""
    decision.level = level_of(call.size, decision.grid[1:])
    decision.number = len(call.decisions)
    decision.segments = {
        kinds: parts
        for kinds, parts in decision.segments.items()
        if call.settings.active and tokens_removed(parts) > 0
    }
    call.decisions.append(decision)
    return decision


def _ratio(call: Call) -> float:
    return call.settings.ratio if call.ratio is None else call.ratio


def _segments_on(call: Call, grid: Grid, finest: Grid) -> Segments:
    """What can go on a grid of a UNet."""
    settings, size = call.settings, grid[1:]
    level = level_of(call.size, size)
    named = settings.level_ratios is not None and level in settings.level_ratios
    if not named and not level_merges(settings.max_downsample, call.size, finest[1:], size):
        return {}
    # By ratio, because tokens may be symbols to the compiler, which it would have to look up.
    kinds: dict[float, tuple[str, ...]] = {}
    for kind in settings.kinds:
        wanted = settings.ratio_of(kind, level, _ratio(call))
        kinds[wanted] = (*kinds.get(wanted, ()), kind)
    return {k: (_segment(settings, grid, wanted),) for wanted, k in kinds.items()}


def _segment(settings: Settings, grid: Grid, ratio: float) -> Segment:
    """Tokens on a grid, of which a ratio is to be removed."""
    volume = Volume.of(grid, settings.sy, settings.sx, settings.st or 1, settings.search)
    removes = tuple([removable(settings, part.cells, ratio) for part in volume.parts])
    return Segment(volume.tokens, volume, removes)


@dataclass(frozen=True)
class _Change:
    """What merging does to a level of a model."""

    level: Level
    share: float
    """Of its blocks that merge."""
    tokens: int
    segments: Segments
    score_heads: int = 0


def _once(call: Call, x: Tensor, question: Any, judge: Callable[[], _Answer]) -> _Answer:
    """What is judged, or what was said about the same question.

    Args:
        question: what it is about, besides what is known of every call.
    """
    patch, settings = call.patch, call.settings
    own = settings is patch.settings or settings is patch.by_selector.get(settings.selector)
    if torch.compiler.is_compiling() or not own:
        return judge()
    launcher = find_launcher(x.device)
    asked = (call.size, x.shape, x.dtype, x.device, launcher)
    key = (*asked, settings.selector, call.ratio, call.fullness, question)
    if key not in patch.judged:
        if len(patch.judged) >= 64:
            patch.judged.clear()
        patch.judged[key] = judge(), call.verdict
    answer, call.verdict = patch.judged[key]
    return answer


def _judge_unet(call: Call, x: Tensor, score_heads: int) -> dict[int, LeftAlone]:
    """By level, whether it merges; judged once in a call, for the model as a whole."""
    (h, w), outline = call.size, call.patch.outline
    changes: list[_Change] = []
    found: list[int] = []
    finest: Grid | None = None
    for level in outline.levels:
        rows, columns = [-(-side // level.scale) // level.patch_size for side in (h, w)]
        grid = (1, rows, columns)
        finest = finest or grid
        parts = _segments_on(call, grid, finest)
        parts = {kinds: part for kinds, part in parts.items() if tokens_removed(part) > 0}
        changes.append(_Change(level, 1.0, rows * columns, parts, score_heads))
        found.append(level_of(call.size, grid[1:]))
    around = [(-(-h // scale) * -(-w // scale), layers) for scale, layers in outline.around]
    return dict(zip(found, _judge(call, x, x.shape[0], changes, around), strict=True))


def _judge(
    call: Call,
    x: Tensor,
    batch: int,
    changes: list[_Change],
    around: list[tuple[int, Layers]] | None = None,
) -> tuple[LeftAlone, ...]:
    """Which changes to leave out, and why.

    An image must not depend on how guidance is run, so a call with one half of it is judged like
    one with both.

    Args:
        batch: items that go through the blocks.
        around: what runs around the blocks, with how many places it runs on.
    """
    items = batch * call.fullness
    launcher = find_launcher(x.device)
    size = x.element_size()
    settings = call.settings
    triton = kernels.use_triton(settings.backend, x)
    model = Work()
    for places, layers in around or []:
        model += layers.work(items, places, places, size)
    pairs = []
    for change in changes:
        before = _work(change, items, size)
        model += before
        merged = before
        if change.segments:
            merged = _merged(change, settings, call.selector, items, size, triton, launcher)
        pairs.append((before, merged))
    machine = machine_of(x.device, x.dtype)
    whole = model
    verdict = compare(machine.run_by(launcher), whole, pairs)
    if call.fullness != 1:
        share = 1 / call.fullness
        model = whole.on_share(share)
        own = [(old.on_share(share), new.on_share(share)) for old, new in pairs]
        verdict = expect(machine.run_by(launcher), model, own, verdict.pays)
    call.verdict = verdict
    if not torch.compiler.is_compiling():
        _tell_once(call, verdict)
    in_graphs = [False for _ in changes]
    if machine.apart and x.device.type != "mps":
        in_graphs = list(compare(machine.run_by("graph"), whole, pairs).pays)
    told = zip(verdict.pays, in_graphs, strict=True)
    return tuple([_word(pays, in_graph) for pays, in_graph in told])


def _tell_once(call: Call, verdict: Verdict) -> None:
    told = f"latent {call.size[0]}x{call.size[1]}: {expectation(verdict)}"
    if told not in call.patch.warned:
        call.patch.warned.add(told)
        _log.info(told)


def _word(pays: bool, in_graph: bool) -> LeftAlone:
    if pays:
        return ""
    return "pays in CUDA graphs only" if in_graph else "not faster"


def _work(change: _Change, items: float, item_size: int) -> Work:
    """What a level does unmerged."""
    total = Work()
    for kind, layers in change.level.kinds.items():
        work = layers.work(items, change.tokens, change.tokens, item_size)
        total += _scores(kind, change, work, items * change.tokens**2 * item_size)
    return total


# Attention that is not fused writes its scores, reads and writes them for the softmax, and reads
# them again. All that takes about as long as reading or writing them so many times in a copy.
_SCORE_PASSES = 10


def _scores(kind: str, change: _Change, work: Work, pairs: float) -> Work:
    """The same work where attention writes its scores to memory."""
    if kind != "attn" or change.score_heads == 0:
        return work
    moved = work.moved + _SCORE_PASSES * change.score_heads * pairs
    operations = work.operations + work.attention
    return Work(operations, 0.0, moved, work.kernels, work.launches)


# Kernels that plain PyTorch takes to match tokens, and to merge or restore them once.
_REFERENCE = (50, 6)
# Channels are added to queries, keys and values for proportional attention.
_WIDENING_KERNELS = 10
# What the host does for a kernel of this library, in what it does for one of PyTorch's.
_EFFORT: dict[Launcher, float] = {"eager": 3.0, "compiled": 1.0, "graph": 1.0}


def _merged(
    change: _Change,
    settings: Settings,
    selector: Selector,
    items: float,
    size: int,
    triton: bool,
    launcher: Launcher,
) -> Work:
    """What a level does merged, with matching, merging and restoring."""
    level, tokens, whole = change.level, change.tokens, settings.whole_blocks
    row = items * level.channels * size
    times = change.share * (level.stacks if settings.target == "stack" else level.blocks)
    merge_kernels = 1 if triton else _REFERENCE[1]
    total, kernels_, moved = Work(), 0.0, 0.0
    left_of = {
        kind: tokens - tokens_removed(parts)
        for kinds, parts in change.segments.items()
        for kind in kinds
    }
    for kind, layers in level.kinds.items():
        left = min(left_of.values()) if whole else left_of.get(kind, tokens)
        keys_only = kind == "attn" and settings.target == "kv"
        queries = tokens if keys_only else left
        work = layers.work(items, queries, left, size)
        work = _scores(kind, change, work, items * queries * left * size)
        if whole and change.share < 1:
            full = layers.work(items, tokens, tokens, size)
            work = _mix(work, full, change.share)
        total += work
        if whole or kind not in left_of:
            continue
        ways = 1 if keys_only else 2
        kernels_ += ways * times * merge_kernels
        moved += ways * times * (tokens + left) * row
        if settings.proportional and kind == "attn":
            kernels_ += times * _WIDENING_KERNELS
            moved += 2 * times * (queries + 2 * left) * row
    if whole:
        kernels_ += 2 * times * merge_kernels
        moved += 2 * times * (tokens + min(left_of.values())) * row
    plans = times if settings.share == "block" else 1.0
    if settings.share == "steps":
        plans /= settings.refresh
    for parts in change.segments.values():
        comparisons, launches = _matching(selector, parts)
        if not triton and launches > 0:
            launches = max(launches, _REFERENCE[0])
        total += Work(
            operations=2.0 * plans * items * comparisons * level.channels,
            moved=2 * plans * tokens * row,
        )
        kernels_ += plans * launches
    effort = _EFFORT[launcher] if triton else 1.0
    return total + Work(moved=moved, kernels=kernels_, launches=effort * kernels_)


def _mix(one: Work, other: Work, share: float) -> Work:
    """Of two ways to do the same, a share the first way."""
    rest = 1 - share
    return Work(
        share * one.operations + rest * other.operations,
        share * one.attention + rest * other.attention,
        share * one.moved + rest * other.moved,
        one.kernels,
        one.launches,
    )


def _matching(selector: Selector, parts: tuple[Segment, ...]) -> tuple[int, int]:
    """Pairs that are compared for a plan of one item, and kernels."""
    comparisons = launches = 0
    for segment in parts:
        if segment.volume is None:
            continue
        for group, remove in zip(segment.volume.parts, segment.removes, strict=True):
            comparisons += group.groups * selector.comparisons(group.cells, remove)
            launches += selector.launches(group.cells)
    return comparisons, launches


def expectation(verdict: Verdict) -> str:
    """What the rule expects, in words."""
    before, after, everywhere = [
        f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"
        for seconds in (verdict.before, verdict.after, verdict.everywhere)
    ]
    if any(verdict.pays):
        return f"expected to be {verdict.gain:.2f}x as fast, {before} to {after} ms a call"
    return f"expected to take {everywhere} ms a call merged, and {before} ms unmerged"


def explain_nothing(call: Call) -> str:
    """Why a call merged nothing, in a sentence for the user."""
    settings, numbers = call.settings, ""
    if call.verdict is not None and not torch.compiler.is_compiling():  # symbols cannot be told
        numbers = f" ({expectation(call.verdict)})"
    reasons = [decision.left_alone for decision in call.decisions]
    if "pays in CUDA graphs only" in reasons:
        return (
            "tomesd merged nothing: at this image and batch size, the host, which launches every "
            f"kernel, is expected to take longer than merging saves{numbers}; where CUDA graphs "
            'are replayed, as with torch.compile(mode="reduce-overhead"), merging pays. '
            'when="always" merges all the same'
        )
    if "not faster" in reasons:
        return (
            "tomesd merged nothing: at this image and batch size, finding out what to merge takes "
            f'longer than merging saves{numbers}; when="always" merges all the same'
        )
    if "attention is cached" in reasons:
        return (
            "tomesd merged nothing: a cache keeps what attention gave at one step for others "
            "(TaylorSeer, pyramid attention broadcast, FasterCache), at which other tokens would "
            "be merged. Caches of whole blocks (first block cache, MagCache) go with merging"
        )
    if torch.compiler.is_compiling():  # numbers may be symbols there, and cannot be told
        return "tomesd merged nothing: the settings leave nothing to merge at this image size"
    where = f"at latent size {call.size[0]}x{call.size[1]}"
    if call.decisions:
        _, h, w = call.decisions[0].grid
        where += f", where the finest attention has {h}x{w} tokens"
    ratio = settings.ratio if call.ratio is None else call.ratio
    return (
        f"tomesd merged nothing {where}: max_downsample={settings.max_downsample}, "
        f"ratio={ratio:g} and {settings.sx}x{settings.sy} cells leave nothing to merge"
    )
