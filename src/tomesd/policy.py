"""Where and when to merge: what a running model knows, and what follows from it.

A `Frame` is what one call of the model knows at one place: image size, timestep, grid, plan. Going
deeper into the model makes a new one; once entered, a frame is not changed, but for plans that
layers take out.
The current frame belongs to the calling thread, so threads can share a model, and it can be kept
and entered again later, which is what gradient checkpointing needs.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .cost import Device, Launcher, find_launcher, merging_pays
from .grids import cells_of, level_merges, level_of, removable
from .kernels import Cells
from .plan import MergePlan
from .proportional import Proportion
from .settings import Settings
from .shared import Idle, LeftAlone, Patch, ScoreHeads

__all__ = [
    "Call",
    "Frame",
    "Run",
    "Visit",
    "current_frame",
    "enter_frame",
    "is_idle",
]


@dataclass(eq=False)
class Visit:
    """One stack of blocks, as a call of the model came through it."""

    grid: tuple[int, int]
    blocks: int
    removes: dict[tuple[str, ...], int]
    """Tokens that its blocks remove, by the kinds of layers that have a plan in common."""
    decided: bool = False
    """Whether the first block has found out if merging pays."""
    left_alone: LeftAlone = ""
    """Why its blocks do not merge, although they could."""
    number: int = 0
    """Of the stack in the call."""
    merging: int = 0
    """Blocks that have begun to merge."""
    together: bool = False
    """Whether its blocks may all work on the same merged tokens."""
    run: "Run | None" = None
    """What they are working on then."""

    @property
    def remove(self) -> int:
        """The most tokens that any of its layers removes."""
        return max([0, *self.removes.values()])  # the compiler knows no default


_NOTHING = Visit((0, 0), 0, {}, decided=True)


@dataclass(eq=False)
class Run:
    """Blocks that follow each other and all work on merged tokens."""

    frame: "Frame"
    """Of the first block."""
    plan: MergePlan
    x: Tensor
    """What came in, `[B, N, C]`."""
    merged: Tensor
    """The same merged, `[B, M, C]`."""


@dataclass(eq=False)
class Call:
    """One call of the model."""

    size: tuple[int, int]
    """Height and width of the latent."""
    timestep: Tensor | None = None
    ratio: float | None = None
    """What the ratio is now, where it changes."""
    visits: list[Visit] = field(default_factory=list)
    plans: list[tuple[Any, MergePlan]] = field(default_factory=list)
    """Plans made so far, with their grids and the tokens they remove."""
    masks: list[tuple[Any, Tensor]] = field(default_factory=list)
    """Tokens to protect, by grid."""
    asked: list[tuple[ScoreHeads, int]] = field(default_factory=list)
    """Blocks that the decision whether merging pays was made for, and what they told."""
    guided: tuple[Tensor, Tensor] | None = None
    """Where the prompt made a difference at the step before `[b, h, w]`, and whether that was a
    step of the same image `[]`."""

    @property
    def merged(self) -> bool:
        return any(visit.remove > 0 for visit in self.visits)

    def as_idle(self) -> Idle | None:
        """Of a call that merged nothing; None if a compiled block decided that: it asks anew."""
        if len(self.asked) < sum(visit.left_alone != "" for visit in self.visits):
            return None
        return Idle(frozenset(visit.grid for visit in self.visits), tuple(self.asked))


@dataclass(eq=False)
class Frame:
    patch: Patch
    call: Call
    settings: Settings
    grid: tuple[int, int] | None = None
    visit: Visit | None = None
    plans: dict[str, Any] = field(default_factory=dict)
    """What the layers of a block merge by, kind to plan; each layer takes out its own."""
    block: nn.Module | None = None
    """The block that makes the plans."""
    place: str = ""
    """Of the block in the model."""
    proportion: Proportion | None = None
    """Inside attention, if it is proportional."""
    early: bool = False
    """Whether the norm before self-attention merges, so that the layer itself need not."""
    idle: frozenset[tuple[int, int]] = frozenset()
    """Grids of stacks that are known to merge nothing in such a call."""

    @classmethod
    def of_idle(cls, patch: Patch, call: Call, idle: Idle) -> "Frame":
        """The frame inside a model that is known to merge nothing."""
        return cls(patch, call, patch.settings, visit=_NOTHING, idle=idle.grids)

    def at_grid(self, grid: tuple[int, int], blocks: int) -> "Frame":
        """The frame inside a stack of blocks that work on h x w tokens."""
        visit = Visit(grid, blocks, self._removes(grid), number=len(self.call.visits))
        # Where gradients are wanted, a block may be run again on its own (checkpointing), and must
        # not depend on what another one has kept.
        visit.together = self.settings.target == "stack" and not torch.is_grad_enabled()
        self.call.visits.append(visit)
        return Frame(self.patch, self.call, self.settings, grid, visit)

    def _removes(self, grid: tuple[int, int]) -> dict[tuple[str, ...], int]:
        # In a UNet, the first attention is the finest.
        finest = self.call.visits[0].grid if self.call.visits else grid
        key = (grid, finest, self.call.size, self.call.ratio)
        return self._remember(key, lambda: self._find_removes(grid, finest))

    def _remember(self, key: Any, find: Callable[[], Any]) -> Any:
        """What `find` finds, looked for once, unless it is compiled or of other settings."""
        if torch.compiler.is_compiling() or self.settings is not self.patch.settings:
            return find()
        known = self.patch.known
        if key not in known:
            known[key] = find()
        return known[key]

    def _find_removes(
        self, grid: tuple[int, int], finest: tuple[int, int]
    ) -> dict[tuple[str, ...], int]:
        call, settings = self.call, self.settings
        level = level_of(call.size, grid)
        named = settings.level_ratios is not None and level in settings.level_ratios
        ratio = settings.ratio if call.ratio is None else call.ratio
        if not settings.active or not (
            named or level_merges(settings.max_downsample, call.size, finest, grid)
        ):
            return {}
        cells = cells_of(settings, *grid)
        # By ratio, because tokens may be symbols to the compiler, which it would have to look up.
        kinds: dict[float, tuple[str, ...]] = {}
        for kind in settings.kinds:
            wanted = settings.ratio_of(kind, level, ratio)
            kinds[wanted] = (*kinds.get(wanted, ()), kind)
        removes = {kinds: removable(settings, cells, wanted) for wanted, kinds in kinds.items()}
        return {kinds: remove for kinds, remove in removes.items() if remove > 0}

    @property
    def remove(self) -> int:
        """The most tokens to remove in the blocks on this grid."""
        return self.visit.remove if self.visit is not None else 0

    def merges(self, x: Tensor, score_heads: ScoreHeads) -> bool:
        """Whether to merge tokens in a block with input `x` `[B, N, C]`."""
        visit = self.visit
        if visit is None or not visit.removes:
            return False
        if not visit.decided and self.settings.when == "if_faster":
            visit.decided = True
            visit.left_alone = self._reason_to_leave(visit, x, score_heads)
            if visit.left_alone != "":
                visit.removes = {}
        return len(visit.removes) > 0  # PyTorch 2.8 does not compile `bool` of a dict

    def _reason_to_leave(self, visit: Visit, x: Tensor, score_heads: ScoreHeads) -> LeftAlone:
        launcher, heads = find_launcher(x.device), score_heads()
        if not torch.compiler.is_compiling():
            self.call.asked.append((score_heads, heads))
        stack = (visit.grid, visit.blocks, tuple(visit.removes.items()))
        key = (stack, x.shape, x.dtype, x.device, launcher, heads)
        return self._remember(key, lambda: _reason_to_leave(self.patch, visit, x, launcher, heads))

    def in_block(self, block: nn.Module, x: Tensor) -> "Frame":
        """The frame inside a block with input `x` `[B, N, C]`, where there are tokens to remove."""
        assert self.visit is not None
        place = f"{self.visit.number}_{self.visit.merging}"
        self.visit.merging += 1
        frame = Frame(
            self.patch, self.call, self.settings, self.grid, self.visit, block=block, place=place
        )
        for kinds, remove in self.visit.removes.items():
            plan = self.patch.planner(frame, x, remove)
            frame.plans.update(dict.fromkeys(kinds, plan))
        return frame

    def in_attention(self, proportion: Proportion) -> "Frame":
        """The frame inside an attention layer that is proportional."""
        return Frame(
            self.patch, self.call, self.settings, self.grid, self.visit, proportion=proportion
        )

    @property
    def cells(self) -> Cells:
        assert self.grid is not None
        grid = self.grid
        return self._remember(grid, lambda: cells_of(self.settings, *grid))

    @property
    def level(self) -> int:
        """How many times smaller than the latent the grid is."""
        assert self.grid is not None
        return level_of(self.call.size, self.grid)


def _reason_to_leave(
    patch: Patch, visit: Visit, x: Tensor, launcher: Launcher, score_heads: int
) -> LeftAlone:
    if _pays(patch, visit, x, launcher, score_heads):
        return ""
    in_graph = _pays(patch, visit, x, "graph", score_heads)
    return "pays in CUDA graphs only" if in_graph else "not faster"


def _pays(patch: Patch, visit: Visit, x: Tensor, launcher: Launcher, score_heads: int) -> bool:
    settings = patch.settings
    return merging_pays(
        Device.of(x.device, launcher),
        batch=x.shape[0],
        channels=x.shape[2],
        cells=cells_of(settings, *visit.grid),
        removes=visit.removes,
        target=settings.target,
        blocks=visit.blocks,
        model_blocks=patch.blocks,
        uses=1 if settings.share == "block" else visit.blocks,
        item_size=x.element_size(),
        proportional=settings.proportional,
        score_heads=score_heads,
    )


class _Thread(threading.local):
    def __init__(self) -> None:  # runs once in each thread
        self.frame: Frame | None = None


_thread = _Thread()


def current_frame(patch: Patch) -> Frame | None:
    """The frame that this thread is in, if it is one of this patch."""
    frame = _thread.frame
    return frame if frame is not None and frame.patch is patch else None


def is_idle(patch: Patch) -> bool:
    """Whether this thread is in blocks that merge nothing. Quick: most layers ask."""
    frame = _thread.frame
    return (
        frame is not None
        and frame.visit is not None
        and not frame.visit.removes
        and frame.patch is patch
    )


def enter_frame(frame: Frame | None) -> Frame | None:
    """Makes `frame` current and returns the one before, to be entered again afterwards."""
    before = _thread.frame
    _thread.frame = frame
    return before
