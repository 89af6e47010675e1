"""Selectors decide which tokens belong together: a metric on a grid becomes a `MergePlan`."""

from .bipartite import bipartite

__all__ = ["bipartite"]
