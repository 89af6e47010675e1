"""The figures of docs/performance.md and docs/quality.md."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from tomesd.bench.plots import COLOURS, figure

from .performance import MATCHING
from .quality import FAMILIES, SCORES, front_rows, paper_rows, search_rows, tradeoff_rows
from .rows import ORIGINAL, SPEEDS, TITLES, Results, Row, has, pareto

MEASURES = (("seconds", 1000, "ms"), ("peak_mib", 1, "MiB"))
DISTANCES = {"more than unmerged": "KID x 1000, more than unmerged", "LPIPS": "LPIPS to unmerged"}
"""What a figure calls columns of the tables."""


def against_tokens(lines: dict[str, list[Row]], colours: Sequence[str]) -> Any:
    """Time and memory of the rows of each line."""
    picture, axes = figure(3.4, 1, 2)
    for one, (name, scale, unit) in zip(axes, MEASURES, strict=True):
        for (title, rows), colour in zip(lines.items(), colours, strict=False):
            points = sorted((row["tokens"], row[name] * scale) for row in rows if row.get(name))
            one.loglog(*zip(*points, strict=True), "o-", ms=4, color=colour, label=title)
        one.set(xlabel="tokens", ylabel=unit)
    return picture


def matching(results: Results) -> Any:
    """One matching of a UNet, by backend."""
    found = results.settings("matching", "graph")
    lines = {title: [one.find(label) or {} for one in found] for label, title in MATCHING.items()}
    colours = (COLOURS["tomesd"], "#2a6f97", "#66b2bd", COLOURS["original"])
    picture = against_tokens(lines, colours)
    for one in picture.axes:
        one.legend(frameon=False, fontsize=8)
    return picture


def plans(results: Results) -> Any:
    """A plan of a transformer, by the shape of the tokens."""
    lines: dict[str, list[Row]] = {}
    for row in (row for one in results.settings("transformers-matching") for row in one):
        kind = "image" if row["frames"] == 1 else f"video, {row['frames']} frames"
        lines.setdefault(f"{kind}, {row['channels']:,} channels", []).append(row)
    return with_legend(against_tokens(lines, [f"C{number}" for number in range(len(lines))]))


def draw(axes: Any, rows: list[Row], x: str, y: str, mark: str) -> None:
    """Points with error bars, of the original and of this library."""
    for kind in ("original", "tomesd"):
        chosen = [row for row in rows if row["variant"] == kind and has(row, x, y)]
        chosen.sort(key=lambda row: row[x])
        points = [row[x] for row in chosen], [row[y] for row in chosen]
        errors = [[abs(row[y] - row[f"{y}_{end}"]) for row in chosen] for end in ("low", "high")]
        style = {"color": COLOURS[kind], "label": TITLES[kind], "fmt": mark}
        axes.errorbar(*points, yerr=errors, ms=4, capsize=2, lw=1, **style)


def paper(results: Results) -> Any:
    """FID and LPIPS against the ratio."""
    base, *rows = paper_rows(results)
    picture, axes = figure(3.2, 1, 2)
    for one, score in zip(axes, ("fid", "lpips"), strict=True):
        draw(one, rows, "percent", score, "o-")
        if has(base, score):
            one.axhline(base[score], color=COLOURS["unpatched"], lw=1, label="unmerged")
        one.set(xlabel="r %", ylabel=score.upper())
    return with_legend(picture)


def front(results: Results) -> Any:
    """LPIPS and FID against the speed-up."""
    picture, axes = figure(6.0, 2, 2)
    panels = product(("lpips", "fid"), SPEEDS.items())
    for one, (score, (speed, words)) in zip(axes.flat, panels, strict=True):
        draw(one, front_rows(results), speed, score, "o")
        label_speed(one, words, score.upper())
    return with_legend(picture)


def search(results: Results) -> Any:
    """LPIPS against the speed-up of all settings that were searched, and their front."""
    rows = search_rows(results)
    groups = {"": COLOURS["original"], "attn": "#00798c", "kv": "#c7b446", "block": "#6a4c93"}
    picture, axes = figure(3.6, 1, 2)
    for one, (speed, words) in zip(axes, SPEEDS.items(), strict=True):
        for group, colour in groups.items():
            chosen = [row for row in rows if row["setting"] == group and has(row, speed)]
            points = [row[speed] for row in chosen], [row["lpips"] for row in chosen]
            one.scatter(*points, s=14, color=colour, label=group or ORIGINAL)
        best = pareto(rows, speed)
        one.step([r[speed] for r in best], [r["lpips"] for r in best], "k-", lw=0.8, where="pre")
        label_speed(one, words, "LPIPS")
    return with_legend(picture)


BROKEN = 0.02
"""More of KID than this."""


def tradeoffs(results: Results) -> Any:
    """What KID rises by, and LPIPS, against the speed-up on the transformer, a line for a family.

    Merging, and two settings at once, make points instead of a line. What breaks images is off the
    scale.
    """
    found = tradeoff_rows(results, "transformer", 512)
    rows = [row for row in found if row.get("kid_change", 0) < BROKEN]
    shown = [name for name in FAMILIES[1:] if any(row["setting"] == name for row in rows)]
    picture, axes = figure(4.2, 1, 2)
    for one, (column, title) in zip(axes, DISTANCES.items(), strict=True):
        score, _, scale = SCORES[column]
        for number, (family, mark) in enumerate(zip(shown, "ovXs^D*hPdp<", strict=False)):
            chosen = [row for row in rows if row["setting"] == family and has(row, score)]
            x, y = [row["speedup"] for row in chosen], [scale * row[score] for row in chosen]
            line = "" if "," in family or family == "merging" else "-"
            style = {"ls": line, "marker": mark, "color": f"C{number}"}
            one.plot(x, y, label=family, ms=4, lw=1, **style)
        one.axhline(0, color=COLOURS["unpatched"], lw=0.8)
        label_speed(one, "eager", title)
    return with_legend(picture)


def label_speed(axes: Any, attention: str, score: str) -> None:
    axes.axvline(1.0, color=COLOURS["unpatched"], lw=0.8)
    axes.set(xlabel=f"speed-up, {attention}", ylabel=score)


def with_legend(picture: Any) -> Any:
    """The legend is in the first of the panels that have the most in it."""
    fullest = max(picture.axes, key=lambda axes: len(axes.get_legend_handles_labels()[0]))
    if fullest.get_legend_handles_labels()[0]:
        fullest.legend(frameon=False, fontsize=8)
    return picture


FIGURES: dict[str, Callable[[Results], Any]] = {
    "performance/matching.svg": matching,
    "performance/plans.svg": plans,
    "quality/paper.svg": paper,
    "quality/front.svg": front,
    "quality/tradeoffs.svg": tradeoffs,
    "quality/search.svg": search,
}
