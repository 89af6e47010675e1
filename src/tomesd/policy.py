"""How many tokens to remove on a grid, and whether that pays. Nothing here has a state."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from .grids import level_merges, level_of, removable
from .layout import Layout
from .machine import find_launcher
from .rule import Change, expectation, judge
from .settings import Settings
from .state import Call, Decision, Grid, LeftAlone, Segment, tokens_removed
from .volume import Volume

_Answer = TypeVar("_Answer")

Segments = dict[tuple[str, ...], tuple[Segment, ...]]
"""See `Decision`."""


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
            ask = partial(_judge_unet, call, x, score_heads)
            call.left_alone = _once(call, x, score_heads, ask)
        # The outline of the model may lack a level.
        decision.left_alone = call.left_alone.get(decision.level, "not faster")
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
        change = Change(level, blocks / level.blocks, layout.tokens, decision.segments)
        ask = partial(judge, call, x, x.shape[0] if x.ndim > 2 else 1, [change])
        (decision.left_alone,) = _once(call, x, (blocks, layout.parts), ask)
    return decision


def _note(call: Call, decision: Decision) -> Decision:
    """Drops what removes nothing, and notes the decision in the call."""
    decision.level = level_of(call.size, decision.grid[1:])
    decision.number = len(call.decisions)
    decision.segments = _removing(decision.segments) if call.settings.active else {}
    call.decisions.append(decision)
    return decision


def _removing(segments: Segments) -> Segments:
    """Those that any tokens are removed from."""
    return {kinds: parts for kinds, parts in segments.items() if tokens_removed(parts) > 0}


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


def _once(call: Call, x: Tensor, question: Any, ask: Callable[[], _Answer]) -> _Answer:
    """What the rule says, or what it said about the same question.

    Args:
        question: what it is about, besides what is known of every call.
    """
    patch, settings = call.patch, call.settings
    own = settings is patch.settings or settings is patch.by_selector.get(settings.selector)
    if torch.compiler.is_compiling() or not own:
        return ask()
    launcher = find_launcher(x.device)
    asked = (call.size, x.shape, x.dtype, x.device, launcher)
    key = (*asked, settings.selector, call.ratio, call.fullness, question)
    if key not in patch.judged:
        if len(patch.judged) >= 64:
            patch.judged.clear()
        patch.judged[key] = ask(), call.verdict
    answer, call.verdict = patch.judged[key]
    return answer


def _judge_unet(call: Call, x: Tensor, score_heads: int) -> dict[int, LeftAlone]:
    """By level, whether it merges; judged once in a call, for the model as a whole."""
    (h, w), outline = call.size, call.patch.outline
    changes: list[Change] = []
    found: list[int] = []
    finest: Grid | None = None
    for level in outline.levels:
        rows, columns = [-(-side // level.scale) // level.patch_size for side in (h, w)]
        grid = (1, rows, columns)
        finest = finest or grid
        segments = _removing(_segments_on(call, grid, finest))
        changes.append(Change(level, 1.0, rows * columns, segments, score_heads))
        found.append(level_of(call.size, grid[1:]))
    around = [(-(-h // scale) * -(-w // scale), layers) for scale, layers in outline.around]
    return dict(zip(found, judge(call, x, x.shape[0], changes, around), strict=True))


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
    return (
        f"tomesd merged nothing {where}: max_downsample={settings.max_downsample}, "
        f"ratio={_ratio(call):g} and {settings.sx}x{settings.sy} cells leave nothing to merge"
    )
