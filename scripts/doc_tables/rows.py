"""The rows in benchmarks/results, and tables of them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tomesd.bench.rows import Row, read_rows
from tomesd.bench.tables import Comparison, comparisons, markdown, versions
from tomesd.evaluation.figures import pareto_front

ORIGINAL, OURS = "tomesd 0.1.3", "this library"
TITLES = {"original": ORIGINAL, "tomesd": OURS, "free": "bound"}
"""Of variants, where a row's label does not say it."""
SPEEDS = {"speedup": "fused attention", "speedup_unfused": "unfused attention"}

Columns = Mapping[str, str | Callable[[Any], str]]
"""By title, what the cell of a line says: a function of the line's row or comparison, or a format
of the fields of its (first) row."""


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    rows: Sequence[Row] = field(default=())
    """What the numbers come from."""

    @classmethod
    def of(
        cls, found: Iterable[Any], *parts: Columns, rows: Iterable[Any] | None = None
    ) -> "Table":
        """A line for each row, or for each comparison, that was found."""
        found = list(found)
        titles, cells = zip(*(column for part in parts for column in part.items()), strict=True)
        lines = [[_cell(one, what) for what in cells] for one in found]
        return cls(titles, lines, rows_of(found if rows is None else rows))

    def text(self, *, sources: bool) -> str:
        """In markdown, with a line on hardware, versions and commits if asked for.

        Nothing if there are no lines yet.
        """
        if not self.lines:
            return ""
        table = markdown(self.header, self.lines)
        rows = [*self.rows, *(row["timed"] for row in self.rows if "timed" in row)]
        return f"{table}\n\n{versions(rows)}." if sources and rows else table


def _cell(one: Any, what: str | Callable[[Any], str]) -> str:
    if not isinstance(what, str):
        return what(one)
    row = one.first if isinstance(one, Comparison) else one
    try:
        return what.format(**row)
    except (KeyError, TypeError):  # the field is not there, or None
        return "-"


def rows_of(found: Iterable[Any]) -> list[Row]:
    return [row for one in found for row in ([one] if isinstance(one, dict) else one)]


class Results:
    """The rows of a folder. Of what was measured several times, the last counts."""

    def __init__(self, folder: Path):
        self._folder = folder

    def file(self, name: str) -> list[Row]:
        return read_rows(self._folder / f"{name}.jsonl")

    def settings(self, section: str, mode: str = "") -> list[Comparison]:
        """The last measurement of each setting in a section of the benchmarks, in each mode."""
        rows = [row for name in ("dit", "gpu", "compiled", "cpu") for row in self.file(name)]
        rows = [row for row in rows if row["section"] == section and mode in ("", row["mode"])]
        found = sorted(comparisons(rows), key=lambda one: one.first["date"])
        return list({(one.first["setting"], one.first["mode"]): one for one in found}.values())

    def quality(self, *sections: str) -> list[Row]:
        """What was found out about images, in the order of the table, with speeds.

        The section "even" has the rows of the paper's ratios from the time when every window gave
        up the same share of its tokens.
        """
        rows = self.file("quality")
        for row in rows:
            if row["variant"] == "tomesd" and row["commit"] == "8f8ac60":
                row["section"] = "quality-even"
        rows = latest(rows, "section", "setting", "variant", "label", "settings")
        timed = {_same_settings(row): row for row in rows if row["section"] == "quality-speed"}
        wanted = {f"quality-{section}" for section in sections}
        found = [_with_speed(row, timed) for row in rows if row["section"] in wanted]
        return sorted(found, key=lambda row: row["place"])


def latest(rows: Iterable[Row], *names: str) -> list[Row]:
    """Of rows that agree in these fields the last, in the order of the first."""
    return list({json.dumps([row[n] for n in names], sort_keys=True): row for row in rows}.values())


def _same_settings(row: Row) -> str:
    return json.dumps([row["variant"], row["settings"]], sort_keys=True)


def _with_speed(row: Row, timed: dict[str, Row]) -> Row:
    """With the times of its settings, if they were measured apart from the images."""
    found = timed.get(_same_settings(row))
    if has(row, "speedup") or found is None:
        return row
    kept = ("speedup", "step_ms_", "mib_")
    return {**row, **{n: v for n, v in found.items() if n.startswith(kept)}, "timed": found}


def has(row: Row, *names: str) -> bool:
    return all(row.get(name) is not None for name in names)


def pareto(rows: Iterable[Row], speed: str) -> list[Row]:
    """Those that no other is both faster and closer to the unmerged image than, slowest first."""
    known = [row for row in rows if has(row, speed, "lpips")]
    return [known[i] for i in pareto_front([(row[speed], row["lpips"]) for row in known], "less")]
