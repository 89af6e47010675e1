"""The tables of docs/quality.md."""

from collections.abc import Callable
from typing import Any

from tomesd.presets import PRESETS

from .rows import (
    FUSED,
    ORIGINAL,
    OURS,
    SPEEDS,
    UNFUSED,
    Results,
    Row,
    Table,
    estimate,
    gave_up_evenly,
    has,
    pareto,
    percent,
    times,
)

SCORES: dict[str, tuple[str, int, float]] = {
    "FID": ("fid", 2, 1),
    "FID to unmerged": ("fid_unmerged", 2, 1),
    "KID x 1000": ("kid", 2, 1000),
    "PSNR": ("psnr", 2, 1),
    "SSIM": ("ssim", 3, 1),
    "LPIPS": ("lpips", 4, 1),
}
"""Field, digits and scale, by the title of a column."""

# FID at r = 0.5 on Stable Diffusion, from the tables of the paper (Bolya & Hoffman 2023).
FID_OF_PAPER = {
    "random in 2x2": 35.66,
    "strided 2x2": 36.12,
    "self-attention": 33.73,
    "everything": 35.66,
    "level 1": 33.29,
    "levels 1-4": 35.66,
    "60 to 40 %": 35.53,
    "flat 50 %": 35.66,
}


def scores(row: Row, *titles: str) -> list[str]:
    return [estimate(row, *SCORES[title]) for title in titles or SCORES]


def speeds(row: Row) -> list[str]:
    return [times(row.get(speed)) if row["settings"] else "1" for speed in SPEEDS]


def name_of(row: Row) -> str:
    return {"original": ORIGINAL, "tomesd": OURS}.get(row["variant"], row["variant"])


def paper_rows(results: Results) -> list[Row]:
    rows = [row for row in results.quality("paper") if not gave_up_evenly(row)]
    return sorted(rows, key=lambda row: row["settings"].get("ratio", 0))


def paper(results: Results) -> Table:
    """Both libraries at the ratios of the paper."""
    rows = paper_rows(results)
    base = rows[0]
    lines = []
    for row in rows:
        time, memory = f"{row['step_ms_unfused']:.2f} ms", f"{row['mib_unfused']:.1f} MiB"
        speed = "1"
        if row is not base:
            time += f" ({percent(1 / row[UNFUSED])})"
            memory += f" ({percent(row['mib_unfused'] / base['mib_unfused'])})"
            speed = estimate(row, FUSED, 2)
        ratio = f"{100 * row['settings'].get('ratio', 0):.0f}"
        lines.append([ratio, name_of(row), *scores(row), time, memory, speed])
    header = ["r %", "", *SCORES, "time, unfused", "memory, unfused", "speed-up, fused"]
    return Table(header, lines, rows)


def windows(results: Results) -> Table:
    """Where tokens look for their like, at r = 0.3."""
    front = {row["label"]: row for row in results.quality("front")}
    even = [row for row in results.quality("paper") if gave_up_evenly(row)]
    rows = {
        "the whole image": front["attn 0.3, window 0"],
        ORIGINAL: front["0.1.3 0.3"],
        "windows of 8x8": front["attn 0.3"],
        "windows of 8x8, the same share of each": next(
            row for row in even if row["settings"]["ratio"] == 0.3
        ),
    }
    lines = [[name, *scores(row)] for name, row in rows.items()]
    return Table(["r = 0.3", *SCORES], lines, list(rows.values()))


def front_rows(results: Results) -> list[Row]:
    """The unmerged model, then the original's settings, then ours, the closest first."""
    rows = [row for row in results.quality("front") if not row["settings"] or has(row, FUSED)]
    kinds = ("unmerged", "original", "tomesd")
    return sorted(rows, key=lambda row: (kinds.index(row["variant"]), row.get("lpips", 0)))


def front(results: Results) -> Table:
    rows = front_rows(results)
    titles = ("LPIPS", "PSNR", "FID", "FID to unmerged", "KID x 1000")
    lines = [
        [row["label"].replace("0.1.3 ", f"{ORIGINAL}: "), *scores(row, *titles), *speeds(row)]
        for row in rows
    ]
    return Table(["", *titles, "speed-up", "unfused"], lines, rows)


def preset_quality(results: Results) -> Table:
    found = {row["label"]: row for row in results.quality("front")}
    rows = {name: found[f"preset {name}"] for name in PRESETS}
    lines = [
        [f"`{name}`", options_of(PRESETS[name]), *speeds(row), *scores(row, "LPIPS", "FID")]
        for name, row in rows.items()
    ]
    titles = [f"speed-up, {name}" for name in SPEEDS.values()]
    return Table(["preset", "settings", *titles, "LPIPS", "FID"], lines, list(rows.values()))


