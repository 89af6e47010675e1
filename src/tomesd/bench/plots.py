"""Pictures of results."""

from pathlib import Path
from typing import Any

from ..files import whole_file
from .rows import Row
from .tables import Comparison, besides_merging, comparisons, duration

COLOURS = {"unpatched": "#777777", "original": "#d1495b", "tomesd": "#00798c", "free": "#c7b446"}


def figure(height: float, rows: int = 1, columns: int = 1) -> Any:
    """A figure and its axes, an array of them if there are several; drawn without a screen."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8.0, height), layout="constrained")
    axes = picture.subplots(rows, columns)
    for one in picture.axes:
        one.spines[["top", "right"]].set_visible(False)
    return picture, axes


def save_figure(picture: Any, path: Path) -> None:
    """Writes an SVG or PNG in one go, the same bytes for the same picture."""
    import matplotlib

    kind = path.suffix.removeprefix(".")
    # Without a date and with fixed names, a figure changes only if its data does.
    metadata = {"Date": None} if kind == "svg" else {}
    with (
        whole_file(path) as part,
        matplotlib.rc_context({"svg.hashsalt": "tomesd", "svg.fonttype": "none"}),
    ):
        picture.savefig(part, format=kind, dpi=150, metadata=metadata)


def plot_rows(rows: list[Row], path: Path) -> None:
    """Bars of milliseconds per call, one group for each setting."""
    groups = comparisons(rows)
    picture, axes = figure(1.0 + 0.28 * sum(1 + len(group.rows) for group in groups))
    place, places, names = 0.0, [], []
    for group in groups:
        for row in group:
            places.append(place)
            names.append(_bar_name(group, row))
            _bar(axes, place, row)
            place += 1
        place += 0.7
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms per call")
    save_figure(picture, path)


def _bar(axes: Any, place: float, row: Row) -> None:
    if row["seconds"] is None:
        axes.text(0, place, f" {duration(row)}", va="center", fontsize=8)
        return
    colour = COLOURS.get(row["variant"], "black")
    value, spread = row["seconds"] * 1000, row["spread"] * 1000
    axes.barh(place, value, color=colour, xerr=spread / 2, error_kw={"linewidth": 0.8})


def _bar_name(group: Comparison, row: Row) -> str:
    name, besides = str(row["label"]), besides_merging(row)
    if row["settings"] and (row["settings"]["ratio"] > 0 or not besides):
        name += f" {row['settings']['ratio']:g}"
    name = ", ".join([name, *besides])
    if row is next(iter(group)):
        first = group.first
        where = first["setting"] or f"{first['model']} {first['width']}x{first['height']}"
        name = f"{where}, {first['images']} im., {first['mode']}: {name}"
    return name
