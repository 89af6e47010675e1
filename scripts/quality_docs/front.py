"""Quality against speed: at which speeds this library is better than the original."""

from typing import Any

from tomesd.bench.rows import Row
from tomesd.bench.tables import markdown, times
from tomesd.presets import PRESETS, changed
from tomesd.settings import Settings

from .document import Document, filled, how_made, images_of, which_seeds
from .figures import plot_front, plot_search
from .rows import (
    ORIGINAL,
    OURS,
    SPEEDS,
    clearly_below,
    gave_up_evenly,
    has,
    listed,
    name_of,
    pareto,
    value,
)


def front(document: Document) -> None:
    title, rows = "Quality against speed", document.section("front")
    base = [row for row in rows if not row["settings"]]
    rows = [row for row in rows if row["settings"] and any(row.get(speed) for speed in SPEEDS)]
    rows.sort(key=lambda row: (row["variant"] != "original", row.get("lpips", 0.0)))
    if not rows:
        document.missing(title)
        return
    header = ["", "LPIPS", "PSNR", "FID", "FID to unmerged", "KID x 1000", "speed-up", "unfused"]
    lines = [
        [
            f"{ORIGINAL}: {original_setting(row)}"
            if row["variant"] == "original"
            else row["label"],
            value(row, "lpips", 4),
            value(row, "psnr", 2),
            value(row, "fid", 2),
            value(row, "fid_unmerged", 2),
            value(row, "kid", 2, 1000),
            *(times(row.get(name)) for name in SPEEDS),
        ]
        for row in rows
    ]
    for row in base:
        scores = [value(row, n, 2, s) for n, s in (("fid", 1), ("fid_unmerged", 1), ("kid", 1000))]
        lines.insert(0, ["unmerged", "0", "-", *scores, "1", "1"])
    how = f"{images_of(rows)}. Everything: all layers, levels 1 to 4. {which_seeds(rows)}"
    how += f" {how_made(rows)}"
    parts = [filled(how)]
    parts.append(markdown(header, lines))
    for speed, name in SPEEDS.items():
        parts += statement(rows, speed, name)
    parts += presets(rows)
    parts.append(f"![LPIPS and FID against speed-up]({plot_front(rows, document.figures)})")
    document.add(title, *parts, rows=rows)


def statement(
    rows: list[Row], speed: str, name: str, scores: tuple[str, ...] = ("lpips", "fid")
) -> list[str]:
    """Of each of the original's rows, whether a row of ours beats it in all scores."""
    theirs = [row for row in rows if row["variant"] == "original" and has(row, speed, "lpips")]
    mine = [row for row in rows if row["variant"] == "tomesd" and has(row, speed, "lpips")]
    if not theirs or not mine:
        return []
    slower = [row for row in theirs if row[speed] <= 1]
    judged = [(row, judge(row, mine, speed, scores)) for row in theirs if row[speed] > 1]
    beaten = sum(words.startswith("beaten") for _, words in judged)
    if not judged:
        settings = f"in {len(slower)} setting{'s' if len(slower) > 1 else ''}"
        every = (
            f"it never makes the model faster, {settings}: the unmerged one is as fast, and better."
        )
    else:
        reached = (
            "every speed-up" if beaten == len(judged) else f"{beaten} of {len(judged)} speed-ups"
        )
        every = f"""at {reached} that it reaches, a setting of {OURS} is at least as fast with lower
{listed(map(str.upper, scores))}, and no intervals overlap."""
    if judged and slower:
        every += f" It does not make the model faster at {listed(map(original_setting, slower))}."
    intro = filled(f"**With {name}**, compared with {ORIGINAL}: {every}")
    lines = [f"- {original_setting(row)}: {words}" for row, words in judged]
    return [intro, "\n".join(lines)] if lines else [intro]


def original_setting(row: Row) -> str:
    return row["label"].removeprefix("0.1.3 ")


