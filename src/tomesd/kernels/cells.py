"""The cells of a token grid: where the destinations of the bipartite selector are."""

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
            even: as many in each window.
            multiple: of so many are the tokens that stay, unless none or all sources go; up to
                `multiple - 1` more go for that.
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
