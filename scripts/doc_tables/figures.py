"""The figures of docs/performance.md and docs/quality.md."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tomesd.bench.plots import COLOURS, figure, save_figure
from tomesd.presets import PRESETS

from .performance import EVERY_BLOCK, KEPT, MATCHING
from .quality import FAMILIES, front_rows, name_of, paper_rows, search_rows, tradeoff_rows
from .rows import ORIGINAL, OURS, SPEEDS, Results, Row, has, pareto


def recovered(results: Results, section: str, path: Path) -> None:
    """Bars: which share of the gain that is possible each variant makes."""
    found = results.settings(section)
    picture, axes = figure(0.6 + 0.62 * len(found))
    bars = ((KEPT, "tomesd", 1.0), (EVERY_BLOCK, "tomesd", 0.55), ("original", "original", 1.0))
    for place, one in enumerate(found):
        bound, base = one.seconds("free"), one.seconds("unpatched")
        if bound and base and bound >= base:
            words = "nothing to recover: the bound is slower"
            axes.text(0.02, place, words, fontsize=8, va="center")
        for offset, (label, kind, alpha) in enumerate(bars):
            row = one.find(label)
            share = None if row is None else one.recovered(row)
            if share is not None:
                axes.barh(
                    place + 0.26 * (offset - 1),
                    max(share, -0.5),  # far below, all there is to see is that it is slower
                    0.24,
                    color=COLOURS[kind],
                    alpha=alpha,
                    label=ORIGINAL if label == "original" else label,
                )
    axes.axvline(1.0, color=COLOURS["free"], linewidth=1.2)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(found)), [one.first["setting"] for one in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("recovered share (0: as unpatched, 1: the bound; cut at -0.5)")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), frameon=False, fontsize=8)
    save_figure(picture, path)


def graph(results: Results, path: Path) -> None:
    recovered(results, "graph", path)


def eager(results: Results, path: Path) -> None:
    recovered(results, "eager", path)


def matching(results: Results, path: Path) -> None:
    """Time and memory of matching against the number of tokens."""
    found = [one for one in results.settings("matching") if one.first["mode"] == "graph"]
    picture, axes = panels(1, 2, 3.4)
    colours = (COLOURS["tomesd"], "#2a6f97", "#66b2bd", COLOURS["original"])
    for one, (name, scale, unit) in zip(
        axes[0], (("seconds", 1000, "ms"), ("peak_mib", 1, "MiB")), strict=True
    ):
        for (label, title), colour in zip(MATCHING.items(), colours, strict=True):
            rows = [row for c in found if (row := c.find(label)) and row["seconds"]]
            points = [(row["tokens"], row[name] * scale) for row in rows if row[name]]
            one.loglog(*zip(*points, strict=True), "o-", ms=4, color=colour, label=title)
        one.set_xlabel("tokens")
        one.set_ylabel(unit)
        one.legend(frameon=False, fontsize=8)
    save_figure(picture, path)


def panels(rows: int, columns: int, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8.0, height), layout="constrained")
    axes = picture.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
    return picture, axes


def draw(axes: Any, rows: list[Row], x: Callable[[Row], float], y: str, **style: Any) -> None:
    """Points with error bars."""
    rows = sorted((row for row in rows if has(row, y)), key=x)
    values = [row[y] for row in rows]
    errors = [[abs(row[y] - row[f"{y}_{end}"]) for row in rows] for end in ("low", "high")]
    axes.errorbar([x(row) for row in rows], values, yerr=errors, ms=4, capsize=2, lw=1, **style)


def paper(results: Results, path: Path) -> None:
    """FID and LPIPS against the ratio."""
    base, *rows = paper_rows(results)
    picture, axes = panels(1, 2, 3.2)
    for one, score in zip(axes[0], ("fid", "lpips"), strict=True):
        for kind, name in (("original", ORIGINAL), ("tomesd", OURS)):
            chosen = [row for row in rows if row["variant"] == kind]
            style = {"color": COLOURS[kind], "label": name, "fmt": "o-"}
            draw(one, chosen, lambda row: 100 * row["settings"]["ratio"], score, **style)
        if has(base, score):
            one.axhline(base[score], color=COLOURS["unpatched"], lw=1, label="unmerged")
        one.set_xlabel("r %")
        one.set_ylabel(score.upper())
    save_with_legend(picture, path)


def front(results: Results, path: Path) -> None:
    """LPIPS and FID against the speed-up; the presets have marks of their own."""
    marks = {ORIGINAL: "o", OURS: "o"}
    marks |= {f"preset {name}": mark for name, mark in zip(PRESETS, "^sD", strict=True)}
    rows = [row for row in front_rows(results) if row["settings"]]
    picture, axes = panels(2, 2, 6.0)
    for line, score in zip(axes, ("lpips", "fid"), strict=True):
        for one, (speed, words) in zip(line, SPEEDS.items(), strict=True):
            for name, mark in marks.items():
                groups = (
                    (row, row["label"] if row["label"] in marks else name_of(row)) for row in rows
                )
                chosen = [row for row, group in groups if group == name and has(row, speed)]
                colour = COLOURS["original" if name == ORIGINAL else "tomesd"]
                style = {"color": colour, "label": name, "fmt": mark}
                draw(one, chosen, lambda row, speed=speed: row[speed], score, **style)
            label_speed(one, words, score.upper())
    save_with_legend(picture, path)


def search(results: Results, path: Path) -> None:
    """LPIPS against the speed-up of all settings that were searched, and their front."""
    rows = search_rows(results)
    groups = {"": (ORIGINAL, COLOURS["original"]), "attn": ("attn", "#00798c")}
    groups |= {"kv": ("kv", "#c7b446"), "block": ("block", "#6a4c93")}
    picture, axes = panels(1, 2, 3.6)
    for one, (speed, words) in zip(axes[0], SPEEDS.items(), strict=True):
        for group, (name, colour) in groups.items():
            chosen = [row for row in rows if row["setting"] == group and has(row, speed)]
            points = [row[speed] for row in chosen], [row["lpips"] for row in chosen]
            one.scatter(*points, s=14, color=colour, label=name)
        best = pareto(rows, speed)
        one.step([r[speed] for r in best], [r["lpips"] for r in best], "k-", lw=0.8, where="pre")
        label_speed(one, words, "LPIPS")
    save_with_legend(picture, path)


def tradeoffs(results: Results, path: Path) -> None:
    """What KID rises by, and LPIPS, against the speed-up on the transformer, a line for a family.

    Two settings at once make points instead of a line.
    """
    found = (tradeoff_rows(results, "transformer", pixels) for pixels in (512, 256))
    rows = next((rows for rows in found if rows), [])
    marks = dict(zip(FAMILIES, "_ovXs^D*hPdp", strict=True))
    scores = [
        ("kid_change", "KID x 1000, more than unmerged", 1000),
        ("lpips", "LPIPS to unmerged", 1),
    ]
    picture, axes = panels(1, 2, 4.2)
    for one, (score, title, scale) in zip(axes[0], scores, strict=True):
        for number, family in enumerate(FAMILIES[1:]):
            chosen = [row for row in rows if row["setting"] == family and has(row, score)]
            x, y = [row["speedup"] for row in chosen], [scale * row[score] for row in chosen]
            line = "" if "," in family else "-"
            style = {"ls": line, "marker": marks[family], "ms": 4, "lw": 1, "color": f"C{number}"}
            if chosen:
                one.plot(x, y, label=family, **style)
        one.axhline(0, color=COLOURS["unpatched"], lw=0.8)
        label_speed(one, "eager", title)
    save_with_legend(picture, path)


def label_speed(axes: Any, attention: str, score: str) -> None:
    axes.axvline(1.0, color=COLOURS["unpatched"], lw=0.8)
    axes.set_xlabel(f"speed-up, {attention}")
    axes.set_ylabel(score)


def save_with_legend(picture: Any, path: Path) -> None:
    """The legend is in the first of the panels that have the most in it."""
    fullest = max(picture.axes, key=lambda axes: len(axes.get_legend_handles_labels()[0]))
    if fullest.get_legend_handles_labels()[0]:
        fullest.legend(frameon=False, fontsize=8)
    save_figure(picture, path)
