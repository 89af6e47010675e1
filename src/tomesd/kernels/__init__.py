"""The tensor operations of merging. Callers import from here and never from an implementation."""

from .reference import best_match, slot_gather, slot_mean, slot_size

__all__ = ["best_match", "slot_gather", "slot_mean", "slot_size"]
