"""Where and when to merge: what a running model knows, and what follows from it.

A `Frame` is what one call of the model knows at one place: image size, timestep, grid, plan. Frames
are never changed; going deeper into the model makes a new one. The current frame belongs to the
calling thread, so threads can share a model, and it can be kept and entered again later, which is
what gradient checkpointing needs.
"""

import sys
import threading
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from . import kernels
from .cost import Device, merging_pays
from .kernels import Cells
from .plan import MergePlan
from .selectors.bipartite import bipartite
from .settings import MergeWarning, Settings

__all__ = ["Call", "Frame", "Patch", "Planner", "Visit", "current_frame", "enter_frame"]


Planner = Callable[["Frame", Tensor], Any]
"""Makes the plan of a block from its frame and its input `[B, N, C]`."""


@dataclass(eq=False)
class KeptPlan:
    """A plan that outlives the call it was made in."""

    plan: MergePlan
    clock: Tensor


class KeptPlans(threading.local):
    """The plans kept by each thread, one attribute for each."""


def shared_plan(frame: "Frame", x: Tensor) -> MergePlan:
    """The plan of a block, made or found as `share` says."""
    settings, call = frame.settings, frame.call
    if settings.share == "block":
        return frame.make_plan(x)
    for grid, plan in call.plans:
        if grid == frame.grid and plan.fits(x):
            return plan
    # What is kept is written over later, when a backward pass might still need it.
    keep = settings.share == "steps" and call.timestep is not None and not x.requires_grad
    plan = frame.keep_plan(x) if keep else frame.make_plan(x)
    call.plans.append((frame.grid, plan))
    return plan


_patches: "WeakValueDictionary[str, Patch]" = WeakValueDictionary()


