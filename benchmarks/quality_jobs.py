"""Which images quality.py makes, each once, and how processes share that work."""

import argparse
import fcntl
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import quality_settings
import torch
from quality_sampling import Images
from quality_settings import UNMERGED, Candidate, unmerged

from tomesd.bench.rows import IDENTITY, Row, read_rows


@dataclass(frozen=True)
class Section:
    """How the images of a section are made."""

    name: str
    images: int
    steps: int
    scheduler: str
    candidates: list[Candidate]
    other_seeds: bool = False
    """Whether there is a second unmerged set, of other seeds, to take the distance to."""

    def place(self, candidate: Candidate) -> int:
        """In the table: processes that share the work make rows in no such order."""
        return 0 if candidate.variant == UNMERGED else 1 + self.candidates.index(candidate)


def section(name: str, args: argparse.Namespace, pipe: Any) -> Section:
    if name == "search":
        return Section(name, args.few, args.search_steps, "ddim", quality_settings.search())
    many = name in ("paper", "windows", "front")
    lists: dict[str, Callable[[], list[Candidate]]] = {
        "paper": quality_settings.paper,
        "windows": quality_settings.windows,
        "far": quality_settings.far,
        "ablations": quality_settings.ablations,
        "seed": lambda: quality_settings.seed(threshold(pipe, 0.4)),
        "front": lambda: quality_settings.front(args.front),
    }
    count = args.images if many else args.few
    return Section(name, count, args.steps, "plms", lists[name](), many and args.other_seeds)


def threshold(pipe: Any, share: float) -> float:
    """The noise level below which so many of the steps lie."""
    kept = pipe.scheduler.alphas_cumprod
    return round(1 - float(kept[round(share * (len(kept) - 1))]), 3)


@dataclass
class Job:
    """Images that are made once, for all rows of them: fewer images are the first of more."""

    rows: list[tuple[Section, Candidate]] = field(default_factory=list)

    @property
    def candidate(self) -> Candidate:
        return self.rows[0][1]

    @property
    def largest(self) -> Section:
        return max((of for of, _ in self.rows), key=lambda of: of.images)


def jobs(sections: Iterable[Section]) -> list[Job]:
    """Rows of the same settings and solver come from one job, whatever they are called."""
    found: dict[str, Job] = {}
    for of in sections:
        for candidate in [unmerged(), *of.candidates]:
            key = json.dumps([same_images(candidate), of.steps, of.scheduler])
            found.setdefault(key, Job()).rows.append((of, candidate))
    return list(found.values())


def same_images(candidate: Candidate) -> str:
    """Equal for candidates that make the same images."""
    return json.dumps([candidate.variant, candidate.settings], sort_keys=True)


def of_part(found: list[Job], part: tuple[int, int]) -> list[Job]:
    """Job number K, K + N, ... of part K of N; what is unmerged belongs to the first part."""
    number, parts = part
    bases = [job for job in found if job.candidate.variant == UNMERGED]
    merged = [job for job in found if job.candidate.variant != UNMERGED]
    return (bases if number == 1 else []) + merged[number - 1 :: parts]


def part_of(text: str) -> tuple[int, int]:
    """The numbers in "K/N"."""
    try:
        number, parts = (int(word) for word in text.split("/"))
    except ValueError:
        number = parts = 0
    if not 1 <= number <= parts:
        raise argparse.ArgumentTypeError(f"{text!r}: must be K/N with K from 1 to N, like 1/3")
    return number, parts


def made_once(folder: Path, name: str, count: int, device: Any, make: Callable[[], Images]) -> Any:
    """At least `count` images out of a folder that processes share.

    The first process that asks makes them, and others that ask meanwhile wait for it. If it dies,
    the next one goes on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in sorted(folder.glob(f"{name}_*.pt")):
            if int(path.stem.rsplit("_", 1)[1]) >= count:
                return Images(**torch.load(path, map_location=device, weights_only=True))
        made = make()
        whole = folder / f"{name}_{count}.pt"
        torch.save(vars(made), whole.with_suffix(".part"))
        os.replace(whole.with_suffix(".part"), whole)
        return made


def identity(row: Row) -> str:
    """Equal for rows of the same measurement, whichever process or run made them."""
    return json.dumps([row.get(name) for name in IDENTITY], sort_keys=True)


def take_over(path: Path, done: Iterable[Path]) -> int:
    """Appends the rows of other files that `path` does not have yet; says how many."""
    for file in done:
        if not file.is_file():
            raise ValueError(f"done={str(file)!r}: no such file")
    known = {identity(row) for row in read_rows(path)}
    new = {identity(row): row for file in done for row in read_rows(file)}
    lines = [json.dumps(row) + "\n" for key, row in new.items() if key not in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)
    return len(lines)
