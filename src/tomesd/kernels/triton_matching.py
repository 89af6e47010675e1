"""Finds out with Triton kernels which tokens belong together; see `reference.match_tokens`.

Nothing is added up atomically, so results are the same bits in every run. Every kernel first looks
at a flag on the device and returns at once if the plan is still fresh: whether to match is decided
without the host, which is what lets a CUDA graph keep a plan over steps.
"""

# Kernels are Triton's language, not Python's.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, allow-untyped-calls

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .request import WRITTEN, Lists, Request
from .triton_choosing import choose_sources, list_slots
from .triton_launch import jit_at_any_step, power_of_2, quickly
from .triton_search import search


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
    request: Request,
    lists: Lists,
    wrap_triton: Callable[[Any], Any] = quickly,
) -> None:
    """See `kernels.match_tokens`; `wrap_triton`: see `triton_launch`."""
    metric, cells, clock = metric.contiguous(), request.cells, request.clock
    timestep = request.draw.timestep
    # Kernels read times that lie side by side. Those that a sampler expanded to a batch do not.
    timestep = metric.new_zeros(1) if timestep is None else timestep.reshape(-1).contiguous()
    if clock is not None:
        times = int(timestep.shape[0])
        wrap_triton(_tick)[(1,)](
            clock.state, timestep, clock.refresh, times, BLOCK=power_of_2(times)
        )
    window = cells.window
    batch, draws = metric.shape[0], timestep.shape[0]
    common: dict[str, Any] = {
        "timestep": timestep,
        "key": request.draw.key,
        # So many images of the batch have the same destinations.
        "rows": batch // draws if batch % draws == 0 else batch,
        "flag": None if clock is None else clock.state,
        "h": window.h,
        "w": window.w,
        "windows": cells.windows,
        "across": cells.across,
        "sy": cells.sy,
        "sx": cells.sx,
    }
    chosen = None
    if not (request.settled and window.fits_one_program):
        found = search(metric, cells, common, wrap_triton)
        chosen = choose_sources(*found, request, common["flag"], wrap_triton)
    list_slots(chosen, request, lists, common, wrap_triton)


@torch.library.triton_op("tomesd::match_tokens_triton", mutates_args=WRITTEN)
def match_tokens_op(
    metric: Tensor,
    timestep: Tensor | None,
    slot: Tensor,
    order: Tensor,
    span: Tensor,
    clock: Tensor | None,
    numbers: Sequence[int],
) -> None:
    """`match_tokens`, for compiled models: the compiler launches the kernels itself.

    Has to come last: registering it, PyTorch looks up the kernels in what it calls.
    """
    request = Request.of_numbers(numbers, timestep, clock)
    match_tokens(metric, request, Lists(slot, order, span), torch.library.wrap_triton)
