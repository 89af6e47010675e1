"""The selector of the paper: bipartite soft matching on a grid of cells.

One token of each `sy x sx` cell is a destination (dst), all others are sources (src). The sources
most similar to a destination, by cosine, are merged into it; the rest stay on their own.
(Bolya and Hoffman, Token Merging for Fast Stable Diffusion, 2023, section 4.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..plan import MergePlan

__all__ = ["Cells", "bipartite"]


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
    def choices(self) -> int:
        """Tokens in a cell."""
        return self.sy * self.sx

    @property
    def count(self) -> int:
        """Cells, and so destinations."""
        return (self.h // self.sy) * (self.w // self.sx)

    @property
    def sources(self) -> int:
        return self.h * self.w - self.count

    def removable(self, ratio: float) -> int:
        """Tokens that `ratio` removes: never more than there are sources."""
        return min(int(self.h * self.w * ratio), self.sources)

    def split(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Token numbers of sources and destinations.

        Args:
            offsets: which token of each cell is its dst, counted row by row, `[T, count]`.

        Returns:
            src `[T, sources]` and dst `[T, count]`.
        """
        device = offsets.device
        tokens = torch.arange(self.h * self.w, device=device).view(self.h, self.w)
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


@torch.no_grad()
def bipartite(metric: Tensor, cells: Cells, remove: int, offsets: Tensor) -> MergePlan:
    """Merges the `remove` sources that are most similar to a destination into it.

    Args:
        metric: what similarity is measured on, `[B, N, C]`.
        remove: tokens to remove, 1 to `cells.sources`.
        offsets: the dst of each cell, `[1 or B, cells.count]`.
    """
    batch, n, channels = metric.shape
    src, dst = (index.expand(batch, -1) for index in cells.split(offsets))
    direction = _direction(metric)
    # A tile of scores as large as the tokens themselves: below what the layer needs anyway.
    tile = max(1, n * channels // cells.count)
    score, match = kernels.best_match(
        kernels.slot_gather(direction, src), kernels.slot_gather(direction, dst), tile
    )
    # Slots are numbered as the original orders its tokens: kept sources by falling similarity,
    # then the destinations.
    order = score.argsort(dim=1, descending=True)
    merged, kept = order[:, :remove], order[:, remove:]
    slot_of_dst = torch.arange(kept.shape[1], n - remove, device=metric.device).expand(batch, -1)
    slot_of_kept = torch.arange(kept.shape[1], device=metric.device).expand(batch, -1)
    slot = torch.empty(batch, n, dtype=torch.int64, device=metric.device)
    slot = slot.scatter(1, dst, slot_of_dst)
    slot = slot.scatter(1, src.gather(1, kept), slot_of_kept)
    slot = slot.scatter(1, src.gather(1, merged), match.gather(1, merged) + kept.shape[1])
    return MergePlan.from_slots(slot, n - remove)


def _direction(metric: Tensor) -> Tensor:
    """Unit vectors `[B, N, C]`; of zero, infinite and NaN tokens, zero, which matches nothing."""
    dtype = metric.dtype
    if dtype in (torch.float16, torch.bfloat16):
        metric = metric.float()  # the squares of large tokens overflow half precision
    norm = metric.norm(dim=-1, keepdim=True)
    usable = (norm > 0) & torch.isfinite(norm)
    return torch.where(usable, metric / norm, 0.0).to(dtype)
