"""The figures of docs/performance.md."""

from pathlib import Path

from tomesd.bench.plots import COLOURS, figure, save_figure
from tomesd.bench.tables import Comparison

from .document import EVERY_BLOCK, KEPT, ORIGINAL


def plot_recovered(found: list[Comparison], path: Path) -> None:
    picture, axes = figure(8.0, 0.6 + 0.62 * len(found))
    bars = ((KEPT, "tomesd", 1.0), (EVERY_BLOCK, "tomesd", 0.55), ("original", "original", 1.0))
    for place, one in enumerate(found):
        bound, base = one.seconds("free"), one.seconds("unpatched")
        if bound and base and bound >= base:
            axes.text(
                0.02, place, "nothing to recover: the bound is slower", fontsize=8, va="center"
            )
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


def plot_matching(found: list[Comparison], labels: tuple, names: dict, path: Path) -> None:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8.0, 3.4), layout="constrained")
    colours = {
        "triton": COLOURS["tomesd"],
        "triton, one window": "#2a6f97",
        "reference": "#66b2bd",
        "original": COLOURS["original"],
    }
    for axes, name, unit in zip(
        picture.subplots(1, 2), ("seconds", "peak_mib"), ("ms", "MiB"), strict=True
    ):
        for label in labels:
            rows = [row for one in found if (row := one.find(label)) and row["seconds"]]
            scale = 1000 if unit == "ms" else 1
            points = [(row["tokens"], row[name] * scale) for row in rows if row[name]]
            style = {"color": colours[label], "label": names[label]}
            axes.loglog([x for x, _ in points], [y for _, y in points], "o-", ms=4, **style)
        axes.set_xlabel("tokens")
        axes.set_ylabel(unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    save_figure(picture, path)
