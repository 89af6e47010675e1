"""The tables of docs/quality.md, and those of README.md and docs/options.md on the same."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import docstring_parser

from tomesd import Settings
from tomesd.bench.tables import percent, times

from .rows import ORIGINAL, SPEEDS, TITLES, Columns, Results, Row, Table, has, latest, pareto

SPEEDUP = "speed-up, fused"
SCORES: dict[str, tuple[str, int, float]] = {
    "FID": ("fid", 2, 1),
    "FID to unmerged": ("fid_unmerged", 2, 1),
    "KID x 1000": ("kid", 2, 1000),
    "more than unmerged": ("kid_change", 2, 1000),
    "KID to unmerged": ("kid_unmerged", 2, 1000),
    "PSNR": ("psnr", 2, 1),
    "SSIM": ("ssim", 3, 1),
    "LPIPS": ("lpips", 4, 1),
    SPEEDUP: ("speedup", 2, 1),
}
"""Field, digits and scale, by the title of a column."""

# FID at r = 0.5 on Stable Diffusion, from the tables of the paper (Bolya & Hoffman 2023).
FID_OF_PAPER = {
    "random in 2x2": "35.66",
    "strided 2x2": "36.12",
    "self-attention": "33.73",
    "everything": "35.66",
    "level 1": "33.29",
    "levels 1-4": "35.66",
    "60 to 40 %": "35.53",
    "flat 50 %": "35.66",
}
FAMILIES = (
    *("unmerged", "fewer steps", "merging", "presets", "reuse", "merging, reuse"),
    *("coarse", "coarse, reuse", "coarse, fewer steps"),
    *("first block cache", "MagCache", "TaylorSeer", "DeepCache"),
)
"""Of trade-offs, in the order of the table."""


def estimate(row: Row, title: str, digits: int | None = None) -> str:
    """A value with half of its interval."""
    name, usual, scale = SCORES[title]
    digits = usual if digits is None else digits
    if not has(row, name):
        return "-"
    text = f"{scale * row[name]:.{digits}f}"
    if not has(row, f"{name}_low", f"{name}_high"):
        return text
    return f"{text} ± {scale * (row[f'{name}_high'] - row[f'{name}_low']) / 2:.{digits}f}"


def scores(*titles: str, **digits: int) -> Columns:
    """Estimates, with other numbers of digits than usual for some titles."""
    return {title: partial(estimate, title=title, digits=digits.get(title)) for title in titles}


ALL = scores("FID", "FID to unmerged", "KID x 1000", "PSNR", "SSIM", "LPIPS")
CLOSENESS = scores("LPIPS", "PSNR")


def speeds(*titles: str) -> Columns:
    """Against unmerged images, with fused and with unfused attention."""
    titles = titles or tuple(f"speed-up, {name}" for name in SPEEDS.values())
    return {
        title: lambda row, speed=speed: times(row.get(speed)) if row["settings"] else "1"
        for title, speed in zip(titles, SPEEDS, strict=True)
    }


def named(title: str, labels: Mapping[str, str], rows: list[Row], *parts: Columns) -> Table:
    """A table of the rows with these labels, by names of their own in a first column."""
    found = {row["label"]: row for row in rows}
    lines = [{**found[label], "name": name} for name, label in labels.items()]
    return Table.of(lines, {title: "{name}"}, *parts)


def paper_rows(results: Results) -> list[Row]:
    """The unmerged model, then both libraries, with the ratio in percent."""
    rows = results.quality("paper")
    for row in rows:
        row["percent"] = 100 * row["settings"].get("ratio", 0)
    return sorted(rows, key=lambda row: row["percent"])


def paper(results: Results) -> Table:
    """Both libraries at the ratios of the paper."""
    base, *merged = rows = paper_rows(results)
    base |= {"time": "", "memory": ""}
    for row in merged:
        row["time"] = f" ({percent(1 / row['speedup_unfused'])})"
        row["memory"] = f" ({percent(row['mib_unfused'] / base['mib_unfused'])})"
    return Table.of(
        rows,
        {"r %": "{percent:.0f}", "": lambda row: TITLES.get(row["variant"], row["variant"])},
        ALL,
        {"time, unfused": "{step_ms_unfused:.2f} ms{time}"},
        {"memory, unfused": "{mib_unfused:.1f} MiB{memory}"},
        {SPEEDUP: lambda row: estimate(row, SPEEDUP) if row["settings"] else "1"},
    )


def unet_on_a_cpu(results: Results, family: str) -> list[Row]:
    rows = (row for row in results.file("front_cpu") if "unet" in row["model"])
    last = latest((row for row in rows if row["setting"] == family), "label")
    return sorted(last, key=lambda row: row["label"])


def front_rows(results: Results) -> list[Row]:
    """The unmerged model, then the original's settings, then ours, the closest first."""
    rows = [row for row in results.quality("front") if not row["settings"] or has(row, "speedup")]
    kinds = ("unmerged", "original", "tomesd")
    return sorted(rows, key=lambda row: (kinds.index(row["variant"]), row.get("lpips", 0)))


