"""The rows in benchmarks/results, and how tables write their numbers."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tomesd.bench.rows import Row, read_rows
from tomesd.bench.tables import (
    Comparison,
    comparisons,
    duration,
    markdown,
    percent,
    times,
    versions,
)
from tomesd.evaluation.figures import pareto_front

__all__ = [
    "FUSED",
    "ORIGINAL",
    "OURS",
    "SPEEDS",
    "UNFUSED",
    "Comparison",
    "Results",
    "Row",
    "Table",
    "pareto",
    "percent",
    "times",
]

ORIGINAL, OURS = "tomesd 0.1.3", "this library"
FUSED, UNFUSED = "speedup", "speedup_unfused"
SPEEDS = {FUSED: "fused attention", UNFUSED: "unfused attention"}


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    rows: Sequence[Row] = field(default=())
    """What the numbers come from."""

    def text(self, *, sources: bool) -> str:
        """In markdown, with a line on hardware, versions and commits if asked for.

        Nothing if there are no lines yet.
        """
        if not self.lines:
            return ""
        table = markdown(self.header, self.lines)
        rows = [*self.rows, *(row["timed"] for row in self.rows if "timed" in row)]
        return f"{table}\n\n{versions(rows)}." if sources and rows else table


class Results:
    """The rows of a folder. Of what was measured several times, the last counts."""

    def __init__(self, folder: Path):
        self._folder = folder

    def file(self, name: str) -> list[Row]:
        return read_rows(self._folder / f"{name}.jsonl")

    def runs(self, section: str) -> dict[tuple[str, str], list[Comparison]]:
        """By setting and mode, all measurements of a section of the benchmarks, the last first."""
        rows = [row for name in ("dit", "gpu", "compiled", "cpu") for row in self.file(name)]
        found: dict[tuple[str, str], list[Comparison]] = {}
        for one in comparisons(row for row in rows if row["section"] == section):
            found.setdefault((one.first["setting"], one.first["mode"]), []).append(one)
        for measured in found.values():
            measured.sort(key=lambda one: one.first["date"], reverse=True)
        return found

    def settings(self, section: str) -> list[Comparison]:
        """The last measurement of each setting."""
        return [runs[0] for runs in self.runs(section).values()]

    def quality(self, section: str) -> list[Row]:
        """What was found out about images, in the order of the table, with speeds."""
        last = {}
        for row in self.file("quality"):
            names = ("section", "setting", "variant", "label", "settings")
            key = [gave_up_evenly(row), *(row[name] for name in names)]
            last[json.dumps(key, sort_keys=True)] = row
        rows = last.values()
        timed = {same_settings(row): row for row in rows if row["section"] == "quality-speed"}
        found = [row for row in rows if row["section"] == f"quality-{section}"]
        return sorted((with_speed(row, timed) for row in found), key=lambda row: row["place"])


def gave_up_evenly(row: Row) -> bool:
    """Whether it is of the time when every window gave up the same share of its tokens."""
    return row["variant"] == "tomesd" and row["commit"] in ("e1ddc58", "8f8ac60")


def same_settings(row: Row) -> str:
    return json.dumps([row["variant"], row["settings"]], sort_keys=True)


def with_speed(row: Row, timed: dict[str, Row]) -> Row:
    """With the times of its settings, if they were measured apart from the images."""
    found = timed.get(same_settings(row))
    if has(row, FUSED) or found is None:
        return row
    kept = ("speedup", "step_ms_", "mib_")
    return {**row, **{n: v for n, v in found.items() if n.startswith(kept)}, "timed": found}


def has(row: Row, *names: str) -> bool:
    return all(row.get(name) is not None for name in names)


def estimate(row: Row, name: str, digits: int, scale: float = 1.0) -> str:
    """A value with half of its interval."""
    if not has(row, name):
        return "-"
    text = f"{scale * row[name]:.{digits}f}"
    if not has(row, f"{name}_low", f"{name}_high"):
        return text
    return f"{text} ± {scale * (row[f'{name}_high'] - row[f'{name}_low']) / 2:.{digits}f}"


def pareto(rows: Iterable[Row], speed: str) -> list[Row]:
    """Those that no other is both faster and closer to the unmerged image than, slowest first."""
    known = [row for row in rows if has(row, speed, "lpips")]
    return [known[i] for i in pareto_front([(row[speed], row["lpips"]) for row in known], "less")]


def ms(row: Row | None) -> str:
    """Milliseconds, or in a word why there are none."""
    return "-" if row is None else duration(row)


def mib(row: Row | None) -> str:
    return ms(row) if row is None or row["seconds"] is None else f"{row['peak_mib']:,.0f}"


def gained(found: Comparison, row: Row | None, *, spread: bool = False) -> str:
    """Milliseconds, with their spread if asked for, and how many times as fast as unpatched."""
    if row is None or row["seconds"] is None:
        return ms(row)
    cell = f"{ms(row)} ± {1000 * row['spread']:.1f}" if spread else ms(row)
    if row["variant"] == "unpatched":
        return cell
    alone = ", left alone" if row.get("left_alone") else ""
    return f"{cell} ({times(found.speedup(row))}{alone})"
