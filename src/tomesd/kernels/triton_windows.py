"""Triton kernel that matches the tokens of small windows: one launch.

A program holds all of its window: it compares every source with every destination, sorts by
counting, and writes its part of the plan.
"""

# Kernels are Triton's language, not Python's: they have no types, and a test for None, resolved
# when the kernel is compiled, has to stand alone.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: SIM102

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cells import Cells
from .triton_cells import dst_token, inverse_length, src_token, window_corner

__all__ = ["match_windows"]


@triton.jit
def _match_window(
    x,
    offsets,
    timestep,
    key,
    rows,
    slot,
    order,
    start,
    flag,
    h,
    w,
    across,
    columns,
    count,
    remove,
    channels,
    sy: tl.constexpr,
    sx: tl.constexpr,
    precision: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """slot and order [B, N], start [B, M + 1]: the part of one window; see `MergePlan`."""
    if flag is not None:
        if tl.load(flag) == 0:
            return
    b = tl.program_id(2).to(tl.int64)
    windows = tl.num_programs(1)
    window = tl.program_id(1)
    corner = window_corner(h, w, across)
    n = h * w
    sources = n - count
    kept = sources - remove
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    row, stride = b // rows, across * w
    time = tl.load(timestep + row).to(tl.float32)
    src = src_token(s, offsets, time, key, row, h, w, stride, columns, count, sy, sx) + corner
    dst = dst_token(d, offsets, time, key, row, stride, columns, count, sy, sx) + corner

    # The best match of each source.
    src_row = x + (b * windows * n + src) * channels
    dst_row = x + (b * windows * n + dst) * channels
    product = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    src_squares = tl.zeros([BLOCK_S], tl.float32)
    dst_squares = tl.zeros([BLOCK_D], tl.float32)
    for c0 in range(0, channels, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        left = tl.load(
            src_row[:, None] + c[None, :],
            (s < sources)[:, None] & (c < channels)[None, :],
            other=0.0,
        )
        right = tl.load(
            dst_row[None, :] + c[:, None],
            (d < count)[None, :] & (c < channels)[:, None],
            other=0.0,
        )
        product = tl.dot(left, right, product, input_precision=precision)
        src_squares += tl.sum(left.to(tl.float32) * left.to(tl.float32), axis=1)
        dst_squares += tl.sum(right.to(tl.float32) * right.to(tl.float32), axis=0)
    src_inverse = inverse_length(src_squares)
    dst_inverse = inverse_length(dst_squares)
    # The product of an unusable token may be infinite or NaN.
    usable = (src_inverse > 0)[:, None] & (dst_inverse > 0)[None, :]
    similarity = tl.where(usable, product * dst_inverse[None, :], 0.0)
    similarity = tl.where((d < count)[None, :], similarity, float("-inf"))
    best, match = tl.max(similarity, axis=1, return_indices=True)
    score = tl.where(s < sources, best * src_inverse, float("-inf"))

    # Places when sources are sorted by score; equal ones stay in order.
    ahead = (score[None, :] > score[:, None]) | (
        (score[None, :] == score[:, None]) & (s[None, :] < s[:, None])
    )
    rank = tl.sum(ahead.to(tl.int32), axis=1)
    merged = rank < remove
    # Those that merge, sorted by destination and then by rank; the others are beyond all.
    goes = tl.where(merged, match, BLOCK_D)
    earlier = merged[None, :] & (
        (goes[None, :] < goes[:, None])
        | ((goes[None, :] == goes[:, None]) & (rank[None, :] < rank[:, None]))
    )
    before = tl.sum(earlier.to(tl.int32), axis=1)
    before_dst = tl.sum((goes[:, None] < d[None, :]).to(tl.int32), axis=0)

    slot += b * windows * n
    order += (b * windows + window) * n
    start += b * (windows * (n - remove) + 1)
    first_slot = window * (n - remove)
    number = first_slot + tl.where(merged, kept + match, rank - remove)
    tl.store(slot + src, number.to(tl.int64), s < sources)
    place = tl.where(merged, kept + before + match + 1, rank - remove)
    tl.store(order + place, src, s < sources)
    alone = (s < sources) & (rank >= remove)
    tl.store(start + number, window * n + place, alone)
    number_dst = first_slot + kept + d
    place_dst = kept + before_dst + d
    tl.store(slot + dst, number_dst.to(tl.int64), d < count)
    tl.store(order + place_dst, dst, d < count)
    tl.store(start + number_dst, window * n + place_dst, d < count)
    tl.store(start + windows * (n - remove) + d * 0, windows * n + d * 0, d == 0)


def match_windows(
    metric: Tensor,
    cells: Cells,
    remove: int,
    destinations: dict[str, Any],
    plan: dict[str, Any],
    clock: Tensor | None,
    wrap_triton: Callable[[Any], Any],
) -> None:
    """See `triton_search.search_windows`; windows have to fit one program."""
    wide = metric.dtype == torch.float32
    count = destinations["count"]
    block = max(16, triton.next_power_of_2(destinations["h"] * destinations["w"] - count))
    wrap_triton(_match_window)[(1, cells.windows, metric.shape[0])](
        metric,
        **destinations,
        **plan,
        flag=clock,
        remove=remove,
        channels=metric.shape[2],
        precision="tf32x3" if wide else "ieee",
        BLOCK_S=block,
        BLOCK_D=max(16, triton.next_power_of_2(count)),
        BLOCK_C=64 if wide else 128,
        num_warps=4 if block <= 64 else 8,
        # Pipelined, products came out wrong on a GPU (8 warps, 3 stages, float16, Triton 3.6), and
        # it is hardly slower without.
        num_stages=1,
    )
