"""Scores every image once, and keeps what the networks said.

Blocks of images are scored together and stored in one file each, so that confidence intervals,
reports and resumed runs need no network.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from .clip import ClipScore
from .metrics import paired_scores
from .networks import Inception, Lpips
from .processes import Processes
from .progress import Progress
from .prompts import Item
from .runs import Definition, Run
from .variants import UNMERGED, Variant

__all__ = [
    "Judges",
    "Reference",
    "read_scores",
    "score_images",
    "score_reference",
    "wanted_keys",
]

BLOCK = 64
"""Images in one file."""
_AT_ONCE = 16
"""Images that the networks see together."""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Judges:
    """The networks that score images; None leaves their metrics out.

    Made by `load`, which names each after its weights: scores of different networks never mix.
    """

    device: torch.device
    inception: Inception | None
    lpips: Lpips | None
    clip: ClipScore | None
    keys: dict[str, str]
    """Metric to what its array is called in the files."""

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
        keys = {"psnr": "psnr", "ssim": "ssim"}
        network = judge = text = None
        if inception:
            path = inception if isinstance(inception, Path) else None
            network = Inception(path).to(place)
            keys["features"] = "features" if path is None else f"features-{_digest(path)}"
        if lpips is not None:
            judge = Lpips(lpips, lpips_weights).to(place)  # type: ignore[arg-type]
            given = "" if lpips_weights is None else f"-{_digest(lpips_weights)}"
            keys["lpips"] = f"lpips-{lpips}{given}"
        if clip is not None:
            text = ClipScore(clip, place)
            keys["clip"] = f"clip-{_digest(*sorted(clip.glob('*.safetensors')))}"
        return cls(place, network, judge, text, keys)


def wanted_keys(keys: dict[str, str], variant: Variant) -> dict[str, str]:
    """Those of the scores that images of a variant have: the unmerged ones are no pairs."""
    paired = ("psnr", "ssim", "lpips")
    return {m: key for m, key in keys.items() if variant.kind != "unmerged" or m not in paired}


@dataclass(frozen=True)
class Reference:
    """A folder of real images to compare sets with."""

    files: tuple[Path, ...]
    name: str
    """Tells folders apart, and a folder from what it was before."""

    @classmethod
    def of(cls, folder: Path) -> "Reference":
        endings = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
        files = (
            sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings)
            if folder.is_dir()
            else []
        )
        if len(files) < 2:
            raise ValueError(f"reference={str(folder)!r}: needs to be a folder of images")
        listing = "\n".join(f"{f.relative_to(folder)} {f.stat().st_size}" for f in files)
        digest = hashlib.sha256(listing.encode()).hexdigest()[:12]
        return cls(tuple(files), f"reference-{digest}")


def score_images(
    run: Run,
    definition: Definition,
    judges: Judges,
    processes: Processes,
    progress: Progress,
) -> None:
    """Scores what has not been scored with these judges; every process its share."""
    blocks = [
        (place, start)
        for place, variant in enumerate(definition.variants)
        for start in range(0, len(definition.items), BLOCK)
        if processes.is_main
        and _lacking(_score_path(run, variant.name, start), wanted_keys(judges.keys, variant))
    ]
    blocks = processes.from_main(blocks)[processes.rank :: processes.count]
    progress.start(sum(len(definition.items[start : start + BLOCK]) for _, start in blocks))
    done = 0
    for place, start in blocks:
        variant, items = definition.variants[place], definition.items[start : start + BLOCK]
        path = _score_path(run, variant.name, start)
        lacking = _lacking(path, wanted_keys(judges.keys, variant))
        parts = []
        for few in _pieces(items):
            progress.update(f"scoring {variant.name}", done)
            parts.append(_score(run, variant, few, judges, lacking))
            done += len(few)
        _add_arrays(path, _joined(parts))


def score_reference(
    run: Run,
    reference: Reference,
    judges: Judges,
    processes: Processes,
    progress: Progress,
) -> None:
    """Stores the features of a reference folder beside those of the run's images."""
    assert judges.inception is not None
    wanted = {"features": judges.keys["features"]}
    starts = [
        start
        for start in range(0, len(reference.files), BLOCK)
        if processes.is_main and _lacking(_score_path(run, reference.name, start), wanted)
    ]
    starts = processes.from_main(starts)[processes.rank :: processes.count]
    progress.start(sum(len(reference.files[start : start + BLOCK]) for start in starts))
    done = 0
    for start in starts:
        features = []
        for file in reference.files[start : start + BLOCK]:
            # One by one, for they may differ in size.
            pixels = _pixels([_open(file)], judges.device)
            features.append(judges.inception(pixels).cpu().numpy())
            done += 1
            progress.update("scoring the reference", done)
        _add_arrays(
            _score_path(run, reference.name, start), {wanted["features"]: np.concatenate(features)}
        )


def read_scores(run: Run, name: str, count: int, keys: dict[str, str]) -> Arrays:
    """Metric to `[count, ...]`, of a variant or a reference."""
    if not keys:
        return {}
    parts = []
    for start in range(0, count, BLOCK):
        with np.load(_score_path(run, name, start)) as stored:
            parts.append({metric: stored[key] for metric, key in keys.items()})
    return _joined(parts)


def _score(
    run: Run, variant: Variant, items: Sequence[Item], judges: Judges, lacking: dict[str, str]
) -> Arrays:
    images = _open_all([run.image_path(variant, item.index) for item in items])
    pixels = _pixels(images, judges.device)
    scores: Arrays = {}
    if "psnr" in lacking or "lpips" in lacking:
        base = _open_all([run.image_path(UNMERGED, item.index) for item in items])
        lpips = judges.lpips if "lpips" in lacking else None
        scores |= paired_scores(pixels, _pixels(base, judges.device), lpips)
    if "features" in lacking:
        assert judges.inception is not None
        scores["features"] = judges.inception(pixels).cpu().numpy()
    if "clip" in lacking:
        assert judges.clip is not None
        scores["clip"] = judges.clip(images, [item.prompt for item in items])
    return {judges.keys[metric]: values for metric, values in scores.items()}


def _score_path(run: Run, name: str, start: int) -> Path:
    return run.path / "scores" / name / f"{start:05d}.npz"


def _lacking(path: Path, wanted: dict[str, str]) -> dict[str, str]:
    if not path.is_file():
        return wanted
    with np.load(path) as stored:
        return {metric: key for metric, key in wanted.items() if key not in stored}


def _add_arrays(path: Path, arrays: Arrays) -> None:
    """Adds to what the file has, in one go."""
    if path.is_file():
        with np.load(path) as stored:
            arrays = {**stored, **arrays}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    os.replace(part, path)


def _joined(parts: Sequence[Arrays]) -> Arrays:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _pieces(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), _AT_ONCE):
        yield items[start : start + _AT_ONCE]


def _open(path: Path) -> Image.Image:
    try:
        return Image.open(path).convert("RGB")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


def _open_all(paths: Sequence[Path]) -> list[Image.Image]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_open, paths))


def _pixels(images: Sequence[Image.Image], device: torch.device) -> torch.Tensor:
    """`[B, 3, H, W]` of uint8."""
    pixels = torch.stack([torch.from_numpy(np.array(image)) for image in images])
    return pixels.permute(0, 3, 1, 2).to(device)


def _digest(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