@dataclass(eq=False)
class Patch:
    """What all patched modules of one model share."""

    settings: Settings
    rooted: bool
    """Whether a model around the blocks notes image size and timestep."""
    planner: Planner = shared_plan
    kept: KeptPlans = field(default_factory=KeptPlans)
    decisions: dict[Any, bool] = field(default_factory=dict)
    """Where merging pays, by shape: found out once."""
    warned: set[str] = field(default_factory=set)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """By which functions find it that are constant to the compiler, and take constants alone."""

    def __post_init__(self) -> None:
        _patches[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Patch, (self.settings, self.rooted, self.planner)

    def warn_once(self, message: str) -> None:
        _warn_once(self.name, message)


def _warn_once(name: str, message: str) -> None:
    patch = _patches[name]
    if message not in patch.warned:
        patch.warned.add(message)
        warnings.warn(message, MergeWarning, stacklevel=2)


# Constant to the compiler, so that it runs when the model is traced: compiled models warn too.
# This is torch.compiler.assume_constant_result, which would import the compiler to set a flag.
_warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(eq=False)
class Visit:
    """One stack of blocks, as a call of the model came through it."""

    grid: tuple[int, int]
    blocks: int
    remove: int
    """Tokens that its blocks remove."""
    decided: bool = False
    """Whether the first block has found out if merging pays."""
    too_small: bool = False
    """Whether its blocks would have removed some, but merging does not pay."""


@dataclass(eq=False)
class Call:
    """One call of the model."""

    size: tuple[int, int]
    """Height and width of the latent."""
    timestep: Tensor | None = None
    visits: list[Visit] = field(default_factory=list)
    plans: list[tuple[Any, MergePlan]] = field(default_factory=list)
    """Plans made so far, with their grids."""

    @property
    def merged(self) -> bool:
        return any(visit.remove > 0 for visit in self.visits)


@dataclass(eq=False)
class Frame:
    patch: Patch
    call: Call
    settings: Settings
    grid: tuple[int, int] | None = None
    visit: Visit | None = None
    plan: MergePlan | None = None

    def at_grid(self, grid: tuple[int, int], blocks: int) -> "Frame":
        """The frame inside a stack of blocks that work on h x w tokens."""
        call, settings = self.call, self.settings
        # In a UNet, the first attention is the finest.
        finest = call.visits[0].grid if call.visits else grid
        remove = 0
        if settings.active and _level_merges(settings.max_downsample, call.size, finest, grid):
            remove = _cells(settings, *grid).removable(settings.ratio)
        visit = Visit(grid, blocks, remove)
        call.visits.append(visit)
        return Frame(self.patch, call, settings, grid, visit)

    @property
    def remove(self) -> int:
        """Tokens to remove in the blocks on this grid."""
        return self.visit.remove if self.visit is not None else 0

    def merges(self, x: Tensor) -> bool:
        """Whether to merge tokens in a block with input `x` `[B, N, C]`."""
        visit = self.visit
        if visit is None or visit.remove == 0:
            return False
        if not visit.decided and self.settings.when == "if_faster":
            visit.decided = True
            if not self._pays(visit, x):
                visit.remove, visit.too_small = 0, True
        return visit.remove > 0

    def _pays(self, visit: Visit, x: Tensor) -> bool:
        settings = self.settings
        replayed = _is_replayed(x)
        if torch.compiler.is_compiling():
            return _pays(settings, visit.grid, visit.remove, visit.blocks, x, replayed)
        known = self.patch.decisions
        key = (visit.grid, visit.blocks, x.shape, x.dtype, x.device, replayed, settings)
        if key not in known:
            known[key] = _pays(settings, visit.grid, visit.remove, visit.blocks, x, replayed)
        return known[key]

    def with_plan(self, x: Tensor) -> "Frame":
        """The frame inside a block with input `x` `[B, N, C]`, where there are tokens to remove."""
        plan = self.patch.planner(self, x)
        return Frame(self.patch, self.call, self.settings, self.grid, self.visit, plan)

    def make_plan(self, x: Tensor) -> MergePlan:
        assert self.visit is not None
        cells = _cells(self.settings, *self.visit.grid)
        return bipartite(
            x,
            cells,
            self.visit.remove,
            backend=self.settings.backend,
            timestep=self.call.timestep,
            key=self._key(cells),
        )

    def keep_plan(self, x: Tensor) -> MergePlan:
        """As `make_plan`, in memory that stays, and only if the plan there is out of date."""
        assert self.visit is not None and self.call.timestep is not None
        settings, remove = self.settings, self.visit.remove
        cells = _cells(settings, *self.visit.grid)
        triton = kernels.use_triton(settings.backend, x)
        shape = (x.shape[0], cells.h, cells.w, remove, self.call.timestep.numel())
        name = f"{triton}_{x.device}_" + "_".join(str(int(number)) for number in shape)
        _allocate(self.patch.name, name, shape, x.device, triton)
        kept: KeptPlan = getattr(self.patch.kept, name)
        kernels.match_tokens(
            x,
            cells,
            remove,
            (kept.plan.slot, kept.plan.order, kept.plan.start),
            timestep=self.call.timestep,
            key=self._key(cells),
            clock=kept.clock,
            refresh=settings.refresh,
            triton=triton,
        )
        return kept.plan

    def _key(self, cells: Cells) -> int:
        """Key of the draw at this level."""
        if not self.settings.use_rand:
            return -1
        size = self.call.size
        level = max(-(-size[0] // cells.h), -(-size[1] // cells.w))
        return kernels.draw_key(self.settings.seed, level)


def _pays(
    settings: Settings,
    grid: tuple[int, int],
    remove: int,
    blocks: int,
    x: Tensor,
    replayed: bool,
) -> bool:
    return merging_pays(
        Device.of(x.device, compiled=replayed),
        batch=x.shape[0],
        channels=x.shape[2],
        cells=_cells(settings, *grid),
        remove=remove,
        merges=settings.merges,
        uses=1 if settings.share == "block" else blocks,
        item_size=x.element_size(),
    )


def _is_replayed(x: Tensor) -> bool:
    """Whether what runs now becomes a program, so that the host's time for each kernel is saved."""
    if torch.compiler.is_compiling():
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _allocate(
    patch: str, name: str, shape: tuple[int, ...], device: torch.device, triton: bool
) -> None:
    """Sees to it that this thread has a `KeptPlan` of that name."""
    plans = _patches[patch].kept
    if not hasattr(plans, name):
        batch, h, w, remove, times = shape
        with torch.inference_mode(False):  # what inference mode makes can only be used there
            plan = MergePlan.empty(batch, h * w, h * w - remove, device, triton)
            setattr(plans, name, KeptPlan(plan, kernels.new_clock(times, device)))
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:
        kept: KeptPlan = getattr(plans, name)
        for tensor in (kept.plan.slot, kept.plan.order, kept.plan.start, kept.clock):
            # Lets a compiled model replay CUDA graphs that write to it.
            compiler.mark_static_address(tensor)


_allocate._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _cells(settings: Settings, h: int, w: int) -> Cells:
    return Cells.of(h, w, settings.sy, settings.sx, settings.search)


def _level_merges(
    max_downsample: int | None,
    size: tuple[int, int],
    finest: tuple[int, int],
    grid: tuple[int, int],
) -> bool:
    if max_downsample is None:
        return grid[0] >= finest[0] and grid[1] >= finest[1]
    return size[0] <= max_downsample * grid[0] and size[1] <= max_downsample * grid[1]


class _Thread(threading.local):
    def __init__(self) -> None:  # runs once in each thread
        self.frame: Frame | None = None


_thread = _Thread()


def current_frame(patch: Patch) -> Frame | None:
    """The frame that this thread is in, if it is one of this patch."""
    frame = _thread.frame
    return frame if frame is not None and frame.patch is patch else None


def enter_frame(frame: Frame | None) -> Frame | None:
    """Makes `frame` current and returns the one before, to be entered again afterwards."""
    before = _thread.frame
    _thread.frame = frame
    return before
