"""Triton kernels that find the most similar destination of every source, in its window.

They never hold all scores of an image. Windows that a program can hold take one launch, larger ones
two.
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
from .triton_cells import cells_in, dst_token, inverse_length, src_token, window_tile
from .triton_launch import blocks, jit_at_any_step


@jit_at_any_step
def _best_in_window(
    x, timestep, key, rows, score, match, flag, h, w, windows, across, channels,
    sy: tl.constexpr, sx: tl.constexpr, precision: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """score and match [B, S]: the most similar destination of each source, by cosine."""
    if flag is not None:
        if tl.load(flag) == 0:
            return
    window = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    count = cells_in(h, w, sy, sx)
    sources = h * w - count
    i = tl.arange(0, BLOCK_S)
    j = tl.arange(0, BLOCK_D)
    s, d = window * sources + i, window * count + j
    row = b // rows
    time = tl.load(timestep + row).to(tl.float32)
    src = src_token(s, time, key, h, w, across, sy, sx)
    dst = dst_token(d, time, key, h, w, across, sy, sx)
    x += b * windows * h * w * channels
    src_row = x + src.to(tl.int64) * channels
    dst_row = x + dst.to(tl.int64) * channels
    product = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    src_squares = tl.zeros([BLOCK_S], tl.float32)
    dst_squares = tl.zeros([BLOCK_D], tl.float32)
    for c0 in range(0, channels, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        left = tl.load(
            src_row[:, None] + c[None, :],
            (i < sources)[:, None] & (c < channels)[None, :],
            other=0.0,
        )
        right = tl.load(
            dst_row[None, :] + c[:, None],
            (j < count)[None, :] & (c < channels)[:, None],
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
    similarity = tl.where((j < count)[None, :], similarity, float("-inf"))
    best, index = tl.max(similarity, axis=1, return_indices=True)
    at = b * windows * sources + s
    tl.store(score + at, best * src_inverse, i < sources)
    tl.store(match + at, window * count + index, i < sources)


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


@jit_at_any_step
def _best_match(
    x, inverse, timestep, key, rows, score, match, flag, h, w, windows, across, channels,
    sy: tl.constexpr, sx: tl.constexpr, precision: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """score and match [B, S]: as `_best_in_window`, for a part of the sources of a window."""
    if flag is not None:
        if tl.load(flag) == 0:
            return
    window = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    count = cells_in(h, w, sy, sx)
    sources = h * w - count
    first = b * windows * h * w
    x += first * channels
    inverse += first
    i = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    s = window * sources + i
    row = b // rows
    time = tl.load(timestep + row).to(tl.float32)
    src = src_token(s, time, key, h, w, across, sy, sx)
    src_inverse = tl.load(inverse + src, i < sources, other=0.0)
    # Unusable tokens are not loaded: an infinity times the zero of its inverse is NaN.
    src_row = x + src.to(tl.int64) * channels
    best = tl.full([BLOCK_S], float("-inf"), tl.float32)
    best_d = tl.zeros([BLOCK_S], tl.int32)
    for j0 in range(0, count, BLOCK_D):
        j = j0 + tl.arange(0, BLOCK_D)
        d = window * count + j
        dst = dst_token(d, time, key, h, w, across, sy, sx)
        dst_inverse = tl.load(inverse + dst, j < count, other=0.0)
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
        similarity = tl.where((j < count)[None, :], product * dst_inverse[None, :], float("-inf"))
        here, index = tl.max(similarity, axis=1, return_indices=True)
        best_d = tl.where(here > best, j0 + index, best_d)
        best = tl.maximum(best, here)
    at = b * windows * sources + s
    tl.store(score + at, best * src_inverse, i < sources)
    tl.store(match + at, window * count + best_d, i < sources)


def search(
    metric: Tensor,
    cells: Cells,
    common: dict[str, Any],
    wrap_triton: Callable[[Any], Any],
) -> tuple[Tensor, Tensor]:
    """The best match of every source.

    Args:
        metric: `[B, N, C]`, contiguous.
        common: arguments that all kernels of the matching take.

    Returns:
        Scores `[B, S]`, float32, and numbers of destinations `[B, S]`, int32, both counted window
        by window.
    """
    batch, n, channels = metric.shape
    window, windows = cells.window, cells.windows
    # Each its own tensor: the compiler would copy the parts of a common one.
    score = metric.new_empty(batch, cells.sources, dtype=torch.float32)
    match = metric.new_empty(batch, cells.sources, dtype=torch.int32)
    common = common | {"x": metric, "score": score, "match": match, "channels": channels}
    if window.fits_one_program:
        wide = metric.dtype == torch.float32
        wrap_triton(_best_in_window)[(windows, batch)](
            **common,
            **window_tile(window),
            precision=_precision(metric),
            BLOCK_C=64 if wide else 128,
        )
        return score, match
    inverse = metric.new_empty(batch, n, dtype=torch.float32)
    wrap_triton(_inverse_norm)[(blocks(n, 8), batch)](
        metric, inverse, common["flag"], n, channels, BLOCK_N=8, BLOCK_C=256
    )
    tiles = _tiles(metric, window.count)
    wrap_triton(_best_match)[(blocks(window.sources, tiles["BLOCK_S"]), windows, batch)](
        inverse=inverse, **common, **tiles
    )
    return score, match


def _tiles(metric: Tensor, destinations: int) -> dict[str, Any]:
    """Tiles of `_best_match`: by measurement, the largest that fit and are not mostly empty."""
    wide = metric.dtype == torch.float32
    tiles: dict[str, Any] = {
        "precision": _precision(metric),
        "BLOCK_C": 32 if wide else 64,
        "num_stages": 3,
    }
    if destinations <= 32:
        return tiles | {"BLOCK_S": 64, "BLOCK_D": 16 if destinations <= 16 else 32, "num_warps": 4}
    if torch.version.hip is not None:  # programs have 64 KiB there
        return tiles | {"BLOCK_S": 64, "BLOCK_D": 64, "num_warps": 4, "num_stages": 2}
    if not wide and _has_large_memory(metric):
        return tiles | {"BLOCK_S": 128, "BLOCK_D": 256, "num_warps": 8}
    return tiles | {"BLOCK_S": 128, "BLOCK_D": 128, "num_warps": 8 if wide else 4}


def _has_large_memory(metric: Tensor) -> bool:
    """Whether the GPU is an A100 or one of Hopper, if it is one of NVIDIA."""
    return metric.is_cuda and torch.cuda.get_device_capability(metric.device) in ((8, 0), (9, 0))


def _precision(metric: Tensor) -> str:
    """How matrices are multiplied: as precisely as the dtype is."""
    wide = metric.dtype == torch.float32
    return "tf32x3" if wide and torch.version.hip is None else "ieee"  # AMD has no tf32x3
