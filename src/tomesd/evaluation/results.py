"""From the scores of images to the rows of a table."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ..files import json_lines, write_text
from ..generation.progress import OnProgress
from .distances import FID_RESAMPLES
from .estimates import CONFIDENCE, RESAMPLES, Estimate, mean_estimate, speedup_estimate
from .metrics import METRICS, QualityMetric
from .runs import Definition, Record, Run, package_versions
from .scoring import Arrays, ImageSet, Judges, Reference, read_scores
from .variants import UNMERGED, Variant

_T = TypeVar("_T")


@dataclass(frozen=True)
class Result:
    """One variant: what it costs, and how good its images are."""

    variant: Variant
    images: int
    seconds: float | None
    """Per image: the median over the batches. None if no batch was timed."""
    step_seconds: float | None
    """Per image, of a step on average: the same."""
    speedup: Estimate | None
    """Against no merging."""
    peak_mib: float | None
    """Per image: the highest of the batches, beyond what was in use before. None on a CPU."""
    flagged: int
    """Images that the model's safety checker has blacked out."""
    metrics: dict[str, Estimate]
    """By the names of `METRICS`."""

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Result":
        row = dict(row)
        row["variant"] = Variant(**row["variant"])
        row["speedup"] = None if row["speedup"] is None else Estimate.from_json(row["speedup"])
        metrics = row["metrics"].items()
        row["metrics"] = {name: Estimate.from_json(values) for name, values in metrics}
        return cls(**row)


class Findings(NamedTuple):
    """The results of a run, as far as they can be read."""

    results: list[Result]
    images: list[Record]
    """One for each image of each variant."""
    scoring: dict[str, Any]
    """What the images were scored with; empty if that cannot be read."""
    missing: list[str]
    """What cannot be read, or is not there, in a sentence each."""


def read_results(run: Run) -> Findings:
    """What is sound of the results, and a word on what is not."""
    names = ("results.jsonl", "images.jsonl", "scoring.json")
    for name in names:
        if not (run.path / name).is_file():
            raise ValueError(f"there is no {name} in {run.path}: has tomesd eval finished?")
    rows, images, about = (run.path / name for name in names)
    missing: list[str] = []
    results = _sound(rows, Result.from_json, missing)
    if not any(result.variant.kind == UNMERGED.kind for result in results):
        told = f" ({'; '.join(missing)})" if missing else ""
        raise ValueError(f"{rows} has no row of the unmerged images to compare with{told}")
    scored = _sound(images, _checked_record, missing)
    definition = run.load()
    there = {result.variant.name for result in results}
    for name in (variant.name for variant in definition.variants):
        count = sum(record["variant"] == name for record in scored)
        if name not in there:
            missing.append(f"the row of {name} is missing in {rows.name}")
        elif count < len(definition.items):
            missing.append(
                f"{len(definition.items) - count} of {len(definition.items)} images of {name} are "
                f"missing in {images.name}"
            )
    scoring: dict[str, Any] = {}
    try:
        scoring = json.loads(about.read_text(encoding="utf-8"))
    except ValueError:
        missing.append(f"{about} is damaged: what scored the images is not known")
    return Findings(results, [r for r in scored if r["variant"] in there], scoring, missing)


def _checked_record(row: dict[str, Any]) -> Record:
    scores = {m.name: float(row[m.name]) for m in METRICS if m.name in row}
    named = {"prompt": str(row["prompt"]), "variant": str(row["variant"]), "seed": int(row["seed"])}
    return {**row, **scores, **named, "index": int(row["index"])}