def judge(row: Row, mine: list[Row], speed: str, scores: tuple[str, ...]) -> str:
    """What ours do where the original has `row`."""
    where = f"{times(row[speed])}, LPIPS {value(row, 'lpips', 4)}"
    fast = [r for r in mine if r[speed] >= row[speed]]
    closer = [r for r in mine if r["lpips"] <= row["lpips"]]
    both = [r for r in fast if all(clearly_below(r, row, name) for name in scores)]
    fastest = max(closer, key=lambda r: r[speed], default=None)
    gain = "none of ours has its LPIPS"
    if fastest is not None:
        gain = f"at no more than its LPIPS, ours reach {times(fastest[speed])} ({fastest['label']})"
    if both:
        best = min(both, key=lambda r: r["lpips"])
        return f"beaten ({where}) by {best['label']}, LPIPS {value(best, 'lpips', 4)}; {gain}"
    if not fast:
        return f"not reached ({where}): none of ours is as fast; {gain}"
    best = min(fast, key=lambda r: r["lpips"])
    found = [
        f"{n.upper()} {'lower' if clearly_below(best, row, n) else 'not clearly lower'}"
        for n in scores
    ]
    return f"not clearly beaten ({where}): {best['label']} has {listed(found)}; {gain}"


EVENLY = """ They are of the time when every window gave up the same share of its tokens, which has
been dropped since."""


def searched(document: Document) -> None:
    title, rows = "The search", document.section("search")
    rows = [row for row in rows if row["settings"] and has(row, "lpips", "speedup")]
    if not rows:
        document.missing(title)
        return
    parts = [
        filled(f"""
{images_of(rows)}, {len(rows)} settings, of which the tables show those that no other is both faster
and closer than.{EVENLY if any(map(gave_up_evenly, rows)) else ""}""")
    ]
    for speed, name in SPEEDS.items():
        lines = []
        for row in pareto(rows, speed):
            scores = [value(row, "lpips", 4), value(row, "psnr", 2)]
            lines.append([name_of(row), row["label"], times(row[speed]), *scores])
        parts.append(markdown([name, "settings", "speed-up", "LPIPS", "PSNR"], lines))
        parts += statement(rows, speed, name, scores=("lpips",))
    parts += defaults(rows)
    parts.append(f"![LPIPS against speed-up]({plot_search(rows, document.figures)})")
    document.add(title, *parts, rows=rows)


def defaults(rows: list[Row]) -> list[str]:
    """Half of the tokens at default settings, and the smallest changes that do better."""
    options: list[dict[str, Any]] = [
        {},
        {"proportional": True},
        {"target": "kv"},
        {"target": "kv", "proportional": True},
    ]
    lines = []
    for option in options:
        row = with_options(rows, {"ratio": 0.5, **option})
        if row is None:
            return []
        name = ", ".join(f"`{key}={value!r}`" for key, value in option.items())
        speeds = [times(row.get(speed)) for speed in SPEEDS]
        lines.append([name or "default", *speeds, value(row, "lpips", 4), value(row, "psnr", 2)])
    words = f"""
**The defaults** stay what they are in {ORIGINAL}, so that what was written for it merges the same
layers in the same way. Others keep images closer, and the presets are made of them:"""
    header = ["`ratio=0.5`", *(f"speed-up, {name}" for name in SPEEDS.values()), "LPIPS", "PSNR"]
    return [filled(words), markdown(header, lines)]


def presets(rows: list[Row]) -> list[str]:
    """The presets, from the rows that have their settings."""
    lines = []
    for name, options in PRESETS.items():
        row = with_options(rows, options)
        if row is not None:
            speed = [times(row.get(speed)) for speed in SPEEDS]
            settings = ", ".join(f"`{key}={value!r}`" for key, value in options.items())
            scores = [value(row, "lpips", 4), value(row, "fid", 2)]
            lines.append([f"`{name}`", settings, *speed, *scores])
    if not lines:
        return []
    words = """
The presets of `apply_patch(model, preset=...)`, which the search below led to. A model of this size
at 256 px leaves little to gain with fused attention; docs/performance.md has larger ones."""
    speeds = [f"speed-up, {name}" for name in SPEEDS.values()]
    header = ["preset", "settings", *speeds, "LPIPS", "FID"]
    return [filled(words), markdown(header, lines)]


def with_options(rows: list[Row], options: dict[str, Any]) -> Row | None:
    """The row of this library with such settings."""
    wanted = changed(Settings(**options))
    same = (row for row in rows if row["variant"] == "tomesd" and changed_in(row) == wanted)
    return next(same, None)


def changed_in(row: Row) -> dict[str, Any]:
    """The options of a row that are not the defaults."""
    options = {key: value for key, value in row["settings"].items() if key != "when"}
    if isinstance(options.get("level_ratios"), dict):
        options["level_ratios"] = {int(k): r for k, r in options["level_ratios"].items()}
    return changed(Settings(**options))
