"""The tensor operations of merging. Callers import from here and never from an implementation.

`match_tokens` finds out which tokens belong together, `slot_mean` merges them, `slot_gather` puts
the result back. On a GPU with Triton they are our own kernels; `reference.py` defines what they
compute, and runs everywhere. The first two are registered with PyTorch, so that compiled models
take them in as they are; the third is left to the compiler, which fuses it with what follows.
"""

import functools
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import reference
from .cells import Cells
from .draw import draw_key, draw_offsets

__all__ = [
    "Cells",
    "draw_key",
    "draw_offsets",
    "match_tokens",
    "new_clock",
    "slot_gather",
    "slot_mean",
    "use_triton",
]

_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def use_triton(backend: str, x: Tensor) -> bool:
    """Whether the Triton kernels are to work on `x`.

    Raises:
        RuntimeError: `backend` is "triton", and they cannot.
    """
    # The interpreter, which runs the kernels on a CPU, is for those who ask for it: it is slow.
    if backend == "reference" or (backend == "auto" and x.device.type == "cpu"):
        return False
    reason = _why_no_triton(x.device.type, x.dtype)
    if reason and backend == "triton":
        raise RuntimeError(f'backend="triton" cannot be used here: {reason}')
    return reason is None


@functools.cache
def _find_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _has_triton() -> bool:
    return _find_triton()


# Constant to the compiler, which cannot trace the search for a package; see policy.py.
_has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _why_no_triton(device: str, dtype: torch.dtype) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: runs on a CPU
    if device != "cuda" and not (interpreted and device == "cpu"):
        return f"it needs a CUDA or ROCm GPU, and the model is on {device}"
    if dtype not in _TRITON_DTYPES:
        return f"it knows float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if not _has_triton():
        return "the package triton is not installed"
    return None


@functools.cache
def _triton() -> ModuleType:
    from . import triton  # only when it is used: importing it takes a while

    return triton


def new_clock(times: int, device: torch.device) -> Tensor:
    """State of a plan that is kept over calls: [to be made anew?, calls served, last timesteps].

    Returns:
        `[2 + times]`, float32.
    """
    clock = torch.zeros(2 + times, device=device)
    clock[2:] = float("-inf")  # no time is below it, so the first call makes the plan
    return clock


@torch.library.custom_op(
    "tomesd::match_tokens", mutates_args=("slot", "order", "start", "clock"), device_types=None
)
def _match_tokens(
    metric: Tensor,
    timestep: Tensor | None,
    offsets: Tensor | None,
    slot: Tensor,
    order: Tensor,
    start: Tensor,
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
    triton: bool,
) -> None:
    implementation = _triton() if triton else reference
    cells = Cells(h, w, sy, sx, down, across)
    implementation.match_tokens(
        metric, timestep, offsets, slot, order, start, clock, cells, remove, key, refresh
    )


@_match_tokens.register_fake
def _(*_: Any, **__: Any) -> None: ...


def match_tokens(
    metric: Tensor,
    cells: Cells,
    remove: int,
    plan: tuple[Tensor, Tensor, Tensor],
    *,
    timestep: Tensor | None = None,
    key: int = -1,
    offsets: Tensor | None = None,
    clock: Tensor | None = None,
    refresh: int = 1,
    triton: bool = False,
) -> None:
    """Merges the sources that are most similar to a destination into it, the same number in each
    window.

    One token of each cell is a destination (dst), all others are sources (src).
    (Bolya and Hoffman, Token Merging for Fast Stable Diffusion, 2023, section 4.)

    Args:
        metric: what similarity is measured on, by cosine, `[B, N, C]`.
        remove: tokens to remove, a multiple of the windows, at most `cells.sources`.
        plan: where to write slot `[B, N]` int64, order `[B, N]` and start `[B, N - remove + 1]`
            int32; see `MergePlan`.
        timestep: `[]` or `[T]`.
        key: draws the destinations, together with the timestep; negative: the top left of each
            cell.
        offsets: or the destinations are given: the dst of each cell, `[1 or B, cells.count]`.
        clock: from `new_clock`: leaves the plan as it is while the timestep falls and it has
            served fewer than `refresh` calls.
        triton: as `use_triton` says.
    """
    _match_tokens(
        metric.detach(),
        timestep,
        offsets,
        *plan,
        clock,
        cells.h,
        cells.w,
        cells.sy,
        cells.sx,
        cells.down,
        cells.across,
        remove,
        key,
        refresh,
        triton,
    )


@torch.library.custom_op("tomesd::slot_mean", mutates_args=())
def _slot_mean(x: Tensor, slot: Tensor, order: Tensor, start: Tensor) -> Tensor:
    mean: Tensor = _triton().slot_mean(x, slot, order, start)
    return mean


@_slot_mean.register_fake
def _(x: Tensor, slot: Tensor, order: Tensor, start: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], start.shape[1] - 1, x.shape[2])


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    _, slot, _, start = inputs
    ctx.save_for_backward(slot, start)


def _slot_mean_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    slot, start = ctx.saved_tensors
    size = start[:, 1:] - start[:, :-1]
    return reference.slot_gather(grad / size.unsqueeze(-1).to(grad.dtype), slot), None, None, None


_slot_mean.register_autograd(_slot_mean_backward, setup_context=_keep_for_backward)


def slot_mean(
    x: Tensor, slot: Tensor, order: Tensor, start: Tensor, triton: bool = False
) -> Tensor:
    """Mean of the tokens in each slot.

    Args:
        x: tokens, `[B, N, C]`.
        slot, order, start: see `MergePlan`.
        triton: as `use_triton` says.

    Returns:
        `[B, M, C]`, in the dtype of `x`.
    """
    if not triton:
        return reference.slot_mean(x, slot, order, start)
    if _can_launch(x):
        mean: Tensor = _triton().slot_mean(x, slot, order, start)
        return mean
    return _slot_mean(x, slot, order, start)


def slot_gather(y: Tensor, slot: Tensor, triton: bool = False) -> Tensor:
    """Each token's slot row: `[B, M, C]` and `[B, N]` to `[B, N, C]`."""
    if triton and _can_launch(y):
        rows: Tensor = _triton().slot_gather(y, slot)
        return rows
    return reference.slot_gather(y, slot)


def _can_launch(x: Tensor) -> bool:
    """Whether a kernel may be launched right away, past PyTorch's dispatcher, which takes longer
    than many kernels: nothing traces, and no gradient is wanted."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and not (x.requires_grad and torch.is_grad_enabled())
    )
