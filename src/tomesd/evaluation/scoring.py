"""Scores every image once, and keeps what the networks said.

Blocks of images are scored together and stored in one file each, so that confidence intervals,
reports and resumed runs need no network.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..files import whole_file
from ..generation.progress import OnProgress
from .metrics import METRICS, Pictures, QualityMetric, to_array, to_pixels
from .networks import ClipScore, Inception, Lpips, sha256
from .processes import Processes
from .runs import Definition, Run
from .variants import UNMERGED, Variant

BLOCK = 64
"""Images in one file."""
_AT_ONCE = 16
"""Images that the networks see together."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Judges:
    """The networks that score images. Those that are not there leave their metrics out."""

    device: torch.device
    networks: dict[str, Any]
    """By the names that metrics ask for them by."""
    tags: dict[str, str]
    """What tells the weights of each network apart: scores of different ones never mix."""

    @classmethod
    def load(
        cls,
        device: torch.device | str = "cpu",
        *,
        inception: Path | bool | None = True,
        lpips: str | None = "alex",
        lpips_weights: Path | None = None,
        clip: Path | None = None,
    ) -> "Judges":
        """
        Args:
            inception: True for the installed one, a file, or None.
            lpips: "alex", "vgg" or None.
            lpips_weights: a file instead of the installed one.
            clip: folder of a CLIP model.
        """
        place = torch.device(device)
        networks: dict[str, Any] = {}
        tags: dict[str, str] = {}
        if inception:
            path = inception if isinstance(inception, Path) else None
            networks["inception"] = Inception(path).to(place)
            tags["inception"] = "" if path is None else _tag(path)
        if lpips is not None:
            networks["lpips"] = Lpips(lpips, lpips_weights).to(place)  # type: ignore[arg-type]
            tags["lpips"] = f"-{lpips}" + ("" if lpips_weights is None else _tag(lpips_weights))
        if clip is not None:
            networks["clip"] = ClipScore(clip, place)
            tags["clip"] = _tag(*sorted(clip.glob("*.safetensors")))
        return cls(place, networks, tags)

    @property
    def metrics(self) -> list[QualityMetric]:
        return [m for m in METRICS if m.network is None or m.network in self.networks]


def _tag(*paths: Path) -> str:
    return f"-{sha256(*paths)[:12]}"


@dataclass(frozen=True)
class Reference:
    """A folder of real images to compare sets with."""

    files: tuple[Path, ...]
    name: str
    """Tells folders apart, and a folder from what it was before."""

    @classmethod
    def of(cls, folder: Path) -> "Reference":
        endings = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
        there = folder.rglob("*") if folder.is_dir() else ()
        files = sorted(path for path in there if path.suffix.lower() in endings)
        if len(files) < 2:
            raise ValueError(f"reference={str(folder)!r}: needs to be a folder of images")
        listing = "\n".join(f"{f.relative_to(folder)} {f.stat().st_size}" for f in files)
        digest = hashlib.sha256(listing.encode()).hexdigest()[:12]
        return cls(tuple(files), f"reference-{digest}")


@dataclass(frozen=True)
class ImageSet:
    """The images of a variant or of a reference, and the metrics that need their scores."""

    name: str
    files: Sequence[Path]
    metrics: Sequence[QualityMetric]
    prompts: Sequence[str] = ()
    unmerged: Sequence[Path] = ()
    at_once: int = _AT_ONCE

    @classmethod
    def of_variant(
        cls, run: Run, definition: Definition, variant: Variant, judges: Judges
    ) -> "ImageSet":
        """Unmerged images are not compared with themselves."""
        is_merged = variant.kind != UNMERGED.kind
        paths = [
            [run.image_path(v, i.index) for i in definition.items] for v in (variant, UNMERGED)
        ]
        prompts = [item.prompt for item in definition.items]
        metrics = [metric for metric in judges.metrics if is_merged or not metric.of_pairs]
        return cls(variant.name, paths[0], metrics, prompts, paths[1] if is_merged else ())

    @classmethod
    def of_reference(cls, reference: Reference, judges: Judges) -> "ImageSet":
        """Scored one by one, for its images may differ in size."""
        metrics = [metric for metric in judges.metrics if metric.distance is not None]
        return cls(reference.name, reference.files, metrics, at_once=1)

    def arrays(self, judges: Judges) -> dict[str, QualityMetric]:
        """The arrays that are wanted, by their names in files, and a metric that gives each."""
        return {m.array + judges.tags.get(m.network or "", ""): m for m in self.metrics}

    def load(self, start: int, stop: int, device: torch.device) -> Pictures:
        pixels = _open_all(self.files[start:stop], device)
        unmerged = _open_all(self.unmerged[start:stop], device) if self.unmerged else None
        return Pictures(pixels, unmerged, self.prompts[start:stop])


def score(
    run: Run,
    sets: Sequence[ImageSet],
    judges: Judges,
    processes: Processes,
    on_progress: OnProgress,
) -> None:
    """Scores what has not been scored with these judges; every process its share."""
    blocks = [
        (number, start)
        for number, images in enumerate(sets)
        for start in range(0, len(images.files), BLOCK)
        if processes.is_main and _lacking(run, images, start, judges)
    ]
    blocks = processes.from_main(blocks)[processes.rank :: processes.count]
    total = sum(len(sets[number].files[start : start + BLOCK]) for number, start in blocks)
    done = 0
    for number, start in blocks:
        images = sets[number]
        lacking = _lacking(run, images, start, judges)
        stop = min(start + BLOCK, len(images.files))
        parts: list[Arrays] = []
        for first in range(start, stop, images.at_once):
            on_progress(f"scoring {images.name}", done, total)
            pictures = images.load(first, min(first + images.at_once, stop), judges.device)
            scores = {
                name: to_array(metric.score(pictures, judges.networks.get(metric.network or "")))
                for name, metric in lacking.items()
            }
            parts.append(scores)
            done += len(pictures.pixels)
        _add_arrays(_score_path(run, images, start), _joined(parts))


def read_scores(run: Run, images: ImageSet, judges: Judges) -> Arrays:
    """Arrays of all images, `[n, ...]`, by the names that metrics have for them."""
    if not images.metrics:
        return {}
    parts = []
    for start in range(0, len(images.files), BLOCK):
        with np.load(_score_path(run, images, start)) as stored:
            wanted = images.arrays(judges).items()
            parts.append({metric.array: stored[name] for name, metric in wanted})
    return _joined(parts)


def _score_path(run: Run, images: ImageSet, start: int) -> Path:
    return run.path / "scores" / images.name / f"{start:05d}.npz"


def _lacking(run: Run, images: ImageSet, start: int, judges: Judges) -> dict[str, QualityMetric]:
    """The arrays that a block has not been given yet."""
    path, wanted = _score_path(run, images, start), images.arrays(judges)
    if not path.is_file():
        return wanted
    with np.load(path) as stored:
        return {name: metric for name, metric in wanted.items() if name not in stored}


def _add_arrays(path: Path, arrays: Arrays) -> None:
    """Adds to what the file has."""
    if path.is_file():
        with np.load(path) as stored:
            arrays = {**stored, **arrays}
    with whole_file(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _joined(parts: Sequence[Arrays]) -> Arrays:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _open_all(paths: Sequence[Path], device: torch.device) -> Tensor:
    """`[B, 3, H, W]` of uint8."""
    with ThreadPoolExecutor() as pool:
        return to_pixels(list(pool.map(open_image, paths)), device)


def open_image(path: Path) -> Image.Image:
    try:
        return Image.open(path).convert("RGB")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
