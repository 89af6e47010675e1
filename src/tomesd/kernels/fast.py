"""The Triton versions of what `reference.py` defines. Importing it takes a while."""

from .triton_matching import match_tokens
from .triton_merging import slot_gather, slot_mean, slot_restore

__all__ = ["match_tokens", "slot_gather", "slot_mean", "slot_restore"]
