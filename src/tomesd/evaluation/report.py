"""A run as one HTML page that needs nothing else: plots, tables, and the images side by side."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..generation.loading import DEMO_MODEL
from .figures import draw_pareto, draw_spread
from .needs import need
from .results import Record, Result, read_results
from .runs import Run, write_text
from .tables import QUALITY, Column, labels_of, methods_of, present
from .variants import UNMERGED

__all__ = ["write_report"]

_EMBEDDED_SIDE = 512
"""Larger pictures are embedded at this size."""
_FEW_FOR_FID = 2000


@dataclass(frozen=True)
class _Figure:
    title: str
    data: str
    meaning: str


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
    gallery = _Gallery(run, results, images)
    page = _template().render(
        definition=definition,
        options={**definition.model, **asdict(definition.sampling), "batch": definition.batch},
        demo=definition.model.get("model") == DEMO_MODEL,
        few=len(definition.items) < _FEW_FOR_FID,
        scoring=scoring,
        figures=_figures(run, results, images),
        cards=_cards(results),
        baseline=next(r for r in results if r.variant.kind == "unmerged"),
        methods=methods_of(results),
        columns=present(results),
        memory=_memory,
        time_factor=_time_factor,
        memory_factor=_memory_factor,
        worst=gallery.cases(gallery.ranked[:worst]),
        typical=gallery.cases(gallery.middle(worst, typical)),
        ranked_by=gallery.column,
        settings=_settings(results),
        flagged=sum(result.flagged for result in results),
    )
    path = run.path / "report.html"
    write_text(path, page)
    return path


class _Gallery:
    """Pictures, those that merging changed most first."""

    def __init__(self, run: Run, results: Sequence[Result], images: Sequence[Record]) -> None:
        self.run = run
        self.labels = labels_of(results)
        self.variants = [result.variant for result in results]
        self.scores = {(row["variant"], row["index"]): row for row in images}
        merged = [row for row in images if row["variant"] != UNMERGED.name]
        self.column = _closeness(images)
        sign = 1 if self.column.better == "less" else -1
        self.badness: dict[int, float] = {}
        for row in merged:
            bad = sign * row[self.column.key]
            self.badness[row["index"]] = max(bad, self.badness.get(row["index"], -np.inf))
        self.ranked = sorted(self.badness, key=lambda index: -self.badness[index])

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
            value = self.scores[variant.name, index].get(self.column.key)
            score = "" if value is None else f"{self.column.title} {self.column.words(value)}"
            path = self.run.image_path(variant, index)
            pictures.append(_Picture(self.labels[variant.name], score, _embedded(path)))
        worst = self.column.words(abs(self.badness[index]))
        return _Case(index, row["prompt"], row["seed"], worst, pictures)


def _closeness(images: Sequence[Record]) -> Column:
    """What tells how far single images are from the unmerged ones: LPIPS if it was measured."""
    key = "lpips" if any("lpips" in row for row in images) else "psnr"
    return next(column for column in QUALITY if column.key == key)


def _figures(run: Run, results: Sequence[Result], images: Sequence[Record]) -> list[_Figure]:
    """Drawn, written next to the page, and embedded."""
    drawn = []
    for column in present(results):
        picture = draw_pareto(results, column)
        if picture is not None:
            title = f"{column.title} against speed-up"
            drawn.append((f"{column.key}_speedup.png", title, picture, column.meaning))
    labels = labels_of(results)
    column = _closeness(images)
    values = _by_variant(images, column, labels)
    if (picture := draw_spread(values, column)) is not None:
        meaning = "boxes hold half of the images, whiskers reach over 90 % of them"
        title = f"{column.title} of single images"
        drawn.append((f"{column.key}_spread.png", title, picture, meaning))
    figures = []
    for name, title, picture, meaning in drawn:
        path = run.path / "figures" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(picture)
        figures.append(_Figure(title, _data(picture, "png"), meaning))
    return figures


def _by_variant(
    images: Sequence[Record], column: Column, labels: Mapping[str, str]
) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for row in images:
        if column.key in row:
            values.setdefault(labels[row["variant"]], []).append(row[column.key])
    return values


def _cards(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """The ends of the trade, in a few words: name, number, what goes with it."""
    merged = [r for r in results if r.variant.kind == "merged" and r.speedup is not None]
    column = next((c for c in present(merged) if c.key in ("lpips", "psnr")), None)
    if not merged or column is None:
        return []
    sign = 1 if column.better == "less" else -1
    labels = labels_of(results)

    def quality(result: Result) -> float:
        estimate = column.of(result)
        return np.inf if estimate is None else sign * estimate.value

    def card(name: str, result: Result) -> tuple[str, str, str]:
        assert result.speedup is not None
        words = f"{labels[result.variant.name]}: {column.title} {column.value(result)}"
        return name, f"{result.speedup.value:.2f}x", words

    fastest = max(merged, key=lambda r: r.speedup.value if r.speedup else 0)
    closest = min(merged, key=quality)
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
        given = result.variant.settings.items()
        words = ", ".join(f"{name}={value!r}" for name, value in given)
        rows.append((labels[result.variant.name], words or "no merging"))
    return rows


def _embedded(path: Path) -> str:
    """A picture as data for a page. The original stays in the folder of the run."""
    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
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
