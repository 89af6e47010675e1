"""The selector that does not look: neighbours on the grid belong together."""

import torch
from torch import Tensor

from .. import kernels
from ..kernels import Cells, reference
from ..plan import MergePlan

__all__ = ["grid", "spread"]

# Powers of 1 / 1.3247..., the plastic number, in units of 2^-31: the plane's golden ratio.
_DOWN, _ACROSS = 1621087445, 1223722707
_MASK = 0x7FFFFFFF


def grid(
    metric: Tensor,
    cells: Cells,
    remove: int,
    *,
    backend: str = "auto",
    timestep: Tensor | None = None,
    key: int = -1,
) -> MergePlan:
    """A plan that merges whole cells of sy x sx tokens, spread evenly over the image.

    Where tokens are merged, they are, as in downsampling (Smith et al., ToDo: Token Downsampling
    for Efficient Generation of High-Resolution Images, 2024), but by their mean. The last of the
    cells may be merged in part. Windows do not matter, nor do `timestep` and `key`: nothing is
    drawn. Tokens left over at the edges join the cell next to them if all the cells together are
    not enough.

    Args:
        metric: `[B, N, C]`; its shape and device matter only.
        remove: tokens to remove, at most `cells.sources`.
    """
    whole = Cells(cells.h, cells.w, cells.sy, cells.sx)
    # In windows that cells do not fill, there are fewer of them, and more can be removed.
    slot = _slots(whole if remove <= whole.sources else cells, remove, metric.device)
    order, span = reference.members(slot[None], cells.tokens - remove)
    batch = metric.shape[0]
    slot, order = (part.expand(batch, -1).contiguous() for part in (slot, order))
    span = span.expand(batch, -1, -1).contiguous()
    return MergePlan(slot, order, span, kernels.use_triton(backend, metric), shared=True)


def spread(row: Tensor, column: Tensor) -> Tensor:
    """Numbers the places of a grid so that the first few, however few, lie evenly all over it.

    (The R2 sequence of M. Roberts, read as a lattice. Whole numbers: the same on every device.)

    Returns:
        Distinct numbers in `[0, 2^31)`, not consecutive, to be sorted by.
    """
    return (row * _DOWN + column * _ACROSS) & _MASK


def _slots(cells: Cells, remove: int, device: torch.device) -> Tensor:
    """Slot of each token, `[N]`. Slots are numbered in the order of the tokens that stay."""
    top, below = _first_in_cell(cells.h, cells.down, cells.sy, device)
    left, beside = _first_in_cell(cells.w, cells.across, cells.sx, device)
    home = top[:, None] * cells.w + left
    turn = spread((top // cells.sy)[:, None], left // cells.sx)
    left_over = (below >= cells.sy)[:, None] | (beside >= cells.sx)
    stays = (below[:, None] + beside) == 0
    turn = torch.where(left_over, turn + _MASK + 1, turn)
    turn = torch.where(stays, 2 * (_MASK + 1), turn).flatten()
    # The tokens of a cell have the same turn, so it is finished before the next one begins.
    place = turn.argsort(stable=True).argsort()
    kept = place >= remove
    number = kept.cumsum(0) - 1
    return torch.where(kept, number, number[home.flatten()])


def _first_in_cell(
    side: int, windows: int, cell: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Along one side of the grid: where the cell of each place begins, and how far it is from
    there, `[side]` each. What is left over at the end of a window goes to its last cell."""
    place = torch.arange(side, device=device)
    each = side // windows
    inside = place % each
    first = (inside // cell).clamp(max=each // cell - 1) * cell
    return place - inside + first, inside - first
