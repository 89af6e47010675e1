"""Triton kernels that match the tokens of large windows: four launches.

They never hold a score matrix, and nothing is added up atomically.
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
from .triton_launch import blocks

__all__ = ["search_windows"]


@triton.jit
def _inverse_norm(x, out, flag, n, channels, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """out [B, N]: 1 / length of each token; 0 for zero, infinite and NaN ones."""
    if flag is not None:
        if tl.load(flag) == 0:
            return
    b = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    squares = tl.zeros([BLOCK_N], tl.float32)
    for c0 in range(0, channels, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        at = x + (b * n + token[:, None]) * channels + c[None, :]
        value = tl.load(at, (token < n)[:, None] & (c < channels)[None, :], other=0.0)
        value = value.to(tl.float32)
        squares += tl.sum(value * value, axis=1)
    tl.store(out + b * n + token, inverse_length(squares), token < n)


@triton.jit
def _best_match(
    x,
    inverse,
    offsets,
    timestep,
    key,
    rows,
    score,
    match,
    flag,
    h,
    w,
    across,
    columns,
    count,
    channels,
    sy: tl.constexpr,
    sx: tl.constexpr,
    precision: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """score and match [B, S]: the most similar destination of each source, by cosine."""
    if flag is not None:
        if tl.load(flag) == 0:
            return
    b = tl.program_id(2).to(tl.int64)
    windows = tl.num_programs(1)
    window = tl.program_id(1)
    sources = h * w - count
    first = b * windows * h * w + window_corner(h, w, across)
    x += first * channels
    inverse += first
    score += (b * windows + window) * sources
    match += (b * windows + window) * sources
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    row, stride = b // rows, across * w
    time = tl.load(timestep + row).to(tl.float32)
    src = src_token(s, offsets, time, key, row, h, w, stride, columns, count, sy, sx)
    src_inverse = tl.load(inverse + src, s < sources, other=0.0)
    # Unusable tokens are not loaded: an infinity times the zero of its inverse is NaN.
    src_row = x + src.to(tl.int64) * channels
    best = tl.full([BLOCK_S], float("-inf"), tl.float32)
    best_d = tl.zeros([BLOCK_S], tl.int32)
    for d0 in range(0, count, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        dst = dst_token(d, offsets, time, key, row, stride, columns, count, sy, sx)
        dst_inverse = tl.load(inverse + dst, d < count, other=0.0)
        dst_row = x + dst.to(tl.int64) * channels
        product = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
        for c0 in range(0, channels, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            left = tl.load(
                src_row[:, None] + c[None, :],
                (src_inverse > 0)[:, None] & (c < channels)[None, :],
                other=0.0,
            )
            right = tl.load(
                dst_row[None, :] + c[:, None],
                (dst_inverse > 0)[None, :] & (c < channels)[:, None],
                other=0.0,
            )
            product = tl.dot(left, right, product, input_precision=precision)
        similarity = tl.where((d < count)[None, :], product * dst_inverse[None, :], float("-inf"))
        here, index = tl.max(similarity, axis=1, return_indices=True)
        best_d = tl.where(here > best, d0 + index, best_d)
        best = tl.maximum(best, here)
    tl.store(score + s, best * src_inverse, s < sources)
    tl.store(match + s, best_d, s < sources)


@triton.jit
def _count(
    values, own, low, high, BLOCK: tl.constexpr, DESCENDING: tl.constexpr, TIES: tl.constexpr
):
    """How many of the values in low..high come before each of own, equal ones counting if TIES."""
    before = tl.zeros([own.shape[0], BLOCK], tl.int32)
    for j0 in range(low, high, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        other = tl.load(values + j, j < high, other=float("-inf") if DESCENDING else 0x7FFFFFFF)
        if DESCENDING:
            ahead = other[None, :] >= own[:, None] if TIES else other[None, :] > own[:, None]
        else:
            ahead = other[None, :] <= own[:, None] if TIES else other[None, :] < own[:, None]
        before += ahead.to(tl.int32)
    return tl.sum(before, axis=1)


@triton.jit
def _place(values, own, i0, n, BLOCK: tl.constexpr, DESCENDING: tl.constexpr):
    """Places of the values i0, i0 + 1, ... (own) when all n are sorted; equal ones stay in order.

    Comparing all with all is quadratic, but without channels: a small part of the matching.
    """
    size: tl.constexpr = own.shape[0]
    i = i0 + tl.arange(0, size)
    earlier = _count(values, own, 0, i0, BLOCK, DESCENDING, TIES=True)
    later = _count(values, own, i0, n, BLOCK, DESCENDING, TIES=False)
    # Equal ones among themselves: only those listed before count.
    other = tl.load(values + i, i < n, other=0)
    tied = (other[None, :] == own[:, None]) & (i[None, :] < i[:, None]) & (i < n)[None, :]
    return earlier + later + tl.sum(tied.to(tl.int32), axis=1)


@triton.jit
def _rank(
    score,
    match,
    offsets,
    timestep,
    key,
    rows,
    slot,
    order,
    start,
    edge,
    edge_token,
    flag,
    h,
    w,
    across,
    columns,
    count,
    remove,
    sy: tl.constexpr,
    sx: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Sorts the sources of a window by similarity. Merged ones, by rank, go to `edge` and
    `edge_token` [B, W, remove], which say which dst each goes to; each other gets its own slot."""
    if flag is not None:
        if tl.load(flag) == 0:
            return
    b = tl.program_id(2).to(tl.int64)
    windows = tl.num_programs(1)
    window = tl.program_id(1)
    n = h * w
    sources = n - count
    kept = sources - remove
    place = b * windows + window
    s0 = tl.program_id(0) * BLOCK
    s = s0 + tl.arange(0, BLOCK)
    valid = s < sources
    own = tl.load(score + place * sources + s, valid, other=0.0)
    rank = _place(score + place * sources, own, s0, sources, BLOCK_J, DESCENDING=True)
    row, stride = b // rows, across * w
    time = tl.load(timestep + row).to(tl.float32)
    token = src_token(s, offsets, time, key, row, h, w, stride, columns, count, sy, sx)
    token += window_corner(h, w, across)
    dst = tl.load(match + place * sources + s, valid, other=0)
    merged = valid & (rank < remove)
    alone = valid & (rank >= remove)
    tl.store(edge + place * remove + rank, dst, merged)
    tl.store(edge_token + place * remove + rank, token, merged)
    number = window * (n - remove) + tl.where(merged, kept + dst, rank - remove)
    tl.store(slot + b * windows * n + token, number.to(tl.int64), valid)
    tl.store(order + place * n + rank - remove, token, alone)
    begins = window * n + rank - remove
    tl.store(start + b + place * (n - remove) + rank - remove, begins, alone)


