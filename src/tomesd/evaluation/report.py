"""A run as one HTML page that needs nothing else: plots, tables, and the images side by side."""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ..files import whole_file, write_text
from ..generation.loading import DEMO_MODEL
from .figures import draw_pareto, draw_spread
from .metrics import QualityMetric, closeness
from .needs import need
from .results import Result, labels_of, methods_of, metrics_in, read_results
from .runs import Record, Run
from .scoring import open_image
from .variants import UNMERGED

_EMBEDDED_SIDE = 512
"""Larger pictures are embedded at this size."""


def write_report(run: Run, *, worst: int = 8, typical: int = 4) -> Path:
    """Writes `report.html` and its plots as PNGs into the folder of a finished run.

    Args:
        worst: how many of the images that merging changed most to show.
        typical: how many from the middle.
    """
    for name, value in (("worst", worst), ("typical", typical)):
        if value < 0:
            raise ValueError(f"{name}={value}: must be at least 0")
    need("jinja2", "matplotlib")
    definition = run.load()
    results, images, scoring = read_results(run)
    metric = closeness({name for row in images for name in row})
    gallery = _Gallery(run, results, images, metric)
    page = _template().render(
        definition=definition,
        options={**definition.model, **asdict(definition.sampling), "batch": definition.batch},
        demo=definition.model.get("model") == DEMO_MODEL,
        scoring=scoring,
        figures=_figures(run, results, images, metric),
        cards=_cards(results, metric),
        baseline=next(r for r in results if r.variant.kind == UNMERGED.kind),
        methods=methods_of(results),
        metrics=metrics_in(results),
        memory=_memory,
        time_factor=_time_factor,
        memory_factor=_memory_factor,
        worst=gallery.cases(gallery.ranked[:worst]),
        typical=gallery.cases(gallery.middle(worst, typical)),
        ranked_by=metric,
        settings=_settings(results),
        flagged=sum(result.flagged for result in results),
    )
    path = run.path / "report.html"
    write_text(path, page)
    return path


@dataclass(frozen=True)
class _Picture:
    label: str
    score: str
    data: str


@dataclass(frozen=True)
class _Case:
    """One image of the gallery, as every variant made it."""

    index: int
    prompt: str
    seed: int
    score: str
    pictures: list[_Picture]
    """The unmerged one first."""