def search_rows(results: Results) -> list[Row]:
    return [row for row in results.quality("search") if row["settings"]]


def search(results: Results) -> Table:
    """What no other setting is both faster and closer than, with one attention or the other."""
    found = search_rows(results)
    best = {speed: pareto(found, speed) for speed in SPEEDS}
    rows = sorted(
        (row for row in found if any(row in rows for rows in best.values())),
        key=lambda row: row["lpips"],
    )
    lines = []
    for row in rows:
        cells = [times(row[speed]) for speed in SPEEDS]
        marked = [
            f"**{cell}**" if row in best[speed] else cell
            for cell, speed in zip(cells, SPEEDS, strict=True)
        ]
        lines.append([row["label"], *scores(row, "LPIPS", "PSNR"), *marked])
    titles = [f"speed-up, {name}" for name in SPEEDS.values()]
    return Table(["settings", "LPIPS", "PSNR", *titles], lines, rows)


def defaults(results: Results) -> Table:
    """Half of the tokens at default settings, and the smallest changes that do better."""
    found = {row["label"]: row for row in search_rows(results)}
    rows = {
        "default": found["attn 0.5"],
        "`proportional=True`": found["attn 0.5, proportional"],
        "`target='kv'`": found["kv 0.5"],
        "`target='kv'`, `proportional=True`": found["kv 0.5, proportional"],
    }
    lines = [[name, *speeds(row), *scores(row, "LPIPS", "PSNR")] for name, row in rows.items()]
    titles = [f"speed-up, {name}" for name in SPEEDS.values()]
    return Table(["`ratio=0.5`", *titles, "LPIPS", "PSNR"], lines, list(rows.values()))


def ablation(group: str) -> Callable[[Results], Table]:
    def table(results: Results) -> Table:
        rows = [row for row in results.quality("ablations") if row["setting"] == group]
        titles = ("FID", "FID to unmerged", "LPIPS", "PSNR")
        lines = []
        for row in rows:
            of_paper = FID_OF_PAPER.get(row["label"])
            cell = "-" if of_paper is None else f"{of_paper:.2f}"
            lines.append([row["label"], cell, *scores(row, *titles)])
        return Table([group, "paper: FID", *titles], lines, rows)

    return table


def other_algorithms(results: Results) -> Table:
    """K-means, similarity to the mean token, a noise threshold."""
    rows = [row for row in results.quality("seed") if row["settings"]]
    lines = [[row["label"], *scores(row, "LPIPS", "PSNR", "FID"), *speeds(row)] for row in rows]
    titles = [f"speed-up, {name}" for name in SPEEDS.values()]
    return Table(["", "LPIPS", "PSNR", "FID", *titles], lines, rows)


def options_of(settings: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in settings.items())


FAMILIES = (
    *("unmerged", "fewer steps", "merging", "presets", "reuse", "merging, reuse"),
    *("coarse", "coarse, reuse", "coarse, fewer steps"),
    *("first block cache", "MagCache", "TaylorSeer"),
)
"""Of trade-offs, in the order of the table."""


def tradeoff_rows(results: Results, model: str, pixels: int) -> list[Row]:
    """Each way to make images, by family and speed: its row with most images.

    Speeds compare on one machine only, and images with the same number of steps: of several, what
    has most images counts.
    """
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in sorted(results.file("front"), key=lambda row: row["images"]):
        if (row["model"], row["height"]) == (f"embedded {model}", pixels):
            found.setdefault((row["hardware"], row["all_steps"]), {})[row["label"]] = row
    groups = [list(group.values()) for group in found.values()]
    rows = max(groups, key=lambda rows: sum(row["images"] for row in rows), default=[])
    return sorted(rows, key=lambda row: (FAMILIES.index(row["setting"]), row["speedup"]))


def tradeoffs(model: str, pixels: int) -> Callable[[Results], Table]:
    """Quality against speed of an embedded model."""

    def table(results: Results) -> Table:
        rows = tradeoff_rows(results, model, pixels)
        titles = {"KID x 1000": ("kid", 2, 1000), "more than unmerged": ("kid_change", 2, 1000)}
        titles |= {"KID to unmerged": ("kid_unmerged", 2, 1000), "LPIPS": SCORES["LPIPS"]}
        titles |= {"PSNR": ("psnr", 1, 1)}
        titles = {title: s for title, s in titles.items() if any(has(row, s[0]) for row in rows)}
        worked = any(has(row, "work") for row in rows)
        lines = []
        for row in rows:
            work = [f"{row['work']:.2f}"] if worked else []
            cells = [estimate(row, *score) for score in titles.values()]
            lines.append([row["label"], str(row["images"]), *work, times(row["speedup"]), *cells])
        return Table(["", "images", *["work"] * worked, "speed-up", *titles], lines, rows)

    return table
