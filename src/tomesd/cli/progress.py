"""Progress bars."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress_bar", "steps_bar"]


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def steps_bar(console: Console, words: str, steps: int) -> Iterator[Callable[[int], None]]:
    """A bar over the steps of one image; yields what to call with the number done."""
    with progress_bar(console) as progress:
        task = progress.add_task(shorten(words), total=steps)
        yield lambda done: progress.update(task, completed=done)


def shorten(words: str, length: int = 44) -> str:
    return words if len(words) <= length else words[: length - 1] + "…"
