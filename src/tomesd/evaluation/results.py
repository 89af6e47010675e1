"""From the scores of images to the rows of a table."""

import json
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch

from .metrics import (
    CONFIDENCE,
    FID_RESAMPLES,
    RESAMPLES,
    Array,
    Estimate,
    fid_estimate,
    kid_estimate,
    mean_estimate,
    speedup_estimate,
)
from .progress import Progress
from .runs import Definition, Run, read_json_lines, write_json_lines, write_text
from .scoring import Arrays, Reference, read_scores, wanted_keys
from .variants import UNMERGED, Variant

__all__ = ["Result", "read_results", "write_results"]

Record = dict[str, Any]


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
    """psnr, ssim, lpips, clip; fid and kid to the reference; fid_unmerged and kid_unmerged."""

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Result":
        row = dict(row)
        row["variant"] = Variant(**row["variant"])
        row["speedup"] = None if row["speedup"] is None else Estimate(**row["speedup"])
        row["metrics"] = {name: Estimate(**values) for name, values in row["metrics"].items()}
        return cls(**row)


def read_results(run: Run) -> tuple[list[Result], list[Record], dict[str, Any]]:
    """The rows, the images, and what they were scored with."""
    rows = [Result.from_json(row) for row in read_json_lines(run.path / "results.jsonl")]
    images = read_json_lines(run.path / "images.jsonl")
    about = json.loads((run.path / "scoring.json").read_text(encoding="utf-8"))
    return rows, images, about


def write_results(
    run: Run,
    definition: Definition,
    keys: dict[str, str],
    reference: Reference | None,
    progress: Progress,
    device: torch.device | str = "cpu",
) -> list[Result]:
    """Makes the table of a run whose images are all made and scored. Needs no network.

    Args:
        keys: as `Judges` has them.
        device: where FID and KID are worked out.
    """
    records = run.records()
    base_times = _times(records, UNMERGED, definition.batch)
    real = unmerged = None
    if "features" in keys:
        features = {"features": keys["features"]}
        if reference is not None:
            stored = read_scores(run, reference.name, len(reference.files), features)
            real = torch.from_numpy(stored["features"]).to(device)
        stored = read_scores(run, UNMERGED.name, len(definition.items), features)
        unmerged = torch.from_numpy(stored["features"]).to(device)
    rows, images = [], []
    progress.start(len(definition.variants))
    for number, variant in enumerate(definition.variants):
        progress.update(f"intervals of {variant.name}", number)
        wanted = wanted_keys(keys, variant)
        scores = read_scores(run, variant.name, len(definition.items), wanted)
        of_variant = {i: r for (name, i), r in records.items() if name == variant.name}
        metrics = _metrics(variant, scores, unmerged, real)
        times = _times(records, variant, definition.batch)
        rows.append(_result(variant, definition, metrics, of_variant, times, base_times))
        images += _image_rows(variant, definition, scores, of_variant)
    write_json_lines(run.path / "images.jsonl", images)
    write_text(run.path / "scoring.json", json.dumps(_about(keys, reference), indent=1) + "\n")
    write_json_lines(run.path / "results.jsonl", [asdict(row) for row in rows])
    return rows


def _metrics(
    variant: Variant,
    scores: Arrays,
    unmerged: torch.Tensor | None,
    real: torch.Tensor | None,
) -> dict[str, Estimate]:
    metrics: dict[str, Estimate] = {
        name: mean_estimate(scores[name])
        for name in ("psnr", "ssim", "lpips", "clip")
        if name in scores
    }
    if unmerged is None or len(unmerged) < 2:
        return metrics
    features = torch.from_numpy(scores["features"]).to(unmerged.device)
    if real is not None:
        metrics["fid"] = fid_estimate(features, real)
        metrics["kid"] = kid_estimate(features, real)
    if variant.kind != "unmerged":
        metrics["fid_unmerged"] = fid_estimate(features, unmerged, paired=True)
        metrics["kid_unmerged"] = kid_estimate(features, unmerged, paired=True)
    return metrics


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
    if both and variant.kind != "unmerged":
        speedup = speedup_estimate(_array(base_times, both), _array(times, both))
    peaks = [record["peak_mib"] / record["images"] for record in records.values()]
    return Result(
        variant=variant,
        images=len(definition.items),
        seconds=float(np.median(_array(times, sorted(times)))) if times else None,
        speedup=speedup,
        peak_mib=max(peaks) if peaks else None,
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


def _about(keys: dict[str, str], reference: Reference | None) -> dict[str, Any]:
    versions = {}
    for name in ("numpy", "scipy", "torchmetrics", "pillow"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return {
        "networks": {name: keys[name] for name in ("features", "lpips", "clip") if name in keys},
        "reference": None
        if reference is None
        else {"name": reference.name, "images": len(reference.files)},
        "confidence": CONFIDENCE,
        "resamples": {"means and KID": RESAMPLES, "FID": FID_RESAMPLES},
        "versions": versions,
    }
