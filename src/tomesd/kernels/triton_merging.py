"""Triton kernels that merge tokens and put them back; see `reference.py` for what they compute.

A mean adds up its slot's tokens in the order of the plan, without atomics: the same bits in every
run.
"""

# Kernels are Triton's language, not Python's.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, allow-untyped-calls

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .request import Lists
from .triton_launch import blocks, quickly


@triton.jit
def _slot_mean(
    x, order, span, out, n, slots, channels,
    BLOCK_M: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out [B, M, C]: the mean over each slot's list of tokens, BLOCK_J of them at a time."""
    b = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    at = span + (b * slots + m) * 2
    first = tl.load(at, m < slots, other=0)
    size = tl.load(at + 1, m < slots, other=0)
    in_channels = (c < channels)[None, None, :]
    total = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for j0 in range(0, tl.max(size, axis=0), BLOCK_J):
        j = j0 + tl.arange(0, BLOCK_J)
        listed = j[None, :] < size[:, None]
        token = tl.load(order + b * n + first[:, None] + j[None, :], listed, other=0)
        row = x + (b * n + token.to(tl.int64)) * channels
        value = tl.load(
            row[:, :, None] + c[None, None, :], listed[:, :, None] & in_channels, other=0.0
        )
        total += tl.sum(value.to(tl.float32), axis=1)
    mean = total / tl.maximum(size, 1)[:, None].to(tl.float32)
    target = out + (b * slots + m[:, None]) * channels + c[None, :]
    tl.store(target, mean.to(out.dtype.element_ty), (m < slots)[:, None] & (c < channels)[None, :])


@triton.jit
def _give_back(
    y, slot, x, merged, out, n, slots, channels, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    """out [B, N, C]: the row of y of each token's slot; or, if there is an x, each token of it,
    plus what its slot gained from merged to y."""
    b = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.load(slot + b * n + token, token < n, other=0)
    inside = (token < n)[:, None] & (c < channels)[None, :]
    source = (b * slots + row[:, None]) * channels + c[None, :]
    target = (b * n + token[:, None]) * channels + c[None, :]
    value = tl.load(y + source, inside, other=0.0)
    if x is not None:
        before = tl.load(merged + source, inside, other=0.0).to(tl.float32)
        own = tl.load(x + target, inside, other=0.0).to(tl.float32)
        value = own + (value.to(tl.float32) - before)
    tl.store(out + target, value.to(out.dtype.element_ty), inside)


def slot_mean(x: Tensor, lists: Lists, wrap_triton: Callable[[Any], Any] = quickly) -> Tensor:
    """See `kernels.slot_mean`; `wrap_triton`: see `triton_launch`."""
    batch, n, channels = x.shape
    _, order, span = lists
    slots = span.shape[1]
    out = x.new_empty(batch, slots, channels)
    wrap_triton(_slot_mean)[(blocks(slots, 8), blocks(channels, 128), batch)](
        x.contiguous(), order, span, out, n, slots, channels, 8, 2, 128
    )
    return out


@torch.library.triton_op("tomesd::slot_mean_triton", mutates_args=())
def slot_mean_op(x: Tensor, slot: Tensor, order: Tensor, span: Tensor) -> Tensor:
    """`slot_mean`, for compiled models: the compiler launches the kernel itself."""
    return slot_mean(x, Lists(slot, order, span), torch.library.wrap_triton)


slot_mean_op.register_autograd(
    reference.slot_mean_backward, setup_context=reference.keep_for_backward
)


def slot_gather(
    y: Tensor, slot: Tensor, x: Tensor | None = None, merged: Tensor | None = None
) -> Tensor:
    """See `kernels.slot_gather`; with `x` and `merged`, `kernels.slot_restore`."""
    (batch, slots, channels), n = y.shape, slot.shape[1]
    out = y.new_empty(batch, n, channels)
    if x is not None and merged is not None:
        x, merged = x.contiguous(), merged.contiguous()
    grid = (blocks(n, 8), blocks(channels, 256), batch)
    quickly(_give_back)[grid](y.contiguous(), slot, x, merged, out, n, slots, channels, 8, 256)
    return out


def slot_restore(x: Tensor, y: Tensor, merged: Tensor, slot: Tensor) -> Tensor:
    """See `kernels.slot_restore`."""
    return slot_gather(y, slot, x, merged)
