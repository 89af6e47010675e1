"""From the scores of images to the rows of a table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..files import json_lines, read_json_lines, write_text
from ..generation.progress import OnProgress
from .distances import FID_RESAMPLES
from .estimates import CONFIDENCE, RESAMPLES, Array, Estimate, mean_estimate, speedup_estimate
from .metrics import METRICS, QualityMetric
from .runs import Definition, Record, Run, package_versions
from .scoring import Arrays, ImageSet, Judges, Reference, read_scores
from .variants import UNMERGED, Variant


@dataclass(frozen=True)
class Result:
    """One variant: what it costs, and how good its images are."""

    variant: Variant
    images: int
    seconds: float | None
    """Per image: the median over the batches. None if no batch was timed."""
    speedup: Estimate | None
    """Against no merging."""
    peak_mib: float | None
    """Per image: the highest of the batches, beyond what was in use before."""
    flagged: int
    """Images that the model's safety checker has blacked out."""
    metrics: dict[str, Estimate]
    """By the names of `METRICS`."""

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Result":
        row = dict(row)
        row["variant"] = Variant(**row["variant"])
        row["speedup"] = None if row["speedup"] is None else Estimate(**row["speedup"])
        row["metrics"] = {name: Estimate(**values) for name, values in row["metrics"].items()}
        return cls(**row)


def read_results(run: Run) -> tuple[list[Result], list[Record], dict[str, Any]]:
    """The rows, the images, and what they were scored with."""
    names = ("results.jsonl", "images.jsonl", "scoring.json")
    for name in names:
        if not (run.path / name).is_file():
            raise ValueError(f"there is no {name} in {run.path}: has tomesd eval finished?")
    rows, images, about = (run.path / name for name in names)
    results = [Result.from_json(row) for row in read_json_lines(rows)]
    return results, read_json_lines(images), json.loads(about.read_text(encoding="utf-8"))


def write_results(
    run: Run,
    definition: Definition,
    judges: Judges,
    reference: Reference | None,
    on_progress: OnProgress,
) -> list[Result]:
    """Makes the table of a run whose images are all made and scored. Calls no network."""
    records = run.records()
    base_times = _times(records, UNMERGED, definition.batch)
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
        times = _times(records, variant, definition.batch)
        of_variant = {i: r for (name, i), r in records.items() if name == variant.name}
        rows.append(_result(variant, definition, metrics, of_variant, times, base_times))
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


def _times(
    records: dict[tuple[str, int], Record], variant: Variant, batch: int
) -> dict[int, float]:
    """Batch to seconds per image, of the batches that tell what is usual."""
    timed = [record for (name, _), record in records.items() if name == variant.name]
    # The first one may be slow, and the last one smaller; better those than none.
    timed = [record for record in timed if not record["first"]] or timed
    timed = [record for record in timed if record["images"] == batch] or timed
    return {record["batch"]: record["seconds"] / record["images"] for record in timed}


def _result(
    variant: Variant,
    definition: Definition,
    metrics: dict[str, Estimate],
    records: dict[int, Record],
    times: dict[int, float],
    base_times: dict[int, float],
) -> Result:
    both = sorted(times.keys() & base_times.keys())
    speedup = None
    if both and variant.kind != UNMERGED.kind:
        speedup = speedup_estimate(_array(base_times, both), _array(times, both))
    peaks = [record["peak_mib"] / record["images"] for record in records.values()]
    return Result(
        variant=variant,
        images=len(definition.items),
        seconds=float(np.median(list(times.values()))) if times else None,
        speedup=speedup,
        peak_mib=max(peaks, default=None),
        flagged=sum(record["flagged"] for record in records.values()),
        metrics=metrics,
    )


def _array(times: dict[int, float], batches: list[int]) -> Array:
    return np.array([times[batch] for batch in batches])


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
    merged = [result for result in results if result.variant.kind != UNMERGED.kind]
    methods: dict[str, list[Result]] = {}
    for result in sorted(merged, key=lambda result: result.variant.ratio or 0):
        methods.setdefault(_method(result.variant, merged), []).append(result)
    return methods


def labels_of(results: Sequence[Result]) -> dict[str, str]:
    """Variant names to words for people."""
    labels = {result.variant.name: "unmerged" for result in results}
    methods = methods_of(results)
    for method, rows in methods.items():
        for result in rows:
            ratio = f"{result.variant.percent} %"
            labels[result.variant.name] = ratio if len(methods) == 1 else f"{ratio}, {method}"
    return labels


def _method(variant: Variant, merged: Sequence[Result]) -> str:
    alike = [r.variant.settings for r in merged if r.variant.kind == variant.kind]
    varied = [
        f"{name} {value}"
        for name, value in variant.settings.items()
        if name != "ratio" and any(settings.get(name) != value for settings in alike)
    ]
    if varied and len({result.variant.kind for result in merged}) == 1:
        return ", ".join(varied)
    return ", ".join(["tomesd 0.1.3" if variant.kind == "original" else "tomesd", *varied])