@triton.jit
def _list_members(
    edge,
    edge_token,
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
    sy: tl.constexpr,
    sx: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Lists the members of each destination's slot: the destination, then what merges into it.

    The first programs place the merged tokens, the rest the destinations.
    """
    if flag is not None:
        if tl.load(flag) == 0:
            return
    b = tl.program_id(2).to(tl.int64)
    windows = tl.num_programs(1)
    window = tl.program_id(1)
    n = h * w
    kept = n - count - remove
    place = b * windows + window
    edge += place * remove
    order += place * n
    merging_programs = tl.cdiv(remove, BLOCK)
    if tl.program_id(0) < merging_programs:
        i0 = tl.program_id(0) * BLOCK
        i = i0 + tl.arange(0, BLOCK)
        dst = tl.load(edge + i, i < remove, other=0)
        token = tl.load(edge_token + place * remove + i, i < remove, other=0)
        before = _place(edge, dst, i0, remove, BLOCK_J, DESCENDING=False)
        tl.store(order + kept + before + dst + 1, token, i < remove)
    else:
        d = (tl.program_id(0) - merging_programs) * BLOCK + tl.arange(0, BLOCK)
        valid = d < count
        before = _count(edge, d, 0, remove, BLOCK_J, DESCENDING=False, TIES=False)
        row, stride = b // rows, across * w
        time = tl.load(timestep + row).to(tl.float32)
        token = dst_token(d, offsets, time, key, row, stride, columns, count, sy, sx)
        token += window_corner(h, w, across)
        first = kept + before + d
        tl.store(order + first, token, valid)
        number = window * (n - remove) + kept + d
        tl.store(slot + b * windows * n + token, number.to(tl.int64), valid)
        start += b * (windows * (n - remove) + 1)
        tl.store(start + number, window * n + first, valid)
        tl.store(start + windows * (n - remove) + d * 0, windows * n + d * 0, d == 0)


def search_windows(
    metric: Tensor,
    cells: Cells,
    remove: int,
    destinations: dict[str, Any],
    plan: dict[str, Any],
    clock: Tensor | None,
    wrap_triton: Callable[[Any], Any],
) -> None:
    """Matches the tokens of each window; see `triton_matching.match_tokens`.

    Args:
        metric: `[B, N, C]`, contiguous.
        remove: tokens to remove in each window.
        destinations: which tokens are, as arguments of kernels.
        plan: where to write slot, order and start.
    """
    batch, n, channels = metric.shape
    window, windows = cells.window, cells.windows
    inverse = metric.new_empty(batch, n, dtype=torch.float32)
    # Each its own tensor: the compiler would copy the parts of a common one.
    score = metric.new_empty(batch, cells.sources, dtype=torch.float32)
    match = metric.new_empty(batch, cells.sources, dtype=torch.int32)
    edge = metric.new_empty(batch, remove * windows, dtype=torch.int32)
    edge_token = metric.new_empty(batch, remove * windows, dtype=torch.int32)
    lists = {"edge": edge, "edge_token": edge_token, "BLOCK": 32, "BLOCK_J": 128}
    found = {"score": score, "match": match}
    common = {**destinations, "flag": clock}
    tiles = _tiles(metric, window.count)
    wrap_triton(_inverse_norm)[(blocks(n, 8), batch)](
        metric, inverse, clock, n, channels, BLOCK_N=8, BLOCK_C=256
    )
    wrap_triton(_best_match)[(blocks(window.sources, tiles["BLOCK_S"]), windows, batch)](
        x=metric, inverse=inverse, channels=channels, **found, **tiles, **common
    )
    wrap_triton(_rank)[(blocks(window.sources, 32), windows, batch)](
        **found, **lists, **plan, **common, remove=remove
    )
    programs = blocks(remove, 32) + blocks(window.count, 32)
    wrap_triton(_list_members)[(programs, windows, batch)](**lists, **plan, **common, remove=remove)


def _tiles(metric: Tensor, destinations: int) -> dict[str, Any]:
    """Tiles of `_best_match`: by measurement, the largest that fit and are not mostly empty."""
    wide = metric.dtype == torch.float32
    tiles: dict[str, Any] = {
        "precision": "tf32x3" if wide else "ieee",
        "BLOCK_C": 32 if wide else 64,
        "num_stages": 3,
    }
    if destinations <= 32:
        return tiles | {"BLOCK_S": 64, "BLOCK_D": 16 if destinations <= 16 else 32, "num_warps": 4}
    large_memory = metric.is_cuda and torch.cuda.get_device_capability(metric.device) in (
        (8, 0),
        (9, 0),
    )
    if large_memory and not wide:
        return tiles | {"BLOCK_S": 128, "BLOCK_D": 256, "num_warps": 8}
    return tiles | {"BLOCK_S": 128, "BLOCK_D": 128, "num_warps": 8 if wide else 4}
