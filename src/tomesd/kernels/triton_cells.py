"""Where tokens lie and which are drawn, for Triton kernels: `cells.py` and `draw.py` on a GPU."""

# Kernels are Triton's language, not Python's.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from .draw import MASK, MULTIPLIERS

__all__ = ["dst_token", "inverse_length", "src_token", "window_corner"]

_MASK = tl.constexpr(MASK)
_M0, _M1, _M2 = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


@triton.jit
def _mix(x):
    """Scrambles 31 bits, as `draw._mix` does."""
    x = ((x ^ (x >> 15)) * _M0) & _MASK
    x = ((x ^ (x >> 15)) * _M1) & _MASK
    x = ((x ^ (x >> 15)) * _M2) & _MASK
    return x ^ (x >> 16)


@triton.jit
def offset(cell, valid, row, cells, offsets, time, key, choices: tl.constexpr):
    """Which token of each cell is its destination.

    It is given in offsets [T, cells], or drawn as `draw.draw_offsets` does, or, if the key is
    negative, the first. Takes the time itself, not where it is: PyTorch believes of a function that
    helps to find an address to write to that it writes to all pointers it is given, and replays no
    CUDA graphs of models whose input is written to.
    """
    if offsets is not None:
        inside = tl.load(offsets + row * cells + cell, valid, other=0)
    else:
        bits = time.to(tl.int32, bitcast=True).to(tl.int64) & _MASK
        drawn = _mix(_mix(bits ^ key) ^ _mix(cell.to(tl.int64))) % choices
        inside = tl.where(key < 0, 0, drawn).to(tl.int32)
    return inside


@triton.jit
def inverse_length(squares):
    """1 / length of tokens with these sums of squares; 0 for zero, infinite and NaN ones."""
    usable = (squares > 0) & (squares < float("inf"))
    return tl.where(usable, 1.0 / tl.sqrt(tl.where(usable, squares, 1.0)), 0.0)


@triton.jit
def window_corner(h, w, across):
    """First token of the window that this program works on, of h x w tokens each."""
    window = tl.program_id(1)
    return (window // across) * h * (across * w) + (window % across) * w


@triton.jit
def dst_token(
    d,
    offsets,
    time,
    key,
    row,
    stride,
    columns,
    count,
    sy: tl.constexpr,
    sx: tl.constexpr,
):
    """Destination d of a window, counted from its corner: the chosen token of cell d."""
    cell = tl.program_id(1) * count + d
    cells = tl.num_programs(1) * count
    inside = offset(cell, d < count, row, cells, offsets, time, key, sy * sx)
    return ((d // columns) * sy + inside // sx) * stride + (d % columns) * sx + inside % sx


@triton.jit
def src_token(
    s,
    offsets,
    time,
    key,
    row,
    h,
    w,
    stride,
    columns,
    count,
    sy: tl.constexpr,
    sx: tl.constexpr,
):
    """Source s of a window, counted from its corner: the rest of each cell, then the left over."""
    others: tl.constexpr = sy * sx - 1
    per_cell: tl.constexpr = others if others > 0 else 1
    in_cells = count * others
    d = s // per_cell
    cell = tl.program_id(1) * count + d
    cells = tl.num_programs(1) * count
    first = offset(cell, s < in_cells, row, cells, offsets, time, key, sy * sx)
    inside = (first + s % per_cell + 1) % (sy * sx)
    of_cell = ((d // columns) * sy + inside // sx) * stride + (d % columns) * sx + inside % sx
    i = s - in_cells
    rows = (h // sy) * sy
    strip = w - columns * sx  # width of the strip to the right of the cells
    right = (i // tl.maximum(strip, 1)) * stride + columns * sx + i % tl.maximum(strip, 1)
    below = i - rows * strip
    bottom = (rows + below // w) * stride + below % w
    return tl.where(s < in_cells, of_cell, tl.where(i < rows * strip, right, bottom))