class _Gallery:
    """Pictures, those that merging changed most first."""

    def __init__(
        self, run: Run, results: Sequence[Result], images: Sequence[Record], metric: QualityMetric
    ) -> None:
        self.run, self.metric, self.labels = run, metric, labels_of(results)
        self.variants = [result.variant for result in results]
        self.scores = {(row["variant"], row["index"]): row for row in images}
        by_index: dict[int, list[float]] = {}
        for row in images:
            if row["variant"] != UNMERGED.name:
                by_index.setdefault(row["index"], []).append(row[metric.name])
        self.worst = {
            index: max(values, key=lambda value: metric.sign * value)
            for index, values in by_index.items()
        }
        self.ranked = sorted(self.worst, key=lambda index: -metric.sign * self.worst[index])

    def middle(self, after: int, count: int) -> list[int]:
        """Around the median, without the first `after`."""
        start = max(after, (len(self.ranked) - count) // 2)
        return self.ranked[start : start + count]

    def cases(self, indices: Sequence[int]) -> list[_Case]:
        return [self._case(index) for index in indices]

    def _case(self, index: int) -> _Case:
        row = self.scores[UNMERGED.name, index]
        pictures = []
        for variant in self.variants:
            value = self.scores[variant.name, index].get(self.metric.name)
            score = "" if value is None else f"{self.metric.title} {self.metric.show(value)}"
            data = _embedded(self.run.image_path(variant, index))
            pictures.append(_Picture(self.labels[variant.name], score, data))
        worst = self.metric.show(self.worst[index])
        return _Case(index, row["prompt"], row["seed"], worst, pictures)


def _figures(
    run: Run, results: Sequence[Result], images: Sequence[Record], single: QualityMetric
) -> list[dict[str, str]]:
    """Drawn, written next to the page, and embedded.

    Args:
        single: the metric to show the spread of over single images.
    """
    drawn: list[tuple[str, str, bytes | None, str]] = []
    for metric in metrics_in(results):
        title = f"{metric.title} against speed-up"
        picture = draw_pareto(results, metric)
        drawn.append((f"{metric.name}_speedup.png", title, picture, metric.meaning))
    labels = labels_of(results)
    values: dict[str, list[float]] = {}
    for row in images:
        if single.name in row:
            values.setdefault(labels[row["variant"]], []).append(row[single.name])
    meaning = "boxes hold half of the images, whiskers reach over 90 % of them"
    title = f"{single.title} of single images"
    drawn.append((f"{single.name}_spread.png", title, draw_spread(values, single), meaning))
    figures = []
    for name, title, content, meaning in drawn:
        if content is not None:
            with whole_file(run.path / "figures" / name) as part:
                part.write_bytes(content)
            figures.append({"title": title, "data": _data(content, "png"), "meaning": meaning})
    return figures


def _cards(results: Sequence[Result], metric: QualityMetric) -> list[tuple[str, str, str]]:
    """The ends of the trade, in a few words: name, number, what goes with it."""
    speed = {
        result.variant.name: result.speedup.value
        for result in results
        if result.variant.kind == "merged"
        and result.speedup is not None
        and metric.name in result.metrics
    }
    merged = [result for result in results if result.variant.name in speed]
    if not merged:
        return []
    labels = labels_of(results)

    def card(name: str, result: Result) -> tuple[str, str, str]:
        label = labels[result.variant.name]
        words = f"{label}: {metric.title} {metric.value(result.metrics)}"
        return name, f"{speed[result.variant.name]:.2f}x", words

    fastest = max(merged, key=lambda r: speed[r.variant.name])
    closest = min(merged, key=lambda r: metric.sign * r.metrics[metric.name].value)
    if fastest is closest:
        return [card("fastest, and closest to unmerged", fastest)]
    return [card("fastest", fastest), card("closest to unmerged", closest)]


def _memory(mib: float | None) -> str:
    if mib is None:
        return "-"
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


def _factor(factor: float, more: str, less: str) -> tuple[str, str]:
    """A gain or a loss: the number, and which of the two it is."""
    return (f"{factor:.2f}x", more) if factor >= 1 else (f"{1 / factor:.2f}x", less)


def _time_factor(result: Result) -> tuple[str, str, str]:
    """The factor, what it is, and its interval."""
    estimate = result.speedup
    if estimate is None:
        return "", "", ""
    words = _factor(estimate.value, "faster", "slower")
    if estimate.low is None or estimate.high is None:
        return *words, ""
    return *words, f"speed-up {estimate.low:.2f}x to {estimate.high:.2f}x"


def _memory_factor(baseline: Result, result: Result) -> tuple[str, str]:
    if not baseline.peak_mib or not result.peak_mib:
        return "", ""
    return _factor(baseline.peak_mib / result.peak_mib, "less", "more")


def _settings(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Label and settings of every variant, as they are given to `apply_patch`."""
    labels = labels_of(results)
    rows = []
    for result in results:
        words = ", ".join(f"{name}={value!r}" for name, value in result.variant.settings.items())
        rows.append((labels[result.variant.name], words or "no merging"))
    return rows


def _embedded(path: Path) -> str:
    """A picture as data for a page. The original stays in the folder of the run."""
    picture = open_image(path)
    picture.thumbnail((_EMBEDDED_SIDE, _EMBEDDED_SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, format="WEBP", quality=90, method=4)
    return _data(buffer.getvalue(), "webp")


def _data(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tomesd.evaluation", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.get_template("report.html")
