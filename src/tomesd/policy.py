"""How many tokens to remove from a grid at a step, and whether that pays."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from .compiler import never_traced
from .layout import Layout
from .machine import find_launcher
from .outline import Layers
from .rule import Change, LeftAlone, judge
from .schedule import ratio_at, stage_at
from .segments import Segment, cut_grid, tokens_removed
from .selectors import removable
from .settings import Settings
from .state import Call, Decision, Grid, Patch
from .steps import MOST_CALLS, Moment

_log = logging.getLogger("tomesd")
_Answer = TypeVar("_Answer")

Segments = dict[tuple[str, ...], tuple[Segment, ...]]
"""See `Decision`."""

_COARSE = "coarse"


def read_time(call: Call, timestep: Any, tokens: int, batch: int, obstacle: str) -> None:
    """Notes in a call what depends on its timestep: settings, ratio, and what the step does.

    Args:
        timestep: a number, or a tensor `[]` or `[T]`.
        tokens, batch: of the image, and items of the latents.
        obstacle: why the call cannot be made coarse, if it cannot.
    """
    said = _read_time(call.patch, timestep, (batch, tokens, *call.size), call.apart, obstacle)
    if said == _COARSE:
        call.ratio, call.coarse = 0.0, True
        return
    ratio, selector, *moment = said.split()
    call.ratio = None if ratio == "None" else float(ratio)
    call.settings = call.patch.by_selector[selector]
    call.moment = Moment(*map(int, moment)) if moment else None  # type: ignore[arg-type]


# The compiler compiles what follows for each answer, which comes as words because numbers that
# change would become variables.
@never_traced(
    "what tomesd merges depends on the timestep (schedule, start, end, tau, reuse, coarse)"
)
def _read_time(
    patch: Patch, timestep: Any, size: tuple[int, ...], apart: bool, obstacle: str
) -> str:
    """What a step does: "coarse", or its ratio, its selector and, if it has one, its moment."""
    settings, timeline, steps, tokens = patch.settings, patch.timeline, patch.steps, size[1]
    time = _mean_time(patch, timestep)
    progress = timeline.progress(time, tokens)
    resized = steps.enter(-time if timeline.rises else time, progress, size)
    if steps.begins:
        patch.kept.begin_image()
    if settings.is_coarse(progress):
        if not obstacle:
            steps.ran = {}
            return _COARSE
        patch.warn_once(f"tomesd runs steps on all tokens that coarse would make fewer: {obstacle}")
    ratio, (selector, _) = ratio_at(time, settings, timeline, tokens), stage_at(progress, settings)
    moment = None if settings.reuse is None else _moment(patch, apart, resized)
    words = [] if moment is None else [moment.nth, int(moment.reuses), int(moment.first)]
    return " ".join(map(str, [ratio, selector, *words]))


def _mean_time(patch: Patch, timestep: Any) -> float:
    """The time of a call, whose items may be at different ones."""
    if not isinstance(timestep, Tensor):
        return float(timestep)
    if timestep.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "schedule, start, end, tau, reuse, coarse: what is merged depends on the timestep, "
            "which a CUDA graph cannot read; capture a graph for each ratio"
        )
    times = patch.timeline.noisiest(timestep).flatten().tolist()  # waits for the device
    return float(sum(times) / len(times))


def _moment(patch: Patch, apart: bool, resized: bool) -> Moment | None:
    """Whether the step that was entered reuses what its regions gave; None if it may keep nothing.

    Args:
        resized: whether the latents have another size than at the step before.
    """
    if apart:
        patch.steps.ran = {}
        patch.warn_once(
            "tomesd reuses nothing while gradients are wanted, or something else needs every block "
            "(a ControlNet, a cache of diffusers)"
        )
        return None
    if resized:
        patch.kept.forget("reuse_")
    if patch.steps.too_many:
        patch.warn_once(
            f"tomesd reuses nothing: the model is called more than {MOST_CALLS} times at one "
            "timestep, so that it cannot tell which result belongs to which call"
        )
    return patch.steps.moment(patch.settings)


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
        if part.grid is None:
            parts.append(Segment(part.tokens))
        else:
            parts += _cut(settings, part.grid, wanted)
    decision = Decision(layout.grid, blocks, layout.tokens, {settings.kinds: tuple(parts)})
    decision.start = layout.start
    if settings.protect is not None:
        decision.first = layout.first
    _note(call, decision)
    if decision.segments and settings.when == "if_faster":
        (level,) = call.patch.outline.levels
        change = Change(level, blocks / level.blocks, layout.tokens, decision.segments)
        ask = partial(_judge, call, x, [change])
        (decision.left_alone,) = _once(call, x, (blocks, layout.parts), ask)
    return decision


def _note(call: Call, decision: Decision) -> Decision:
    """Drops what removes nothing, or is not to merge, and notes the decision in the call."""
    decision.level = level_of(call.size, decision.grid[1:])
    decision.number = len(call.decisions)
    merges = call.settings.active and not call.coarse and call.ratio != 0
    decision.segments = _removing(decision.segments) if merges else {}
    call.decisions.append(decision)
    return decision


def level_of(size: tuple[int, int], grid: tuple[int, int]) -> int:
    """How many times smaller than a latent of that size a grid is.

    Counted, so that it is a number also where sizes are symbols of the compiler.
    """
    level = 1
    while size[0] > level * grid[0] or size[1] > level * grid[1]:
        level += 1
    return level


def _removing(segments: Segments) -> Segments:
    """Without the kinds of layers from which no tokens are removed."""
    return {kinds: parts for kinds, parts in segments.items() if tokens_removed(parts) > 0}


def _ratio(call: Call) -> float:
    return call.settings.ratio if call.ratio is None else call.ratio


def _segments_on(call: Call, grid: Grid, finest: Grid) -> Segments:
    """How many tokens can be removed from a grid of a UNet, by kinds of layers."""
    settings, level = call.settings, level_of(call.size, grid[1:])
    named = settings.level_ratios is not None and level in settings.level_ratios
    coarsest = settings.max_downsample
    if coarsest is None:
        merges = grid[1] >= finest[1] and grid[2] >= finest[2]
    else:
        merges = call.size[0] <= coarsest * grid[1] and call.size[1] <= coarsest * grid[2]
    if not named and not merges:
        return {}
    # By ratio, because tokens may be symbols to the compiler, which it would have to look up.
    kinds: dict[float, tuple[str, ...]] = {}
    for kind in settings.kinds:
        wanted = settings.ratio_of(kind, level, _ratio(call))
        kinds[wanted] = (*kinds.get(wanted, ()), kind)
    return {k: _cut(settings, grid, wanted) for wanted, k in kinds.items()}


def _cut(settings: Settings, grid: Grid, ratio: float) -> tuple[Segment, ...]:
    """The segments of a grid, from which a share of the tokens is to be removed."""
    st, remove = settings.st or 1, partial(removable, settings, ratio=ratio)
    return cut_grid(grid, settings.sy, settings.sx, st, settings.search, remove)


def _once(call: Call, x: Tensor, question: Any, ask: Callable[[], _Answer]) -> _Answer:
    """The rule's answer, remembered from the first call that asked the same question.

    Args:
        question: what the answer depends on, besides the call.
    """
    patch, settings = call.patch, call.settings
    own = settings is patch.settings or settings is patch.by_selector.get(settings.selector)
    if torch.compiler.is_compiling() or not own:
        return ask()
    launcher = find_launcher(x.device)
    asked = (call.size, x.shape, x.dtype, x.device, launcher)
    key = (*asked, settings.selector, call.ratio, call.fullness, question)
    answer, call.verdict = patch.once(key, lambda: (ask(), call.verdict))
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
    return dict(zip(found, _judge(call, x, changes, around), strict=True))


def _judge(
    call: Call, x: Tensor, changes: list[Change], around: Sequence[tuple[int, Layers]] = ()
) -> tuple[LeftAlone, ...]:
    """What the rule says of each change. What it expects is noted in the call, and logged once."""
    patch, settings = call.patch, call.settings
    answers, verdict = judge(settings, call.selector, x, call.fullness, changes, around)
    call.verdict = verdict
    if not torch.compiler.is_compiling():
        told = f"latent {call.size[0]}x{call.size[1]}: {verdict}"
        if told not in patch.warned:
            patch.warned.add(told)
            _log.info(told)
    return answers


def explain_nothing(call: Call) -> str:
    """Why a call merged nothing, in a sentence for the user."""
    settings, numbers = call.settings, ""
    if call.verdict is not None and not torch.compiler.is_compiling():  # symbols cannot be told
        numbers = f" ({call.verdict})"
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
    coarsest = settings.max_downsample
    levels = "" if coarsest is None else f"max_downsample={coarsest}, "
    return (
        f"tomesd merged nothing {where}: {levels}ratio={_ratio(call):g} and "
        f"{settings.sx}x{settings.sy} cells leave nothing to merge"
    )
