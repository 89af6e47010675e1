"""Where tokens lie and which are drawn, for Triton kernels: `cells.py` on a GPU."""

# Kernels are Triton's language, not Python's.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, allow-untyped-calls

from typing import Any

import triton
import triton.language as tl

from .cells import MASK, MULTIPLIERS, Cells
from .triton_launch import power_of_2

_MASK = tl.constexpr(MASK)
_M0, _M1, _M2 = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


@triton.jit
def _mix(x):
    """Scrambles 31 bits, as `cells._mix` does."""
    x = ((x ^ (x >> 15)) * _M0) & _MASK
    x = ((x ^ (x >> 15)) * _M1) & _MASK
    x = ((x ^ (x >> 15)) * _M2) & _MASK
    return x ^ (x >> 16)


@triton.jit
def _drawn(cell, time, key, choices: tl.constexpr):
    """Which token of each cell is its destination, as `Draw.offsets` has it.

    Takes the time itself, not where it is: PyTorch believes of a function that helps to find an
    address to write to that it writes to all pointers it is given, and replays no CUDA graphs of
    models whose input is written to.
    """
    bits = time.to(tl.int32, bitcast=True).to(tl.int64) & _MASK
    drawn = _mix(_mix(bits ^ key) ^ _mix(cell.to(tl.int64))) % choices
    return tl.where(key < 0, 0, drawn).to(tl.int32)


@triton.jit
def inverse_length(squares):
    """1 / length of tokens with these sums of squares; 0 for zero, infinite and NaN ones."""
    usable = (squares > 0) & (squares < float("inf"))
    return tl.where(usable, 1.0 / tl.sqrt(tl.where(usable, squares, 1.0)), 0.0)


@triton.jit
def _in_window(y_x, window, h, w, across):
    """A token of the image: row and column of its window, as y * w + x, and the window itself."""
    y = (window // across) * h + y_x // w
    return y * (across * w) + (window % across) * w + y_x % w


@triton.jit
def cells_in(h, w, sy: tl.constexpr, sx: tl.constexpr):
    """Cells, and so destinations, of a window of h x w tokens."""
    return (h // sy) * (w // sx)


@triton.jit
def dst_token(d, time, key, h, w, across, sy: tl.constexpr, sx: tl.constexpr):
    """Destination d, counted window by window: the chosen token of cell d."""
    columns, count = w // sx, cells_in(h, w, sy, sx)
    inside = _drawn(d, time, key, sy * sx)
    i = d % count
    y, x = (i // columns) * sy + inside // sx, (i % columns) * sx + inside % sx
    return _in_window(y * w + x, d // count, h, w, across)


@triton.jit
def src_token(s, time, key, h, w, across, sy: tl.constexpr, sx: tl.constexpr):
    """Source s, counted window by window: the rest of each cell, then what belongs to none."""
    others: tl.constexpr = sy * sx - 1
    per_cell: tl.constexpr = others if others > 0 else 1
    columns, count = w // sx, cells_in(h, w, sy, sx)
    sources = h * w - count
    window = s // sources
    i = s % sources
    in_cells = count * others
    d = i // per_cell
    first = _drawn(window * count + d, time, key, sy * sx)
    inside = (first + i % per_cell + 1) % (sy * sx)
    of_cell = ((d // columns) * sy + inside // sx) * w + (d % columns) * sx + inside % sx
    i -= in_cells
    rows = (h // sy) * sy
    strip = w - columns * sx  # width of the strip to the right of the cells
    right = (i // tl.maximum(strip, 1)) * w + columns * sx + i % tl.maximum(strip, 1)
    below = i - rows * strip
    bottom = (rows + below // w) * w + below % w
    y_x = tl.where(i < 0, of_cell, tl.where(i < rows * strip, right, bottom))
    return _in_window(y_x, window, h, w, across)


def window_tile(window: Cells) -> dict[str, Any]:
    """Of kernels whose programs hold all sources and all destinations of a window each."""
    sources = max(16, power_of_2(window.sources))
    destinations = max(16, power_of_2(window.count))
    return {
        "BLOCK_S": sources,
        "BLOCK_D": destinations,
        "num_warps": 4 if sources <= 64 else 8,
        # Pipelined, products came out wrong on a GPU (8 warps, 3 stages, float16, Triton 3.6), and
        # it is hardly slower without.
        "num_stages": 1,
    }
