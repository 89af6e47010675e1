"""The selector of the paper: bipartite soft matching on a grid of cells."""

from typing import Any

from torch import Tensor

from .. import kernels
from ..kernels import Cells
from ..plan import MergePlan

__all__ = ["bipartite"]


def bipartite(
    metric: Tensor, cells: Cells, remove: int, *, backend: str = "auto", **where: Any
) -> MergePlan:
    """A plan that removes `remove` tokens.

    Args:
        metric: what similarity is measured on, `[B, N, C]`.
        backend: "auto", "triton" or "reference".
        where: the destinations; see `kernels.match_tokens`.
    """
    triton = kernels.use_triton(backend, metric)
    n = cells.tokens
    plan = MergePlan.empty(metric.shape[0], n, n - remove, metric.device, triton)
    out = (plan.slot, plan.order, plan.span)
    kernels.match_tokens(metric, cells, remove, out, triton=triton, **where)
    return plan
