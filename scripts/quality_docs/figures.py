"""The figures of docs/quality.md."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tomesd.bench.plots import COLOURS, save_figure
from tomesd.bench.rows import Row
from tomesd.presets import PRESETS

from .rows import ORIGINAL, OURS, SPEEDS, has, name_of, pareto


def panels(rows: int, columns: int, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8.0, height), layout="constrained")
    axes = picture.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
    return picture, axes


def drawn(axes: Any, rows: list[Row], x: Callable[[Row], float], y: str, **style: Any) -> None:
    """Points with error bars."""
    rows = sorted((row for row in rows if has(row, y)), key=x)
    if not rows:
        return
    values = [row[y] for row in rows]
    errors = [
        [abs(row[y] - end) if (end := row.get(f"{y}_{side}")) is not None else 0.0 for row in rows]
        for side in ("low", "high")
    ]
    axes.errorbar([x(row) for row in rows], values, yerr=errors, ms=4, capsize=2, lw=1, **style)


def plot_paper(rows: list[Row], figures: Path) -> str:
    picture, axes = panels(1, 2, 3.2)
    for one, name, label in zip(axes[0], ("fid", "lpips"), ("FID", "LPIPS"), strict=True):
        for kind, words in (("original", ORIGINAL), ("tomesd", OURS)):
            chosen = [row for row in rows if row["variant"] == kind]
            style = {"color": COLOURS[kind], "label": words, "fmt": "o-"}
            drawn(one, chosen, lambda row: 100 * row["settings"]["ratio"], name, **style)
        for row in rows:
            if not row["settings"] and has(row, name):
                one.axhline(row[name], color=COLOURS["unpatched"], lw=1, label="unmerged")
        one.set_xlabel("r %")
        one.set_ylabel(label)
    return saved(picture, figures, "paper.svg")


MARKERS = {
    ORIGINAL: "o",
    OURS: "o",
    **{f"preset {p}": m for p, m in zip(PRESETS, "^sD", strict=True)},
}


def group_of(row: Row) -> str:
    """The presets have names of their own."""
    return row["label"] if row["label"] in MARKERS else name_of(row)


def plot_front(rows: list[Row], figures: Path) -> str:
    picture, axes = panels(2, 2, 6.0)
    for line, (score, label) in zip(axes, (("lpips", "LPIPS"), ("fid", "FID")), strict=True):
        for one, (speed, words) in zip(line, SPEEDS.items(), strict=True):
            for name, fmt in MARKERS.items():
                chosen = [row for row in rows if has(row, speed) and group_of(row) == name]
                colour = COLOURS["original" if name == ORIGINAL else "tomesd"]
                style = {"color": colour, "label": name, "fmt": fmt}
                drawn(one, chosen, lambda row, speed=speed: row[speed], score, **style)
            one.axvline(1.0, color=COLOURS["unpatched"], lw=0.8)
            one.set_xlabel(f"speed-up, {words}")
            one.set_ylabel(label)
    return saved(picture, figures, "front.svg")


def plot_search(rows: list[Row], figures: Path) -> str:
    picture, axes = panels(1, 2, 3.6)
    colours = {"attn": "#00798c", "kv": "#c7b446", "block": "#6a4c93"}
    for one, (speed, words) in zip(axes[0], SPEEDS.items(), strict=True):
        chosen = [row for row in rows if row["variant"] == "original" and has(row, speed)]
        style = {"s": 14, "color": COLOURS["original"], "label": ORIGINAL}
        one.scatter([row[speed] for row in chosen], [row["lpips"] for row in chosen], **style)
        for target, colour in colours.items():
            mine = [row for row in rows if row["setting"] == target and has(row, speed)]
            points = ([row[speed] for row in mine], [row["lpips"] for row in mine])
            one.scatter(*points, s=14, color=colour, label=target)
        best = pareto(rows, speed)
        one.step([r[speed] for r in best], [r["lpips"] for r in best], "k-", lw=0.8, where="pre")
        one.axvline(1.0, color=COLOURS["unpatched"], lw=0.8)
        one.set_xlabel(f"speed-up, {words}")
        one.set_ylabel("LPIPS")
    return saved(picture, figures, "search.svg")


def saved(picture: Any, figures: Path, name: str) -> str:
    """With a legend in the first of the panels that have the most in it."""
    fullest = max(picture.axes, key=lambda axes: len(axes.get_legend_handles_labels()[0]))
    if fullest.get_legend_handles_labels()[0]:
        fullest.legend(frameon=False, fontsize=8)
    save_figure(picture, figures / name)
    return f"figures/quality/{name}"