def front(results: Results) -> Table:
    return Table.of(
        front_rows(results),
        {"": lambda row: row["label"].replace("0.1.3 ", f"{ORIGINAL}: ")},
        scores("LPIPS", "PSNR", "FID", "FID to unmerged", "KID x 1000"),
        speeds("speed-up", "unfused"),
    )


def search_rows(results: Results) -> list[Row]:
    return [row for row in results.quality("search") if row["settings"]]


def search(results: Results) -> Table:
    """What no other setting is both faster and closer than, with one attention or the other."""
    found = search_rows(results)
    best = {speed: pareto(found, speed) for speed in SPEEDS}

    def marked(row: Row, speed: str) -> str:
        return f"**{times(row[speed])}**" if row in best[speed] else times(row[speed])

    rows = [row for row in found if any(row in rows for rows in best.values())]
    columns = {f"speed-up, {name}": partial(marked, speed=key) for key, name in SPEEDS.items()}
    rows.sort(key=lambda row: row["lpips"])
    return Table.of(rows, {"settings": "{label}"}, CLOSENESS, columns)


def ablation(group: str) -> Callable[[Results], Table]:
    return lambda results: Table.of(
        [row for row in results.quality("ablations") if row["setting"] == group],
        {group: "{label}", "paper: FID": lambda row: FID_OF_PAPER.get(row["label"], "-")},
        scores("FID", "FID to unmerged", "LPIPS", "PSNR"),
    )


def other_algorithms(results: Results) -> Table:
    """K-means, similarity to the mean token, a noise threshold."""
    rows = [row for row in results.quality("seed") if row["settings"]]
    return Table.of(rows, {"": "{label}"}, scores("LPIPS", "PSNR", "FID"), speeds())


def tradeoff_rows(
    results: Results, model: str, pixels: int, file: str = "front", steps: int | None = None
) -> list[Row]:
    """Each way to make images, by family and speed: its row with most images.

    Speeds compare on one machine only, and images with the same number of steps: of several, what
    has most images counts.
    """
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in sorted(results.file(file), key=lambda row: row["images"]):
        known = (row["model"], row["height"], steps and row["all_steps"])
        if known == (f"embedded {model}", pixels, steps):
            found.setdefault((row["hardware"], row["all_steps"]), {})[row["label"]] = row
    groups = [list(group.values()) for group in found.values()]
    rows = max(groups, key=lambda rows: sum(row["images"] for row in rows), default=[])
    return sorted(rows, key=lambda row: (FAMILIES.index(row["setting"]), row["speedup"]))


def tradeoffs(model: str, pixels: int, **more: Any) -> Callable[[Results], Table]:
    """Quality against speed of an embedded model."""
    titles = ("KID x 1000", "more than unmerged", "KID to unmerged", "LPIPS", "PSNR")

    def table(results: Results) -> Table:
        rows = tradeoff_rows(results, model, pixels, **more)
        measured = [title for title in titles if any(has(row, SCORES[title][0]) for row in rows)]
        if all(has(row, "fid") for row in rows):  # it depends on the number of images
            measured.insert(0, "FID")
        work = {"work": "{work:.2f}"} if any(has(row, "work") for row in rows) else {}
        first = {"": "{label}", "images": "{images}"}
        on_cpu = any("CPU" in row["hardware"] for row in rows)  # where others were at work too
        speed = {} if on_cpu else {"speed-up": "{speedup:.2f}x"}
        return Table.of(rows, first, work, speed, scores(*measured, PSNR=1, FID=1))

    return table


