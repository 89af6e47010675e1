"""Telling how far a long piece of work is."""

from collections.abc import Callable

OnProgress = Callable[[str, float, int], None]
"""Called with what is being worked on, how much of the work is done, and how much there is."""


def silent(words: str, done: float, total: int) -> None:
    """For when nobody is watching."""
