"""Plots of a run: quality against speed-up, and how it spreads over the images."""

import io
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .estimates import Estimate
from .metrics import QualityMetric
from .results import Result, methods_of
from .variants import UNMERGED

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
_MARKERS = "osD^vPXh"
_WIDEST = 32
"""Letters in a line of the words beside a plot: more would leave the plot no room."""


def pareto_front(points: Sequence[tuple[float, float]], better: str) -> list[int]:
    """Indices of the points `(speed-up, value)` that no other beats in both, by speed-up.

    Args:
        better: "less" or "more": which values are good.
    """
    sign = 1 if better == "less" else -1
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], sign * points[i][1]))
    front: list[int] = []
    for i in order:
        if not front or sign * points[i][1] < sign * points[front[-1]][1]:
            front.append(i)
    return front[::-1]


def draw_pareto(results: Sequence[Result], metric: QualityMetric) -> bytes | None:
    """A PNG of one metric against the speed-up, a line per method; None if there is nothing."""
    methods = {label: _points(rows, metric) for label, rows in methods_of(results).items()}
    if not any(methods.values()):
        return None
    figure, axes = _figure()
    unmerged = [result for result in results if result.variant.kind == UNMERGED.kind]
    _draw_line(axes, "unmerged", _points(unmerged, metric), "#333333", "*")
    styles = zip(itertools.cycle(_COLORS), itertools.cycle(_MARKERS), strict=True)
    for (label, points), (color, marker) in zip(methods.items(), styles, strict=False):
        _draw_line(axes, label, points, color, marker)
        for point in points:
            where = {"textcoords": "offset points", "xytext": (5, 4)}
            axes.annotate(point.title, point.place, fontsize=8, color=color, **where)
    everything = [point.place for point in _points(results, metric)]
    front = [everything[i] for i in pareto_front(everything, metric.better)]
    if len(front) > 1:
        axes.plot(*zip(*front, strict=True), color="#bbbbbb", linewidth=5, alpha=0.6, zorder=0)
    axes.axvline(1, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xlabel("speed-up (further right is better)")
    direction = "lower" if metric.better == "less" else "higher"
    axes.set_ylabel(f"{metric.title} ({direction} is better)")
    axes.legend(fontsize=8, framealpha=0.6, edgecolor="none")
    return _png(figure)


@dataclass(frozen=True)
class _Point:
    title: str
    speedup: Estimate
    value: Estimate

    @property
    def place(self) -> tuple[float, float]:
        return self.speedup.value, self.value.value


def _points(results: Sequence[Result], metric: QualityMetric) -> list[_Point]:
    """Where results are in a plot. The unmerged one is there also if it has nothing to be measured:
    it is at no distance from itself."""
    points = []
    for result in results:
        value, speedup = result.metrics.get(metric.name), result.speedup
        if result.variant.kind == UNMERGED.kind:
            speedup = Estimate(1.0)
            if value is None and metric.identical is not None:
                value = Estimate(metric.identical)
        if value is not None and speedup is not None:
            points.append(_Point(result.variant.title, speedup, value.times(metric.scale)))
    return points


def _draw_line(axes: Any, label: str, points: Sequence[_Point], color: str, marker: str) -> None:
    """Points with error bars, joined."""
    if points:
        axes.errorbar(
            *zip(*(point.place for point in points), strict=True),
            xerr=_errors([point.speedup for point in points]),
            yerr=_errors([point.value for point in points]),
            fmt=f"{marker}-",
            linewidth=1,
            elinewidth=0.8,
            capsize=2,
            markersize=9 if marker == "*" else 5,
            color=color,
            label=textwrap.fill(label, _WIDEST),
        )


def draw_spread(values: Mapping[str, Sequence[float]], metric: QualityMetric) -> bytes | None:
    """A PNG of a box plot per variant, over its images."""
    if not values:
        return None
    labels = [textwrap.fill(label, _WIDEST) for label in values]
    lines = sum(1 + 0.5 * label.count("\n") for label in labels)
    figure, axes = _figure(height=1.3 + 0.28 * lines)
    axes.boxplot(
        list(values.values())[::-1],
        tick_labels=labels[::-1],
        orientation="horizontal",
        whis=(5, 95),
        flierprops={"markersize": 3, "markeredgecolor": "#d55e00"},
        medianprops={"color": "#0072b2", "linewidth": 1.5},
    )
    axes.set_xlabel(f"{metric.title} of single images")
    axes.grid(axis="y", visible=False)
    return _png(figure)


def _errors(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Lengths of the bars below and above; none where there is no interval."""
    below = [0 if e.low is None else max(e.value - e.low, 0) for e in estimates]
    above = [0 if e.high is None else max(e.high - e.value, 0) for e in estimates]
    return [below, above]


def _figure(height: float = 3.8) -> tuple[Any, Any]:
    # Not pyplot, which keeps every figure and may look for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    return buffer.getvalue()
