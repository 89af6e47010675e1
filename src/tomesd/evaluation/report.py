"""A run as one HTML page that needs nothing else: plots, tables, and the images side by side."""

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from ..choices import EMBEDDED
from ..files import whole_file, write_text
from ..generation.lines import python_line
from ..generation.loading import need
from ..presets import numbered, options_of
from ..settings import Settings
from .estimates import TOO_FEW, Estimate
from .figures import draw_pareto, draw_spread
from .metrics import QualityMetric, closeness
from .results import Findings, Result, labels_of, methods_of, metrics_in, read_results
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
    findings = read_results(run)
    results, images, scoring, missing = findings
    metric = closeness({name for row in images for name in row})
    ranked = _ranked(images, metric)
    if worst is None:
        worst = min(8, max(1, len(ranked) // 4))
    if typical is None:
        typical = (worst + 1) // 2
    middle = max(worst, (len(ranked) - typical) // 2)
    worst_cases = _cases(run, findings, metric, ranked[:worst])
    typical_cases = _cases(run, findings, metric, ranked[middle : middle + typical])
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
        seconds=_seconds,
        gain=_gain,
        sureness=_sureness,
        worst=worst_cases,
        typical=typical_cases,
        all_shown=len(worst_cases) == len(ranked),
        ranked_by=metric,
        settings=_settings(results),
        flagged=sum(result.flagged for result in results),
    )
    path = run.path / "report.html"
    write_text(path, page)
    return path, missing


def _ranked(images: Iterable[Record], metric: QualityMetric) -> list[tuple[int, float]]:
    """Images by index, with their worst score; those that merging changed most come first."""
    images = list(images)
    unmerged = {row["index"] for row in images if row["variant"] == UNMERGED.name}
    worst: dict[int, float] = {}
    for row in images:
        index = row["index"]
        if metric.name in row and index in unmerged:
            scores = worst.get(index, row[metric.name]), row[metric.name]
            worst[index] = max(scores, key=lambda score: metric.sign * score)
    return sorted(worst.items(), key=lambda item: -metric.sign * item[1])


def _cases(
    run: Run, findings: Findings, metric: QualityMetric, ranked: Sequence[tuple[int, float]]
) -> list[dict[str, Any]]:
    """Images as every variant made them, the unmerged one first.

    What cannot be read is left out, and added to what is missing.
    """
    labels = labels_of(findings.results)
    rows = {(row["variant"], row["index"]): row for row in findings.images}
    cases = []
    for index, worst in ranked:
        pictures = []
        for variant in (result.variant for result in findings.results):
            score = rows.get((variant.name, index), {}).get(metric.name)
            words = "" if score is None else f"{metric.title} {metric.show(score)}"
            try:
                data = _embedded(run.image_path(variant, index))
            except ValueError as error:
                findings.missing.append(str(error))
                continue
            pictures.append({"label": labels[variant.name], "score": words, "data": data})
        made = {name: rows[UNMERGED.name, index][name] for name in ("index", "prompt", "seed")}
        cases.append({**made, "score": metric.show(worst), "pictures": pictures})
    return cases


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
    merged = [
        (result, result.speedup)
        for result in results
        if result.variant.kind == "merged" and result.speedup and metric.name in result.metrics
    ]
    if not merged:
        return []
    fastest = max(merged, key=lambda one: one[1].value)
    closest = min(merged, key=lambda one: metric.sign * one[0].metrics[metric.name].value)
    named = {"fastest": fastest, "closest to unmerged": closest}
    if fastest is closest:
        named = {"fastest, and closest to unmerged": fastest}
    labels = labels_of(results)
    return [
        (
            name,
            f"{speedup.value:.2f}x",
            f"{labels[result.variant.name]}: {metric.title} {metric.value(result.metrics)}. "
            f"Speed-up: {_sureness(speedup)}.",
        )
        for name, (result, speedup) in named.items()
    ]


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _memory(mib: float | None) -> str:
    if mib is None:
        return "-"
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


def _gain(factor: float | None, more: str, less: str) -> tuple[str, str]:
    """A gain or a loss: the number, and which of the two it is."""
    if not factor:
        return "", ""
    return (f"{factor:.2f}x", more) if factor >= 1 else (f"{1 / factor:.2f}x", less)


def _sureness(speedup: Estimate | None) -> str:
    """The interval of a speed-up, or that there is none."""
    if speedup is None:
        return ""
    if speedup.low is None or speedup.high is None:
        return TOO_FEW
    words = speedup.interval("{:.2f}x".format)
    return f"{words}, so it may be none" if speedup.low <= 1 <= speedup.high else words


def _settings(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Label of every variant, and the line of Python that merges like it."""
    labels = labels_of(results)
    rows = []
    for variant in (result.variant for result in results):
        settings = {name: numbered(value) for name, value in variant.settings.items()}
        if variant.kind == "merged":
            settings = options_of(Settings(**settings))
        line = "no merging" if variant.kind == UNMERGED.kind else python_line(settings)
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
