"""Finds out with Triton kernels which tokens belong together; see `reference.match_tokens`.

Nothing is added up atomically, so results are the same bits in every run. Every kernel first looks
at a flag on the device and returns at once if the plan is still fresh: whether to match is decided
without the host, which is what lets a CUDA graph keep a plan over steps.
"""

# Kernels are Triton's language, not Python's.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, allow-untyped-calls

from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .cells import Cells
from .triton_choosing import choose_sources
from .triton_launch import jit_at_any_step, power_of_2, quickly
from .triton_search import search

__all__ = ["match_tokens", "match_tokens_op"]


@jit_at_any_step
def _tick(clock, timestep, refresh, times, BLOCK: tl.constexpr):
    """Moves the clock to the timestep and raises its flag if the plan is to be made anew."""
    i = tl.arange(0, BLOCK)
    time = tl.load(timestep + i, i < times, other=0.0).to(tl.float32)
    last = tl.load(clock + 2 + i, i < times, other=1.0)
    age = tl.load(clock + 1)
    falls = tl.min((time < last).to(tl.int32), axis=0)
    kept = (falls == 1) & (age < refresh)
    tl.store(clock, tl.where(kept, 0.0, 1.0))
    tl.store(clock + 1, tl.where(kept, age + 1.0, 1.0))
    tl.store(clock + 2 + i, time, i < times)


def match_tokens(
    metric: Tensor,
    timestep: Tensor | None,
    offsets: Tensor | None,
    slot: Tensor,
    order: Tensor,
    span: Tensor,
    clock: Tensor | None,
    cells: Cells,
    remove: int,
    key: int,
    refresh: int,
    wrap_triton: Callable[[Any], Any] = quickly,
) -> None:
    """See `kernels.match_tokens`; `wrap_triton`: see `triton_launch`."""
    metric = metric.contiguous()
    if timestep is not None:
        timestep = timestep.reshape(-1)
    if clock is not None:
        assert timestep is not None
        times = int(timestep.shape[0])
        block = power_of_2(times)
        wrap_triton(_tick)[(1,)](clock, timestep, refresh, times, BLOCK=block)
    destinations = _destinations(metric, timestep, offsets, cells, key)
    score, match = search(metric, cells, destinations, clock, wrap_triton)
    plan = {"slot": slot, "order": order, "span": span}
    choose_sources(score, match, cells, remove, destinations, plan, clock, wrap_triton)


def _destinations(
    metric: Tensor, timestep: Tensor | None, offsets: Tensor | None, cells: Cells, key: int
) -> dict[str, Any]:
    """The arguments by which kernels know the windows and the destinations in them."""
    if offsets is not None:
        offsets = timestep = offsets.int().contiguous()  # the time is read, but nothing is drawn
    elif timestep is None:
        timestep = metric.new_zeros(1, dtype=torch.float32)
    batch, draws = metric.shape[0], timestep.shape[0]
    window = cells.window
    return {
        "offsets": offsets,
        "timestep": timestep,
        "key": key,
        # So many images of the batch have the same destinations.
        "rows": batch // draws if batch % draws == 0 else batch,
        "h": window.h,
        "w": window.w,
        "windows": cells.windows,
        "across": cells.across,
        "columns": window.w // cells.sx,
        "count": window.count,
        "sy": cells.sy,
        "sx": cells.sx,
    }


@torch.library.triton_op(
    "tomesd::match_tokens_triton", mutates_args=("slot", "order", "span", "clock")
)
def match_tokens_op(
    metric: Tensor,
    timestep: Tensor | None,
    offsets: Tensor | None,
    slot: Tensor,
    order: Tensor,
    span: Tensor,
    clock: Tensor | None,
    h: int,
    w: int,
    sy: int,
    sx: int,
    down: int,
    across: int,
    remove: int,
    key: int,
    refresh: int,
) -> None:
    """`match_tokens`, for compiled models: the compiler launches the kernels itself.

    Has to come last: registering it, PyTorch looks up the kernels in what it calls.
    """
    cells = Cells(h, w, sy, sx, down, across)
    lists = (slot, order, span)
    wrap = torch.library.wrap_triton
    match_tokens(metric, timestep, offsets, *lists, clock, cells, remove, key, refresh, wrap)
