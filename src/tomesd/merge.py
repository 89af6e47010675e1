"""The functional form of the original library, kept because user interfaces import it."""

from collections.abc import Callable

import torch
from torch import Tensor

from .kernels import Cells, reference, use_triton
from .plan import MergePlan


def do_nothing(x: Tensor, mode: str | None = None) -> Tensor:
    return x


def bipartite_soft_matching_random2d(
    metric: Tensor,
    w: int,
    h: int,
    sx: int,
    sy: int,
    r: int,
    no_rand: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
    """Functions that merge away `r` tokens and put them back.

    Args:
        metric: what similarity is measured on, `[B, h * w, C]`.
        w, h: width and height of the grid, in tokens.
        sx, sy: width and height of a cell.
        r: tokens to remove; one per cell always stays, so more than the rest has no effect.
        no_rand: take the top left token of each cell as its destination.
        generator: draws the destinations, unless `no_rand`.

    Returns:
        `merge(x, mode="mean")`, `[B, N, C]` to `[B, N - r, C]`, and `unmerge(y)`, back again.
    """
    cells = Cells.of(h, w, sy, sx)
    remove = min(r, cells.sources)
    if remove <= 0:
        return do_nothing, do_nothing
    offsets = torch.zeros(1, cells.count, dtype=torch.int64, device=metric.device)
    if not no_rand:
        device = metric.device if generator is None else generator.device
        offsets = torch.randint(
            cells.choices, (1, cells.count), device=device, generator=generator
        ).to(metric.device)
    plan = _plan(metric, cells, remove, offsets)

    def merge(x: Tensor, mode: str = "mean") -> Tensor:
        if mode == "mean":
            return plan.merge(x)
        index = plan.slot.unsqueeze(-1).expand(-1, -1, x.shape[2])
        out = x.new_zeros(x.shape[0], plan.size.shape[1], x.shape[2])
        return out.scatter_reduce(1, index, x, reduce=mode, include_self=False)

    return merge, plan.unmerge


@torch.no_grad()
def _plan(metric: Tensor, cells: Cells, remove: int, offsets: Tensor) -> MergePlan:
    """Slots as the original orders its tokens: kept sources by falling similarity, then the dst."""
    src, dst, score, match = reference.best_pairs(metric, cells, offsets)
    place = score.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    kept = cells.sources - remove
    of_src = torch.where(place < remove, kept + match, place - remove)
    return MergePlan(*reference.pair_lists(src, dst, of_src, kept), use_triton("auto", metric))
