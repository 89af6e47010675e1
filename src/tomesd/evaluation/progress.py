"""Who is told how far things are."""

from typing import Protocol

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    def start(self, total: int) -> None:
        """A part of the work begins: so many images, or rows."""

    def update(self, words: str, done: float) -> None:
        """What is being worked on, and how much of the part is done."""


class Silent:
    def start(self, total: int) -> None: ...

    def update(self, words: str, done: float) -> None: ...
