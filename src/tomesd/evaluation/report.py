"""A run as one HTML page that needs nothing else: plots, tables, and the images side by side."""

import base64
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from ..choices import EMBEDDED
from ..files import whole_file, write_text
from ..presets import numbered, options_of
from ..settings import Settings
from .estimates import TOO_FEW, Estimate
from .figures import draw_pareto, draw_spread
from .metrics import QualityMetric, closeness
from .needs import need
from .results import Result, labels_of, methods_of, metrics_in, read_results
from .runs import Definition, Record, Run
from .scoring import open_image
from .variants import UNMERGED

_EMBEDDED_SIDE = 512
"""Larger pictures are embedded at this size."""


def write_report(
    run: Run, *, worst: int | None = None, typical: int | None = None
) -> tuple[Path, list[str]]:
    """Writes `report.html` and its plots as PNGs into the folder of a finished run.

    Args:
        worst: how many of the images that merging changed most to show; if None, a quarter of them,
            and 8 at most.
        typical: how many from the middle; if None, half as many.

    Returns:
        The page, and what is missing on it because files are damaged, in a sentence each.
    """
    for name, value in (("worst", worst), ("typical", typical)):
        if value is not None and value < 0:
            raise ValueError(f"{name}={value}: must be at least 0")
    need("jinja2", "matplotlib")
    definition = run.load()
    results, images, scoring, missing = read_results(run)
    metric = closeness({name for row in images for name in row})
    gallery = _Gallery(run, results, images, metric)
    if worst is None:
        worst = min(8, max(1, len(gallery.ranked) // 4))
    if typical is None:
        typical = (worst + 1) // 2
    shown = gallery.cases(gallery.ranked[:worst]), gallery.cases(gallery.middle(worst, typical))
    missing = missing + gallery.unreadable
    page = _template().render(
        definition=definition,
        options=_options(definition),
        demo=definition.model.get("model") in EMBEDDED,
        scoring={"reference": None, "networks": {}, "resamples": {}, "versions": {}, **scoring},
        missing=missing,
        with_memory=any(result.peak_mib is not None for result in results),
        figures=_figures(run, results, images, metric),
        cards=_cards(results, metric),
        baseline=next(r for r in results if r.variant.kind == UNMERGED.kind),
        methods=methods_of(results),
        metrics=metrics_in(results),
        memory=_memory,
        time_factor=_time_factor,
        memory_factor=_memory_factor,
        worst=shown[0],
        typical=shown[1],
        all_shown=len(shown[0]) == len(gallery.ranked),
        ranked_by=metric,
        settings=_settings(results),
        flagged=sum(result.flagged for result in results),
    )
    path = run.path / "report.html"
    write_text(path, page)
    return path, missing


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
        self.unreadable: list[str] = []
        """What is wrong with pictures that were to be shown."""
        self.variants = [result.variant for result in results]
        self.scores = {(row["variant"], row["index"]): row for row in images}
        by_index: dict[int, list[float]] = {}
        there = {row["index"] for row in images if row["variant"] == UNMERGED.name}
        for row in images:
            if row["variant"] != UNMERGED.name and metric.name in row and row["index"] in there:
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
            value = self.scores.get((variant.name, index), {}).get(self.metric.name)
            score = "" if value is None else f"{self.metric.title} {self.metric.show(value)}"
            try:
                data = _embedded(self.run.image_path(variant, index))
            except ValueError as error:
                self.unreadable.append(str(error))
                continue
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
        if single.name in row and row["variant"] in labels:
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
        assert result.speedup is not None
        label, sure = labels[result.variant.name], _sureness(result.speedup)
        words = f"{label}: {metric.title} {metric.value(result.metrics)}. Speed-up: {sure}."
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
    return *_factor(estimate.value, "faster", "slower"), _sureness(estimate)


def _sureness(speedup: Estimate) -> str:
    """The interval of a speed-up, or that there is none."""
    if speedup.low is None or speedup.high is None:
        return TOO_FEW
    words = f"{speedup.low:.2f}x to {speedup.high:.2f}x"
    return f"{words}, so it may be none" if speedup.low <= 1 <= speedup.high else words


def _memory_factor(baseline: Result, result: Result) -> tuple[str, str]:
    if not baseline.peak_mib or not result.peak_mib:
        return "", ""
    return _factor(baseline.peak_mib / result.peak_mib, "less", "more")


def _settings(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Label of every variant, and the line of Python that merges like it."""
    labels = labels_of(results)
    rows = []
    for result in results:
        variant = result.variant
        settings = {name: numbered(value) for name, value in variant.settings.items()}
        if variant.kind == "merged":
            settings = options_of(Settings(**settings))
        words = ", ".join(["pipe", *(f"{name}={value!r}" for name, value in settings.items())])
        line = "no merging" if variant.kind == UNMERGED.kind else f"tomesd.apply_patch({words})"
        rows.append((labels[variant.name], line))
    return rows


def _options(definition: Definition) -> dict[str, str]:
    """How the images were made, in words."""
    sampling = asdict(definition.sampling)
    size = f"{sampling.pop('width')} x {sampling.pop('height')}"
    known = {
        "command": definition.command,
        "started": definition.started,
        "device": definition.device,
        **{name: value for name, value in definition.model.items() if name != "dtype"},
        "dtype": definition.dtype or definition.model.get("dtype"),
        "size": size,
        **sampling,
        "batch": definition.batch,
        "prompts": definition.prompts,
    }
    words = {True: "yes", False: "no"}
    return {
        name.replace("_", " "): words[value] if isinstance(value, bool) else str(value)
        for name, value in known.items()
        if value not in (None, "")
    }


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
    return environment.get_template("report.html")