def options(_: Results) -> Table:
    """The fields of `Settings`; what they mean is in the docstring below each."""
    defaults = dataclasses.asdict(Settings())
    lines = [
        [f"`{one.arg_name}`", f"`{defaults[one.arg_name]}`", " ".join(one.description.split())]
        for one in docstring_parser.parse_from_object(Settings).params
    ]
    return Table(["option", "default", "meaning"], lines)


IN_SHORT = {
    "unmerged": "unmerged",
    '`preset="quality"`': "reuse 2 from 0.25",
    '`preset="balanced"`': "reuse 2 to 8 from 0.2, all blocks",
    '`preset="fast"`': "coarse to 0.35, reuse 6 from 0.35, all blocks",
    "half of the steps": "0.5 of the steps",
    "a quarter of the steps": "0.25 of the steps",
    "MagCache, cautious": "MagCache 0.12, 5",
    "MagCache, fast": "MagCache 0.3, 6, 0.1",
    "`ratio=0.5`": "merged to .5",
}
"""The presets of transformers, beside fewer steps, the best cache of diffusers, and merging."""
WINDOWS = {
    "the whole image": "attn 0.3, window 0",
    ORIGINAL: "0.1.3 0.3",
    "windows of 8x8": "attn 0.3",
    "windows of 8x8, the same share of each": "this library 0.3",
}
"""Where tokens look for their like."""
WINDOWS_AT_THE_CAP = {"the whole image": "merged .75, window 0"} | {
    f"windows of {side}x{side}": f"merged .75, window {side}" for side in (32, 16, 8)
}
DEFAULTS = {
    "default": "attn 0.5",
    "`proportional=True`": "attn 0.5, proportional",
    "`target='kv'`": "kv 0.5",
    "`target='kv'`, `proportional=True`": "kv 0.5, proportional",
}
"""Half of the tokens at default settings, and the smallest changes that do better."""

TABLES: dict[str, Callable[[Results], Table]] = {
    "options": options,
    "quality": lambda results: named(
        "",
        IN_SHORT,
        tradeoff_rows(results, "transformer", 512),
        {"speed-up": "{speedup:.2f}x"},
        scores("KID x 1000", "more than unmerged", "LPIPS", "PSNR", PSNR=1),
    ),
    "the paper's ratios": paper,
    "windows": lambda results: named("r = 0.3", WINDOWS, results.quality("front", "even"), ALL),
    "windows at the cap": lambda results: named(
        "r = 0.75", WINDOWS_AT_THE_CAP, unet_on_a_cpu(results, "merging"), CLOSENESS
    ),
    # Left out evenly, and ever more of them.
    "late steps of the UNet": lambda results: Table.of(
        unet_on_a_cpu(results, "reuse"), {"": "{label}"}, CLOSENESS
    ),
    "attention used again": lambda results: Table.of(
        sorted(results.file("front_attention_cpu")[1:], key=lambda row: row["label"]),
        {"": "{label}"},
        CLOSENESS,
    ),
    "quality against speed": front,
    "search": search,
    "trade-offs": tradeoffs("transformer", 512),
    "trade-offs at 256 px": tradeoffs("transformer", 256),
    "trade-offs of the UNet": tradeoffs("unet", 256),
    "fewer and fewer steps": tradeoffs("transformer", 256, file="front_cpu", steps=28),
    "trade-offs on other weights": tradeoffs(
        "transformer", 512, file="front_other_weights", steps=28
    ),
    "eight steps": tradeoffs("transformer", 256, file="front_cpu", steps=8),
    "defaults": lambda results: named(
        "`ratio=0.5`", DEFAULTS, results.quality("search"), speeds(), CLOSENESS
    ),
    **{name: ablation(name) for name in ("partition", "layers", "levels", "schedule")},
    "other algorithms": other_algorithms,
}
