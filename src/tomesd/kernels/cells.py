"""The cells of a token grid: where the destinations of the bipartite selector are."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Cells"]


@dataclass(frozen=True)
class Cells:
    """A grid of h x w tokens cut into cells of sy x sx.

    Rows and columns left over at the bottom and the right belong to no cell. On a grid smaller than
    a cell, the cell shrinks to it.
    """

    h: int
    w: int
    sy: int
    sx: int

    @classmethod
    def of(cls, h: int, w: int, sy: int, sx: int) -> "Cells":
        return cls(h, w, min(sy, h), min(sx, w))

    @property
    def tokens(self) -> int:
        return self.h * self.w

    @property
    def choices(self) -> int:
        """Tokens in a cell."""
        return self.sy * self.sx

    @property
    def count(self) -> int:
        """Cells, and so destinations."""
        return (self.h // self.sy) * (self.w // self.sx)

    @property
    def sources(self) -> int:
        return self.tokens - self.count

    def removable(self, ratio: float) -> int:
        """Tokens that `ratio` removes: never more than there are sources."""
        return min(int(self.tokens * ratio), self.sources)

    def split(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Token numbers of sources and destinations.

        Args:
            offsets: which token of each cell is its dst, counted row by row, `[T, count]`.

        Returns:
            src `[T, sources]` and dst `[T, count]`.
        """
        device = offsets.device
        tokens = torch.arange(self.tokens, device=device).view(self.h, self.w)
        rows, columns = self.h // self.sy, self.w // self.sx
        inside = tokens[: rows * self.sy, : columns * self.sx]
        cells = inside.reshape(rows, self.sy, columns, self.sx).transpose(1, 2)
        cells = cells.reshape(1, self.count, self.choices).expand(offsets.shape[0], -1, -1)
        # Counting on from the dst, modulo the cell, lists all its tokens with the dst first.
        order = (offsets.unsqueeze(-1) + torch.arange(self.choices, device=device)) % self.choices
        cells = cells.gather(2, order)
        right = tokens[: rows * self.sy, columns * self.sx :]
        bottom = tokens[rows * self.sy :]
        left_over = torch.cat([right.flatten(), bottom.flatten()])
        src = torch.cat([cells[..., 1:].flatten(1), left_over.expand(offsets.shape[0], -1)], dim=1)
        return src, cells[..., 0]
