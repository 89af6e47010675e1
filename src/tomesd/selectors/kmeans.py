"""The selector that clusters: k-means of the tokens, by cosine."""

import torch
from torch import Tensor

from .. import kernels
from ..kernels import Cells, reference
from ..plan import MergePlan
from .grid import spread

__all__ = ["ITERATIONS", "cluster", "kmeans"]

ITERATIONS = 3
"""How often tokens are assigned to clusters. A fixed number: shapes and programs stay static."""


def kmeans(
    metric: Tensor,
    cells: Cells,
    remove: int,
    *,
    backend: str = "auto",
    timestep: Tensor | None = None,
    key: int = -1,
) -> MergePlan:
    """A plan whose slots are clusters of like tokens, the same number in each window.

    Args:
        metric: what similarity is measured on, by cosine, `[B, N, C]`.
        remove: tokens to remove, a multiple of the windows, at most `cells.sources`.
        timestep, key: draw the seeds of the clusters; see `kernels.match_tokens`.
    """
    triton = kernels.use_triton(backend, metric)
    slot, order, span = _lists(
        metric.detach(), timestep, *cells.numbers, remove, key, ITERATIONS, triton
    )
    return MergePlan(slot, order, span, triton)


# An operation of its own, which compilers take in as it is: where two clusters are nearly as
# similar to a token, other roundings of the same sums would give other plans.
@torch.library.custom_op("tomesd::kmeans", mutates_args=())
def _lists(
    metric: Tensor,
    timestep: Tensor | None,
    h: int,
    w: int,
    sy: int,
    sx: int,
    down: int,
    across: int,
    remove: int,
    key: int,
    iterations: int,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """slot, order and span of the plan."""
    cells = Cells(h, w, sy, sx, down, across)
    batch, n, channels = metric.shape
    windows, clusters = cells.windows, (n - remove) // cells.windows
    seeds, others = _seeds(metric, timestep, cells, clusters, key)
    tokens = torch.cat([seeds, others], dim=2).expand(batch, -1, -1).flatten(1)
    # Each window is an image of its own, [B * W, ...], its seeds first.
    direction = reference.slot_gather(reference._direction(metric), tokens)
    direction = direction.view(batch * windows, -1, channels)
    label = cluster(direction, clusters, iterations, triton).view(batch, windows, -1)
    label = label + torch.arange(windows, device=metric.device)[:, None] * clusters
    slot = torch.empty_like(tokens).scatter_(1, tokens, label.flatten(1))
    return slot, *reference.members(slot, n - remove, tokens)


@_lists.register_fake
def _(metric: Tensor, timestep: Tensor | None, *numbers: int) -> tuple[Tensor, Tensor, Tensor]:
    (batch, n, _), remove = metric.shape, numbers[6]
    plan = MergePlan.empty(batch, n, n - remove, metric.device, triton=False)
    return plan.slot, plan.order, plan.span


def _seeds(
    metric: Tensor, timestep: Tensor | None, cells: Cells, clusters: int, key: int
) -> tuple[Tensor, Tensor]:
    """The token each cluster begins with, and all others: `[1 or B, windows, clusters or rest]`.

    Seeds are the destinations of the bipartite selector, one in each cell, and as many of its
    sources as are needed, spread evenly.
    """
    src, dst = cells.split(reference._offsets(metric, timestep, None, cells, key))
    turn = spread(src // cells.w, src % cells.w).argsort(dim=2, stable=True)
    src = src.gather(2, turn)
    more = clusters - dst.shape[2]
    return torch.cat([dst, src[..., :more]], dim=2), src[..., more:]


def cluster(
    tokens: Tensor, clusters: int, iterations: int = ITERATIONS, triton: bool = False
) -> Tensor:
    """Spherical k-means (Dhillon and Modha, Concept decompositions, 2001).

    The seeds never leave their clusters, so none is ever empty.

    Args:
        tokens: unit vectors, or zero, `[B, N, C]`; the first `clusters` are the seeds.

    Returns:
        The cluster of each token, `[B, N]`, int64.
    """
    batch, n, channels = tokens.shape
    own = torch.arange(clusters, device=tokens.device).expand(batch, -1)
    centres, others = tokens[:, :clusters], tokens[:, clusters:]
    # A tile of scores as large as the tokens themselves: below what the layer needs anyway. Where
    # they have few channels, a megabyte, or tiles would be many.
    tile = max(1, max(n * channels, 2**18) // clusters)
    label = _assign(own, others, centres, tile)
    for _ in range(iterations - 1):
        members = reference.members(label, clusters)
        mean = kernels.slot_mean(tokens, label, *members, triton)
        label = _assign(own, others, reference._direction(mean), tile)
    return label


def _assign(own: Tensor, others: Tensor, centres: Tensor, tile: int) -> Tensor:
    """Each seed to its own cluster, every other token to the most similar centre, `[B, N]`."""
    return torch.cat([own, reference.best_match(others, centres, tile)[1]], dim=1)
