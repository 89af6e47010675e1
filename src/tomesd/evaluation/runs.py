"""A run on disk: what was asked for, the images made so far, and what is left to do.

run.json                       what was asked for
images/VARIANT/00012.png       written in one go, each with all it takes to make it again
records/process-0.jsonl        a line per image, as it is made: seconds, memory
scores/VARIANT/00000.npz       metrics and features of a block of images
images.jsonl, results.jsonl    per image and per variant, written at the end
"""

import json
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..files import append_json_line, read_json_lines, write_text
from ..generation import Sampling
from ..generation.loading import denoiser
from ..machine import cpu_name
from .prompts import Item
from .variants import Variant

FORMAT = 1
Record = dict[str, Any]


@dataclass(frozen=True)
class Definition:
    """All that decides what the images of a run look like, and what their times mean."""

    model: dict[str, Any]
    sampling: Sampling
    prompts: str
    """Where they are from."""
    items: tuple[Item, ...]
    batch: int
    variants: tuple[Variant, ...]
    device: str
    versions: dict[str, str]
    dtype: str = ""
    started: str = ""
    """Date and time."""
    command: str = ""
    """The line that started it, if a command did."""

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **json.loads(json.dumps(asdict(self)))}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Definition":
        values = dict(values)
        if values.pop("format", None) != FORMAT:
            raise ValueError(f"a run of another version of the format (not {FORMAT})")
        values["sampling"] = Sampling(**values["sampling"])
        values["items"] = tuple(Item(**item) for item in values["items"])
        values["variants"] = tuple(Variant(**variant) for variant in values["variants"])
        return cls(**values)

    def batches(self) -> list[tuple[Item, ...]]:
        """Fixed once and for all: the same whoever makes them, and after an interruption."""
        starts = range(0, len(self.items), self.batch)
        return [self.items[start : start + self.batch] for start in starts]


@dataclass(frozen=True)
class Task:
    """One batch of one variant, with images missing."""

    batch: int
    """Its number."""
    variant: Variant
    items: tuple[Item, ...]
    """All of the batch."""
    missing: tuple[Item, ...]


class Run:
    """The folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def definition_path(self) -> Path:
        return self.path / "run.json"

    def load(self) -> Definition:
        if not self.definition_path.is_file():
            raise ValueError(f"{self.path} is not the folder of an evaluation: no run.json in it")
        try:
            return Definition.from_json(json.loads(self.definition_path.read_text()))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.definition_path} cannot be read: {error}") from error

    def open(self, wanted: Definition, *, extend: bool = False) -> Definition:
        """Starts the run or takes it up again; returns it with the variants that it had before.

        Args:
            extend: allow variants that the run did not have. Nothing else may differ, ever.
        """
        if not self.definition_path.exists():
            if self.path.exists() and any(self.path.iterdir()):
                raise ValueError(f"{self.path} is not empty, and not the folder of an evaluation")
            self._write(wanted)
            return wanted
        before = self.load()
        _refuse_changes(self.path, before, wanted)
        names = {variant.name for variant in before.variants}
        added = [variant for variant in wanted.variants if variant.name not in names]
        if added and not extend:
            raise ValueError(
                f"{self.path} was started without {', '.join(v.name for v in added)}: "
                "take another folder, or add them with --extend"
            )
        if added:
            before = replace(before, variants=(*before.variants, *added))
            self._write(before)
        return before

    def _write(self, definition: Definition) -> None:
        write_text(self.definition_path, json.dumps(definition.to_json(), indent=1) + "\n")

    def image_path(self, variant: Variant, index: int) -> Path:
        return self.path / "images" / variant.name / f"{index:05d}.png"

    def missing(self, definition: Definition) -> list[Task]:
        """What is left to do: batch by batch, all variants of one before the next."""
        folders = [self.path / "images" / variant.name for variant in definition.variants]
        there = {path for folder in folders if folder.is_dir() for path in folder.iterdir()}
        tasks = []
        for number, items in enumerate(definition.batches()):
            for variant in definition.variants:
                missing = [i for i in items if self.image_path(variant, i.index) not in there]
                if missing:
                    tasks.append(Task(number, variant, items, tuple(missing)))
        return tasks

    def add_record(self, rank: int, record: Record) -> None:
        append_json_line(self.path / "records" / f"process-{rank}.jsonl", record)

    def records(self) -> dict[tuple[str, int], Record]:
        """By variant and index. An image that a crash left without a line has none here."""
        found = {}
        for path in sorted((self.path / "records").glob("process-*.jsonl")):
            for record in read_json_lines(path):
                found[record["variant"], record["index"]] = record
        return found


def _refuse_changes(path: Path, before: Definition, wanted: Definition) -> None:
    """Images of different models, prompts or libraries must not end up in one table."""
    old, new = before.to_json(), wanted.to_json()
    for name in ("model", "sampling", "versions"):
        for key in old[name].keys() | new[name].keys():
            _refuse(path, key, old[name].get(key), new[name].get(key))
    for key in ("batch", "device", "dtype"):
        _refuse(path, key, old[key], new[key])
    _refuse(path, "number of images", len(old["items"]), len(new["items"]))
    for one, other in zip(old["items"], new["items"], strict=True):
        _refuse(path, f"image {one['index']}", one, other)
    known = {variant.name: variant.settings for variant in before.variants}
    for variant in wanted.variants:
        settings = known.get(variant.name, variant.settings)
        for key in settings.keys() | variant.settings.keys():
            was, now = settings.get(key), variant.settings.get(key)
            _refuse(path, f"{key} of {variant.name}", was, now)


def _refuse(path: Path, name: str, was: Any, now: Any) -> None:
    if was != now:
        raise ValueError(
            f"{path} was started with {name} = {was!r}, and this is {name} = {now!r}: take another "
            "folder, or give the options that it was started with"
        )


def describe_cpu() -> str:
    """The name of the processor, and how many threads are used of it."""
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def package_versions(*packages: str) -> dict[str, str]:
    """Versions of packages; "none" for those that are not installed."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def device_name(pipe: Any) -> str:
    device = denoiser(pipe).device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return describe_cpu() if device.type == "cpu" else str(device.type)


def versions() -> dict[str, str]:
    """Of what the images depend on."""
    return {"tomesd": __version__, **package_versions("torch", "diffusers", "transformers")}
