"""What commands show: the progress bar, tables, times in words."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from ..generation.progress import OnProgress

_LONGEST = 44


@contextmanager
def progress_bar(console: Console, suffix: str = "") -> "Iterator[OnProgress]":
    """A bar while the block runs; yields what to call with how far things are."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        number = progress.add_task("", total=None)
        task = progress.tasks[0]

        def update(words: str, done: float, total: int) -> None:
            if total != task.total or done < task.completed:
                progress.reset(number, total=total)  # another piece of work, with its own time
            short = words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…"
            progress.update(number, description=short + suffix, completed=done)

        yield update


def about(seconds: float) -> str:
    """A time in words, as exact as an estimate is."""
    for unit, length in (("hour", 3600), ("minute", 60)):
        if seconds >= 1.5 * length:
            number = seconds / length
            return f"about {number:.0f} {unit}s" if number >= 3 else f"about {number:.1f} {unit}s"
    return f"about {max(1, round(seconds))} s"


def number_table(
    title: str | None,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    first: Literal["left", "right"] = "left",
) -> Table:
    """Columns of numbers, after a first one that names the rows."""
    table = Table(title=title)
    table.add_column(header[0], justify=first, overflow="fold")
    for name in header[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
