"""Tables from rows: speed-ups and recovered shares, in markdown and on screen."""

from collections.abc import Iterable, Sequence
from typing import Any

from .contenders import FREE, ORIGINAL, UNPATCHED
from .rows import OUT_OF_MEMORY, SETTING, Row


def recovered(base: float, ours: float, free: float) -> float | None:
    """Which share of what merging could at best save is saved; None where it can save nothing."""
    if free >= base:
        return None
    return (base - ours) / (base - free)


class Comparison:
    """The rows of one setting."""

    def __init__(self, rows: Sequence[Row]):
        # Measured twice in a run that was continued, the later row counts.
        self.rows = {(row["label"], _ratio(row)): row for row in rows}
        self.first = rows[0]

    def __iter__(self) -> Any:
        return iter(self.rows.values())

    def find(self, label: str) -> Row | None:
        """The row of a contender, by label or kind."""
        rows = self.rows.values()
        by_label = next((row for row in rows if row["label"] == label), None)
        return by_label or next((row for row in rows if row["variant"] == label), None)

    def seconds(self, label: str) -> float | None:
        row = self.find(label)
        return None if row is None else row["seconds"]

    def speedup(self, row: Row) -> float | None:
        """How many times as fast as the unpatched model: as it was beside this row, if known."""
        base = row.get("unpatched_seconds") or self.seconds(UNPATCHED)
        if base is None or row["seconds"] is None:
            return None
        return float(base / row["seconds"])

    def recovered(self, row: Row) -> float | None:
        # The bound of the same ratio, where there are several.
        free = next((r for r in self if r["variant"] == FREE and _ratio(r) == _ratio(row)), None)
        ours, best = self.speedup(row), None if free is None else self.speedup(free)
        if ours is None or best is None:
            return None
        return recovered(1, 1 / ours, 1 / best)


def _ratio(row: Row) -> float | None:
    return None if row["settings"] is None else row["settings"]["ratio"]


def comparisons(rows: Iterable[Row]) -> list[Comparison]:
    """Rows grouped by run and setting, in the order of their first row."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in ("run", *SETTING)), []).append(row)
    return [Comparison(group) for group in groups.values()]


HEADER = (
    *("model", "what", "size", "images", "attention", "mode", "variant", "ratio", "ms", "± IQR"),
    *("speed-up", "recovered", "peak MiB"),
)


def result_table(rows: Iterable[Row]) -> list[list[str]]:
    """One line of cells per row, under `HEADER`."""
    return [_cells(comparison, row) for comparison in comparisons(rows) for row in comparison]


def _cells(comparison: Comparison, row: Row) -> list[str]:
    failed = row["seconds"] is None
    ratio = _ratio(row)
    return [
        row["model"],
        f"{row['steps']} steps" if row["what"] == "pipeline" else row["what"],
        f"{row['width']}x{row['height']}",
        str(row["images"]),
        row["attention"],
        row["mode"],
        ", ".join([row["label"], *besides_merging(row)]),
        "-" if ratio is None else f"{ratio:g}",
        duration(row),
        "-" if failed else milliseconds(row["spread"]),
        times(comparison.speedup(row)),
        "-" if row["variant"] in (UNPATCHED, FREE) else percent(comparison.recovered(row)),
        "-" if failed or row["peak_mib"] is None else f"{row['peak_mib']:,.0f}",
    ]


def besides_merging(row: Row) -> list[str]:
    """What the contender does besides merging, in words."""
    settings = {} if row["variant"] == ORIGINAL else row["settings"] or {}
    return [f"{name} {settings[name]:g}" for name in ("coarse", "reuse") if settings.get(name)]


def duration(row: Row) -> str:
    """Milliseconds, or in a word why there are none."""
    if row["seconds"] is None:
        return OUT_OF_MEMORY if row["error"] == OUT_OF_MEMORY else "failed"
    return milliseconds(row["seconds"])


def failures(rows: Iterable[Row]) -> list[str]:
    """What went wrong, other than memory running out; one line each."""
    lines = []
    for row in rows:
        if row["error"] not in (None, OUT_OF_MEMORY):
            where = row["setting"] or f"{row['model']} {row['width']}x{row['height']}"
            lines.append(f"{where}, {row['mode']}, {row['label']}: {row['error']}")
    return lines


def split_common(
    header: Sequence[str], lines: Sequence[Sequence[str]], always: Sequence[str]
) -> tuple[dict[str, str], list[str], list[list[str]]]:
    """Takes out the columns that say the same in every line, except for those in `always`.

    Returns:
        What they say, and the header and the lines without them.
    """
    columns = dict(zip(header, zip(*lines, strict=True), strict=True))
    common = {
        name: cells[0]
        for name, cells in columns.items()
        if name not in always and len(set(cells)) == 1
    }
    kept = [name for name in header if name not in common]
    return common, kept, [list(line) for line in zip(*(columns[k] for k in kept), strict=True)]


def milliseconds(seconds: float) -> str:
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}x"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def versions(rows: Sequence[Row]) -> str:
    """One sentence on where rows come from."""
    names = ("torch", "triton", "diffusers", "tomesd")
    origins: dict[str, list[Row]] = {}
    for row in rows:
        words = [f"{name} {row[name]}" for name in names if row.get(name)]
        dtype = f": {row['dtype']}" if "dtype" in row else ""
        where = ", ".join([f"{row['hardware']}{dtype}", *words])
        origins.setdefault(where, []).append(row)
    sentences = []
    for where, found in origins.items():
        commits = list(dict.fromkeys(row["commit"] for row in found if row.get("commit")))
        words = [f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"] if commits else []
        dates = sorted({row["date"][:10] for row in found})
        sentences.append(", ".join([where, *words, *dates]))
    return "; ".join(sentences)
