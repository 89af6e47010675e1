"""What update_quality.py asks of rows, and how it writes their numbers."""

import json
from collections.abc import Iterable

from tomesd.bench.rows import Row
from tomesd.evaluation.figures import pareto_front

ORIGINAL, OURS = "tomesd 0.1.3", "this library"
SPEEDS = {"speedup": "fused attention", "speedup_unfused": "unfused attention"}


def same_settings(row: Row) -> str:
    return json.dumps([row["variant"], row["settings"]], sort_keys=True)


def value(row: Row, name: str, digits: int, scale: float = 1.0) -> str:
    """With half of its interval."""
    if row.get(name) is None:
        return "-"
    text = f"{scale * row[name]:.{digits}f}"
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return (
        text if low is None or high is None else f"{text} ± {scale * (high - low) / 2:.{digits}f}"
    )


def clearly_below(one: Row, other: Row, name: str) -> bool:
    """Lower, and the intervals do not overlap."""
    high, low = one.get(f"{name}_high"), other.get(f"{name}_low")
    return high is not None and low is not None and high < low


def has(row: Row, *names: str) -> bool:
    return all(row.get(name) is not None for name in names)


def listed(words: Iterable[str]) -> str:
    found = list(words)
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"


def name_of(row: Row) -> str:
    return {"original": ORIGINAL, "tomesd": OURS}.get(row["variant"], row["variant"])


def pareto(rows: list[Row], speed: str) -> list[Row]:
    """Those that no other is both faster and closer than, slowest first."""
    known = [row for row in rows if has(row, speed, "lpips")]
    return [known[i] for i in pareto_front([(row[speed], row["lpips"]) for row in known], "less")]
