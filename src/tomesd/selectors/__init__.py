"""Selectors decide which tokens belong together: a metric on a grid becomes a `MergePlan`."""

from .bipartite import Cells, bipartite
from .draw import draw_offsets

__all__ = ["Cells", "bipartite", "draw_offsets"]
