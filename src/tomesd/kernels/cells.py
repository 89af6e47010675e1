"""The cells of a token grid, and the draw of the destinations of the bipartite selector in them.

Nothing is drawn from a generator: an integer hash of what identifies a draw, which depends on
nothing but (seed, timestep, level, cell), is the same for the conditional and the unconditional
half, for any batch size, on every device, and when gradient checkpointing runs a block a second
time. It leaves no state to reset and traces into a compiled graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# More scores of sources and destinations do not fit into the registers of a program.
_MOST_SOURCES = 128


@dataclass(frozen=True)
class Cells:
    """A grid of h x w tokens cut into equal windows, and these into cells of sy x sx.

    A token is compared with those of its own window only. Rows and columns of a window that are
    left over at its bottom and right belong to no cell. In a window smaller than a cell, the cell
    shrinks to it.
    """

    h: int
    w: int
    sy: int
    sx: int
    down: int = 1
    """Windows below each other."""
    across: int = 1
    """Windows beside each other."""

    @classmethod
    def of(cls, h: int, w: int, sy: int, sx: int, window: int = 0) -> "Cells":
        """The cells of a grid.

        Args:
            window: least side of a window; the next larger that divides the grid is taken. 0: one
                window.
        """
        down, across = (_parts(side, window) for side in (h, w))
        return cls(h, w, min(sy, h // down), min(sx, w // across), down, across)

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """All that it is made of: operators of PyTorch take nothing else."""
        return self.h, self.w, self.sy, self.sx, self.down, self.across

    @property
    def tokens(self) -> int:
        return self.h * self.w

    @property
    def choices(self) -> int:
        """Tokens in a cell."""
        return self.sy * self.sx

    @property
    def windows(self) -> int:
        return self.down * self.across

    @property
    def window(self) -> "Cells":
        """One of the windows, as a grid of its own."""
        return Cells(self.h // self.down, self.w // self.across, self.sy, self.sx)

    @property
    def count(self) -> int:
        """Cells, and so destinations."""
        return self.windows * (self.h // self.down // self.sy) * (self.w // self.across // self.sx)

    @property
    def sources(self) -> int:
        return self.tokens - self.count

    @property
    def comparisons(self) -> int:
        """Pairs of a source and a destination that are compared."""
        return self.sources * self.count // self.windows

    @property
    def fits_one_program(self) -> bool:
        """Of a window: whether one program of a GPU can hold all of its scores."""
        count = self.count
        return max(self.tokens - count, count) <= _MOST_SOURCES

    def removable(self, ratio: float, *, even: bool = False, multiple: int = 1) -> int:
        """Tokens that `ratio` removes, never more than sources.

        Args:
            even: whether as many are removed from each window.
            multiple: the number of tokens that stay is a multiple of this, unless none or all
                sources are removed; up to `multiple - 1` more are removed for it.
        """
        if even:
            return min(int(self.tokens // self.windows * ratio) * self.windows, self.sources)
        wanted = int(self.tokens * ratio)
        if wanted == 0:
            return 0
        return min(self.tokens - (self.tokens - wanted) // multiple * multiple, self.sources)

    def split(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Token numbers of sources and destinations, window by window.

        Args:
            offsets: which token of each cell is its dst, counted row by row, `[T, count]`.

        Returns:
            src `[T, windows, sources / windows]` and dst `[T, windows, count / windows]`.
        """
        device, times = offsets.device, offsets.shape[0]
        h, w = self.h // self.down, self.w // self.across
        rows, columns = h // self.sy, w // self.sx
        tokens = torch.arange(self.tokens, device=device).view(self.down, h, self.across, w)
        tokens = tokens.transpose(1, 2).reshape(self.windows, h, w)
        inside = tokens[:, : rows * self.sy, : columns * self.sx]
        cells = inside.reshape(self.windows, rows, self.sy, columns, self.sx).transpose(2, 3)
        cells = cells.reshape(1, self.windows, -1, self.choices).expand(times, -1, -1, -1)
        # Counting on from the dst, modulo the cell, lists all its tokens with the dst first.
        first = offsets.view(times, self.windows, -1, 1)
        order = (first + torch.arange(self.choices, device=device)) % self.choices
        cells = cells.gather(3, order)
        right = tokens[:, : rows * self.sy, columns * self.sx :].flatten(1)
        bottom = tokens[:, rows * self.sy :].flatten(1)
        left_over = torch.cat([right, bottom], dim=1).expand(times, -1, -1)
        return torch.cat([cells[..., 1:].flatten(2), left_over], dim=2), cells[..., 0]


def _parts(side: int, window: int) -> int:
    """Into how many equal parts of at least `window` a side can be cut."""
    if window <= 0:
        return 1
    # A number to the compiler too, not a symbol: how many windows there are shapes the program.
    side = int(side)
    parts = max(1, side // window)
    while side % parts:
        parts -= 1
    return parts


MASK = 0x7FFFFFFF  # 31 bits: with a 27-bit multiplier no product overflows int64
MULTIPLIERS = (0x45D9F3B, 0x2C1B3C6D >> 4, 0x297A2D39 >> 4)


@dataclass(frozen=True)
class Draw:
    """Which token of each cell is its destination."""

    timestep: Tensor | None = None
    """`[]` or `[T]`: one for all items of the batch, or for as many as there are batch / T."""
    key: int = -1
    """From `draw_key`. Negative: nothing is drawn, and the destinations are the top left tokens."""

    def offsets(self, cells: Cells, batch: int, device: torch.device) -> Tensor:
        """The destination of each cell, counted row by row in it, `[1 or batch, cells.count]`."""
        if self.key < 0:
            return torch.zeros(1, cells.count, dtype=torch.int64, device=device)
        timestep = torch.zeros(1, device=device) if self.timestep is None else self.timestep
        drawn = draw_offsets(cells.count, cells.choices, self.key, timestep.reshape(-1))
        images = drawn.shape[0]
        if batch % images:
            return drawn[:1]  # a part of a batch: in sampling, all have the same timestep
        # One timestep per image; a video model folds its frames into the batch.
        return drawn.repeat_interleave(batch // images, dim=0) if images > 1 else drawn


def _mix(x: Tensor | int) -> Tensor | int:
    """Scrambles 31 bits; neighbouring inputs give unrelated outputs."""
    for multiplier in MULTIPLIERS:
        x = ((x ^ (x >> 15)) * multiplier) & MASK
    return x ^ (x >> 16)


def draw_key(seed: int, level: int) -> int:
    """What the draws of one level of one run have in common, 31 bits."""
    return int(_mix((seed & MASK) ^ _mix((seed >> 31 & MASK) ^ _mix(int(level)))))


def draw_offsets(cells: int, choices: int, key: int, timestep: Tensor) -> Tensor:
    """One uniform draw from `range(choices)` per cell.

    Args:
        key: from `draw_key`.
        timestep: `[T]`, any dtype; one draw is made for each.

    Returns:
        `[T, cells]`, int64.
    """
    # The bits of the float tell apart fractional timesteps and sigmas; 500 and 500.0 are the same.
    bits = timestep.to(torch.float32).view(torch.int32).to(torch.int64) & MASK
    mixed = _mix(bits ^ key)
    cell = torch.arange(cells, device=timestep.device)
    return _mix(mixed[:, None] ^ _mix(cell)) % choices  # type: ignore[index, return-value]
