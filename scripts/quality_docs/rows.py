"""What update_quality.py asks of rows, and how it writes their numbers."""

import json
from collections.abc import Iterable

from tomesd.bench.rows import Row
from tomesd.evaluation.figures import pareto_front

ORIGINAL, OURS = "tomesd 0.1.3", "this library"
SPEEDS = {"speedup": "fused attention", "speedup_unfused": "unfused attention"}
_SPEED_FIELDS = ("speedup", "step_ms_", "mib_")


_UNSTEADY = 1.5  # Of repeats that differ by more, something disturbed one.


def last_of_each(rows: Iterable[Row]) -> list[Row]:
    """Of a row that was made several times, the last."""
    names = ("section", "setting", "variant", "label", "settings")
    last = {}
    for row in rows:
        key = [gave_up_evenly(row), *(row.get(name) for name in names)]
        last[json.dumps(key, sort_keys=True)] = row
    return list(last.values())


def gave_up_evenly(row: Row) -> bool:
    """Whether it is of the time when every window gave up the same share of its tokens."""
    return row["variant"] == "tomesd" and row["commit"] in ("e1ddc58", "8f8ac60")


def speeds(rows: Iterable[Row]) -> dict[str, Row]:
    """By settings, the rows of speeds that were measured on their own."""
    timed = [row for row in rows if row["section"] == "quality-speed"]
    return {same_settings(row): _steady(row) for row in timed}


def _steady(row: Row) -> Row:
    """Without the times that were disturbed."""
    for name, attention in SPEEDS.items():
        low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
        if low is not None and high is not None and high > _UNSTEADY * low:
            disturbed = (name, f"{name}_low", f"{name}_high", f"step_ms_{attention.split()[0]}")
            row = {key: value for key, value in row.items() if key not in disturbed}
    return row


def with_speed(row: Row, timed: dict[str, Row]) -> Row:
    """With the speed of its settings, if its images were made by processes that shared a GPU."""
    if has(row, "speedup") or row["section"] == "quality-search":
        return row
    found = timed.get(same_settings(row), {})
    return {**{k: v for k, v in found.items() if k.startswith(_SPEED_FIELDS)}, **row}


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
