"""Where and when to merge: what a running model knows, and what follows from it.

A `Frame` is what one call of the model knows at one place: image size, timestep, grid, plan. Frames
are never changed; going deeper into the model makes a new one. The current frame belongs to the
calling thread, so threads can share a model, and it can be kept and entered again later, which is
what gradient checkpointing needs.
"""

import threading
import warnings
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .plan import MergePlan
from .selectors import Cells, bipartite, draw_offsets
from .settings import MergeWarning, Settings

__all__ = ["Call", "Frame", "Patch", "Visit", "current_frame", "enter_frame"]


@dataclass(eq=False)
class Patch:
    """What all patched modules of one model share."""

    settings: Settings
    rooted: bool
    """Whether a model around the blocks notes image size and timestep."""
    warned: set[str] = field(default_factory=set)

    def warn_once(self, message: str) -> None:
        _warn_once(self, message)


def _warn_once(patch: Patch, message: str) -> None:
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


@dataclass(eq=False)
class Call:
    """One call of the model."""

    size: tuple[int, int]
    """Height and width of the latent."""
    timestep: Tensor | None = None
    visits: list[Visit] = field(default_factory=list)

    @property
    def merged(self) -> bool:
        return any(visit.remove > 0 for visit in self.visits)


@dataclass(eq=False)
class Frame:
    patch: Patch
    call: Call
    settings: Settings
    grid: tuple[int, int] | None = None
    remove: int = 0
    """Tokens to remove in the blocks on this grid."""
    plan: MergePlan | None = None

    def at_grid(self, grid: tuple[int, int], blocks: int) -> "Frame":
        """The frame inside a stack of blocks that work on h x w tokens."""
        call, settings = self.call, self.settings
        # In a UNet, the first attention is the finest.
        finest = call.visits[0].grid if call.visits else grid
        remove = 0
        if settings.active and _level_merges(settings.max_downsample, call.size, finest, grid):
            remove = _cells(settings, *grid).removable(settings.ratio)
        call.visits.append(Visit(grid, blocks, remove))
        return replace(self, grid=grid, remove=remove)

    def with_plan(self, x: Tensor) -> "Frame":
        """The frame inside a block with input `x` `[B, N, C]`, where there are tokens to remove."""
        assert self.grid is not None
        cells = _cells(self.settings, *self.grid)
        plan = bipartite(x, cells, self.remove, self._offsets(cells, x))
        return replace(self, plan=plan)

    def _offsets(self, cells: Cells, x: Tensor) -> Tensor:
        """The dst of each cell, `[1 or B, cells.count]`."""
        settings, call = self.settings, self.call
        if not settings.use_rand:
            return torch.zeros(1, cells.count, dtype=torch.int64, device=x.device)
        if call.timestep is None:
            timestep = torch.zeros(1, device=x.device)
        else:
            timestep = call.timestep.to(x.device).reshape(-1)
        images = timestep.shape[0]
        if images > 1 and x.shape[0] % images == 0:
            # One timestep per image; a video model folds its frames into the batch.
            timestep = timestep.repeat_interleave(x.shape[0] // images)
        elif images > 1:
            timestep = timestep[:1]  # a part of a batch: in sampling, all have the same timestep
        level = max(-(-call.size[0] // cells.h), -(-call.size[1] // cells.w))
        return draw_offsets(cells.count, cells.choices, settings.seed, level, timestep)


def _cells(settings: Settings, h: int, w: int) -> Cells:
    return Cells.of(h, w, settings.sy, settings.sx)


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
