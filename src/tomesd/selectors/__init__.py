"""Selectors decide which tokens belong together: a metric on a grid becomes a `MergePlan`."""

from collections.abc import Callable

from ..plan import MergePlan
from .bipartite import bipartite
from .grid import grid
from .kmeans import kmeans

__all__ = ["SELECTORS", "bipartite", "grid", "kmeans"]

SELECTORS: dict[str, Callable[..., MergePlan]] = {
    "bipartite": bipartite,
    "kmeans": kmeans,
    "grid": grid,
}
"""By name. Each takes the metric `[B, N, C]`, the cells and the tokens to remove."""
