"""The tensor operations of merging. Callers import from here and never from an implementation.

`match_tokens` finds out which tokens belong together, `slot_mean` merges them, `slot_gather` puts
the result back and `slot_restore` adds it. On a GPU with Triton they are our own kernels;
`reference.py` defines what they compute, and runs everywhere.

How a kernel is reached, from fast to slow:

- eager mode launches it right away;
- a compiled model launches it from its own code: the `..._triton` operators show the compiler what
  they are made of. What is not matched or averaged it writes itself, fused with what follows;
- everything else (gradients, fake tensors, Triton's interpreter under the compiler) goes through
  the operators `tomesd::match_tokens` and `tomesd::slot_mean`, which are opaque to PyTorch.
"""

import torch
from torch import Tensor

from ..compiler import constant_when_traced
from . import reference
from .backend import launch, load_fast, use_triton
from .cells import Cells, Draw, draw_key, draw_offsets
from .request import Clock, Lists, Request, flatten, list_members, opaque_operator


@constant_when_traced  # an import cannot be traced
def _define_triton_operators() -> bool:
    """Sees to it that `torch.ops.tomesd` has the operators that end in `_triton`."""
    return bool(load_fast())


def _is_launched_by_compiler(x: Tensor) -> bool:
    """Whether what runs now is being compiled to code that launches Triton kernels."""
    return torch.compiler.is_compiling() and x.is_cuda and _define_triton_operators()


def _is_launched_here(x: Tensor) -> bool:
    """Whether a kernel may be launched right away, past PyTorch's dispatcher, which takes longer
    than many kernels: nothing traces."""
    return not torch.compiler.is_compiling() and type(x) is Tensor


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def match_tokens(metric: Tensor, request: Request, lists: Lists, triton: bool = False) -> None:
    """Merges the sources that are most similar to a destination of their window into it.

    One token of each cell is a destination (dst), all others are sources (src).
    (Bolya and Hoffman, Token Merging for Fast Stable Diffusion, 2023, section 4.)

    Args:
        metric: what similarity is measured on, by cosine, `[B, N, C]`.
        lists: where to write the plan, of `N - request.remove` slots.
        triton: as `use_triton` says.
    """
    if triton and _is_launched_here(metric):
        launch(load_fast().match_tokens, metric, request, lists)
    elif triton and _is_launched_by_compiler(metric):
        torch.ops.tomesd.match_tokens_triton(*flatten(metric, request, lists))
    else:
        _match_tokens(metric, request, lists, triton)


def _match_by(metric: Tensor, request: Request, lists: Lists, triton: bool) -> None:
    launch((load_fast() if triton else reference).match_tokens, metric, request, lists)


_match_tokens = opaque_operator("match_tokens", _match_by)


@torch.library.custom_op("tomesd::slot_mean", mutates_args=())
def _slot_mean(x: Tensor, slot: Tensor, order: Tensor, span: Tensor) -> Tensor:
    return launch(load_fast().slot_mean, x, Lists(slot, order, span))


@_slot_mean.register_fake
def _(x: Tensor, slot: Tensor, order: Tensor, span: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], span.shape[1], x.shape[2])


_slot_mean.register_autograd(
    reference.slot_mean_backward, setup_context=reference.keep_for_backward
)


def slot_mean(x: Tensor, lists: Lists, triton: bool = False) -> Tensor:
    """Mean of the tokens in each slot.

    Args:
        x: tokens, `[B, N, C]`.
        lists: of the plan.
        triton: as `use_triton` says.

    Returns:
        `[B, M, C]`, in the dtype of `x`.
    """
    if not triton:
        return reference.slot_mean(x, lists)
    if _is_launched_here(x) and not _wants_gradient(x):
        return launch(load_fast().slot_mean, x, lists)
    if _is_launched_by_compiler(x):
        return torch.ops.tomesd.slot_mean_triton(x, *lists)
    return _slot_mean(x, *lists)


def slot_gather(y: Tensor, slot: Tensor, triton: bool = False) -> Tensor:
    """Each token's slot row: `[B, M, C]` and `[B, N]` to `[B, N, C]`."""
    if triton and _is_launched_here(y) and not _wants_gradient(y):
        return launch(load_fast().slot_gather, y, slot)
    return reference.slot_gather(y, slot)


def slot_restore(
    x: Tensor, y: Tensor, merged: Tensor, slot: Tensor, triton: bool = False
) -> Tensor:
    """Adds to each token what a layer added to its slot: `x + (y - merged)[slot]`.

    Args:
        x: tokens, `[B, N, C]`.
        y: slots after the layer, `[B, M, C]`.
        merged: slots before the layer, `[B, M, C]`.
        slot: see `MergePlan`, `[B, N]`.
        triton: as `use_triton` says.

    Returns:
        `[B, N, C]`.
    """
    same = x.dtype == y.dtype == merged.dtype  # otherwise the result has a dtype of its own
    if triton and same and _is_launched_here(x) and not _wants_gradient(x, y, merged):
        return launch(load_fast().slot_restore, x, y, merged, slot)
    return reference.slot_restore(x, y, merged, slot)
