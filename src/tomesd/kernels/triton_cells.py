"""Where tokens lie and which are drawn, for Triton kernels: `cells.py` and `draw.py` on a GPU."""

# Kernels are Triton's language, not Python's.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, allow-untyped-calls

import triton
import triton.language as tl

from .draw import MASK, MULTIPLIERS

__all__ = ["draw", "dst_token", "src_token", "window_corner"]

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
def draw(timestep, offsets, key, count, choices, BLOCK: tl.constexpr):
    """offsets [T, count], as `draw.draw_offsets` makes them."""
    row = tl.program_id(1)
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    time = tl.load(timestep + row).to(tl.float32)
    bits = time.to(tl.int32, bitcast=True).to(tl.int64) & _MASK
    drawn = _mix(_mix(bits ^ key) ^ _mix(cell.to(tl.int64))) % choices
    tl.store(offsets + row * count + cell, drawn.to(tl.int32), cell < count)


@triton.jit
def window_corner(h, w, across):
    """First token of the window that this program works on, of h x w tokens each."""
    window = tl.program_id(1)
    return (window // across) * h * (across * w) + (window % across) * w


@triton.jit
def dst_token(d, offsets, valid, stride, columns, sy: tl.constexpr, sx: tl.constexpr):
    """Destination d of a window, counted from its corner: the drawn token of cell d."""
    inside = tl.load(offsets + d, valid, other=0)
    return ((d // columns) * sy + inside // sx) * stride + (d % columns) * sx + inside % sx


@triton.jit
def src_token(s, offsets, valid, h, w, stride, columns, count, sy: tl.constexpr, sx: tl.constexpr):
    """Source s of a window, counted from its corner: the rest of each cell, then the left over."""
    others: tl.constexpr = sy * sx - 1
    per_cell: tl.constexpr = others if others > 0 else 1
    in_cells = count * others
    cell = s // per_cell
    drawn = tl.load(offsets + cell, valid & (s < in_cells), other=0)
    inside = (drawn + s % per_cell + 1) % (sy * sx)
    of_cell = ((cell // columns) * sy + inside // sx) * stride + (cell % columns) * sx + inside % sx
    i = s - in_cells
    rows = (h // sy) * sy
    strip = w - columns * sx  # width of the strip to the right of the cells
    right = (i // tl.maximum(strip, 1)) * stride + columns * sx + i % tl.maximum(strip, 1)
    below = i - rows * strip
    bottom = (rows + below // w) * stride + below % w
    return tl.where(s < in_cells, of_cell, tl.where(i < rows * strip, right, bottom))