def _sound(path: Path, read: Callable[[dict[str, Any]], _T], missing: list[str]) -> list[_T]:
    """What can be read of a file; adds to `missing` which lines cannot."""
    found, damaged = [], []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found.append(read(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError):
            damaged.append(str(number))
    if damaged:
        lines_are = "line" if len(damaged) == 1 else "lines"
        missing.append(f"{path}, {lines_are} {', '.join(damaged)}: damaged, left out")
    return found


def write_results(
    run: Run,
    definition: Definition,
    judges: Judges,
    reference: Reference | None,
    on_progress: OnProgress,
) -> list[Result]:
    """Makes the table of a run whose images are all made and scored. Calls no network."""
    records = run.records()
    timed = _timed(records, definition)
    unmerged = ImageSet.of_variant(run, definition, UNMERGED, judges)
    compared_with = {"unmerged": read_scores(run, unmerged, judges)}
    if reference is not None:
        images = ImageSet.of_reference(reference, judges)
        compared_with["reference"] = read_scores(run, images, judges)
    rows, image_rows = [], []
    for number, variant in enumerate(definition.variants):
        on_progress(f"intervals of {variant.name}", number, len(definition.variants))
        scores = read_scores(run, ImageSet.of_variant(run, definition, variant, judges), judges)
        others = dict(compared_with)
        if variant.kind == UNMERGED.kind:
            del others["unmerged"]  # no set is compared with itself
        metrics = _metrics(judges, scores, others)
        of_variant = {i: r for (name, i), r in records.items() if name == variant.name}
        rows.append(_result(variant, definition, metrics, of_variant, timed))
        image_rows += _image_rows(variant, definition, scores, of_variant)
    write_text(run.path / "images.jsonl", json_lines(image_rows))
    write_text(run.path / "scoring.json", json.dumps(_about(judges, reference), indent=1) + "\n")
    write_text(run.path / "results.jsonl", json_lines(asdict(row) for row in rows))
    return rows


def _metrics(judges: Judges, scores: Arrays, others: Mapping[str, Arrays]) -> dict[str, Estimate]:
    found: dict[str, Estimate] = {}
    for metric in judges.metrics:
        if metric.array not in scores:
            continue
        values = scores[metric.array]
        if metric.distance is None:
            found[metric.name] = mean_estimate(values)
        elif metric.against in others and len(values) > 1:
            one, other = (
                torch.from_numpy(features).to(judges.device)
                for features in (values, others[metric.against][metric.array])
            )
            found[metric.name] = metric.distance(one, other, paired=metric.against == "unmerged")
    return found


def _timed(
    records: dict[tuple[str, int], Record], definition: Definition
) -> dict[str, dict[int, Record]]:
    """By variant and batch: a record of each batch that tells what is usual.

    If some were timed with all variants, it is those alone: a speed-up is then what the seconds
    beside it say.
    """
    found = {}
    for variant in definition.variants:
        timed = [record for (name, _), record in records.items() if name == variant.name]
        # The first one may be slow, and the last one smaller; better those than none.
        timed = [record for record in timed if not record["first"]] or timed
        timed = [record for record in timed if record["images"] == definition.batch] or timed
        found[variant.name] = {record["batch"]: record for record in timed}
    common = set.intersection(*(set(batches) for batches in found.values()))
    if not common:
        return found
    return {name: {batch: of[batch] for batch in common} for name, of in found.items()}


def _result(
    variant: Variant,
    definition: Definition,
    metrics: dict[str, Estimate],
    records: dict[int, Record],
    all_timed: dict[str, dict[int, Record]],
) -> Result:
    timed = all_timed[variant.name]
    times, steps = (_per_image(timed, name) for name in ("seconds", "step_seconds"))
    base_times = _per_image(all_timed[UNMERGED.name], "seconds")
    both = sorted(times.keys() & base_times.keys())
    speedup = None
    if both and variant.kind != UNMERGED.kind:
        base, merged = (np.array([found[b] for b in both]) for found in (base_times, times))
        speedup = speedup_estimate(base, merged)
    peaks = [
        record["peak_mib"] / record["images"]
        for record in records.values()
        if record["peak_mib"] is not None
    ]
    return Result(
        variant=variant,
        images=len(definition.items),
        seconds=_median(times),
        step_seconds=_median(steps),
        speedup=speedup,
        peak_mib=max(peaks, default=None),
        flagged=sum(record["flagged"] for record in records.values()),
        metrics=metrics,
    )


def _per_image(timed: dict[int, Record], name: str) -> dict[int, float]:
    return {batch: record[name] / record["images"] for batch, record in timed.items()}


def _median(times: dict[int, float]) -> float | None:
    return float(np.median(list(times.values()))) if times else None


def _image_rows(
    variant: Variant, definition: Definition, scores: Arrays, records: dict[int, Record]
) -> list[Record]:
    rows = []
    for place, item in enumerate(definition.items):
        record = records.get(item.index)
        row: Record = {"variant": variant.name, **asdict(item)}
        row |= {name: float(v[place]) for name, v in scores.items() if v.ndim == 1}
        row["seconds"] = None if record is None else record["seconds"] / record["images"]
        rows.append(row)
    return rows


def _about(judges: Judges, reference: Reference | None) -> dict[str, Any]:
    about = None
    if reference is not None:
        about = {"name": reference.name, "images": len(reference.files)}
    return {
        "networks": {name: name + judges.tags[name] for name in judges.networks},
        "reference": about,
        "confidence": CONFIDENCE,
        "resamples": {"means and KID": RESAMPLES, "FID": FID_RESAMPLES},
        "versions": package_versions("numpy", "scipy", "torchmetrics", "pillow"),
    }


def metrics_in(results: Sequence[Result]) -> list[QualityMetric]:
    """The metrics that were measured."""
    return [m for m in METRICS if any(m.name in result.metrics for result in results)]


def methods_of(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Merged results by what they have in common but for the ratio, in order of the ratio."""
    merged = _merged(results)
    methods: dict[str, list[Result]] = {}
    for result in sorted(merged, key=lambda result: result.variant.ratio or 0):
        words = _method(result.variant, merged)
        methods.setdefault(", ".join(words) or "tomesd", []).append(result)
    return methods


def labels_of(results: Sequence[Result]) -> dict[str, str]:
    """Variant names to words for people."""
    labels = {result.variant.name: "unmerged" for result in results}
    merged = _merged(results)
    for variant in (result.variant for result in merged):
        said = variant.title.split(", ")  # which is what is done instead of merging, if any
        words = [word for word in _method(variant, merged) if word not in said]
        labels[variant.name] = ", ".join([variant.title, *words])
    return labels


def _merged(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.variant.kind != UNMERGED.kind]


def _method(variant: Variant, merged: Sequence[Result]) -> list[str]:
    """What differs between the results but for the ratio. None, which leaves the choice to the
    library, needs no words."""
    alike = [r.variant.settings for r in merged if r.variant.kind == variant.kind]
    varied = [
        f"{name} {value}"
        for name, value in variant.settings.items()
        if name != "ratio"
        and value is not None
        and any(settings.get(name) != value for settings in alike)
    ]
    if len({result.variant.kind for result in merged}) == 1:
        return varied
    return ["tomesd 0.1.3" if variant.kind == "original" else "tomesd", *varied]
