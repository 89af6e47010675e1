"""The rows of an evaluation: no merging, a grid of settings, and tomesd 0.1.3 to compare with."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from types import ModuleType
from typing import Any, Literal

import torch

import tomesd

from ..generation.loading import denoiser
from ..generation.original import original_options
from ..presets import numbered
from ..settings import Settings


@dataclass(frozen=True)
class Variant:
    """One way to make all the images."""

    name: str
    """Of its folder."""
    kind: Literal["unmerged", "merged", "original"]
    settings: dict[str, Any]
    """Fields of `Settings`, or what the original is given. All can be written as JSON."""

    @property
    def ratio(self) -> float | None:
        """None for one that is not a number."""
        ratio = self.settings.get("ratio", 0)
        return float(ratio) if isinstance(ratio, int | float) else None

    @property
    def percent(self) -> str:
        """The share of tokens that is removed, in words."""
        return str(self.settings["ratio"]) if self.ratio is None else f"{100 * self.ratio:g}"

    @property
    def title(self) -> str:
        """The share of tokens that is removed; or what is done instead of removing any."""
        used = [name for name in ("coarse", "reuse") if self.settings.get(name)]
        if self.ratio == 0 and used:
            return ", ".join(f"{name} {self.settings[name]:g}" for name in used)
        return f"{self.percent} %"


_LONGEST_NAME = 100
UNMERGED = Variant("unmerged", "unmerged", {})


def parse_vary(words: Iterable[str]) -> dict[str, list[Any]]:
    """`["sx=2,4", "use_rand=true,false"]` to lists of values of settings.

    Values are read as JSON where they can be, and are words otherwise. A value with commas needs a
    JSON list around all values: `sx=[2, 4]`.
    """
    known = [field.name for field in fields(Settings)]
    lists: dict[str, list[Any]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known or not equals:
            raise ValueError(f"vary={word!r}: must be NAME=VALUE,VALUE,... with one of {known}")
        if name in lists:
            raise ValueError(f"vary={word!r}: {name} is given twice")
        whole = _value(values)
        lists[name] = whole if isinstance(whole, list) else [_value(v) for v in values.split(",")]
        if not lists[name]:
            raise ValueError(f"vary={word!r}: has no values")
    return lists


def _value(words: str) -> Any:
    words = words.strip()
    python = {"None": None, "none": None, "True": True, "False": False}
    if words in python:
        return python[words]
    try:
        return json.loads(words)
    except json.JSONDecodeError:
        return words


def make_variants(
    ratios: Sequence[float] = (0.25, 0.5, 0.75),
    base: Settings | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    original: ModuleType | None = None,
) -> list[Variant]:
    """No merging, then every combination of the ratios and of the values of the fields in `vary`.

    Args:
        base: the fields that stay.
        vary: lists of values of any fields of `Settings`.
        original: tomesd 0.1.3. Adds a row for each combination as far as it knows the fields.
    """
    base = base or Settings()
    lists: dict[str, Sequence[Any]] = {"ratio": ratios, **(vary or {})}
    if not all(lists.values()):
        raise ValueError("ratios: there must be at least one")
    merged, originals = [], []
    for values in itertools.product(*lists.values()):
        varied = dict(zip(lists, values, strict=True))
        settings = replace(base, **varied)
        merged.append(Variant(_name("", varied), "merged", _plain(asdict(settings))))
        if original is not None:
            originals.append(_original_variant(original, settings, varied))
    # What differs can be one to the original, which knows fewer settings.
    return [UNMERGED, *_distinct(originals), *_distinct(merged)]


def _distinct(variants: list[Variant]) -> list[Variant]:
    """Each once, and no two of one name."""
    distinct: dict[str, Variant] = {}
    for variant in variants:
        settings = json.dumps(variant.settings, sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        same_name = distinct.get(variant.name, variant)
        if same_name != variant or len(variant.name) > _LONGEST_NAME:
            variant = replace(variant, name=f"{variant.name[:_LONGEST_NAME]}-{digest}")
        distinct[variant.name] = variant
    return list(distinct.values())


def _original_variant(original: ModuleType, settings: Settings, varied: dict[str, Any]) -> Variant:
    taken = original_options(original, settings).items()
    given = {name: value for name, value in taken if value is not None}
    name = _name("original-", {key: value for key, value in varied.items() if key in given})
    return Variant(name, "original", _plain(given))


def _name(prefix: str, varied: Mapping[str, Any]) -> str:
    """A folder name that tells the values apart."""
    words = "_".join(
        f"{key}-{value:g}" if isinstance(value, float) else f"{key}-{value}"
        for key, value in varied.items()
    )
    return prefix + re.sub(r"[^A-Za-z0-9._-]+", "-", words).strip("-")


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from JSON."""
    for name, value in settings.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(
                f"{name}={value!r}: an evaluation is written down, and this cannot be"
            ) from error
    return dict(json.loads(json.dumps(settings)))


@contextmanager
def patched_with(pipe: Any, variant: Variant, original: ModuleType | None = None) -> Iterator[None]:
    """`pipe` merges as the variant says, for the time of a `with` block."""
    if variant.kind == "unmerged":
        yield
    elif variant.kind == "merged":
        settings = {name: numbered(value) for name, value in variant.settings.items()}
        with tomesd.patched(pipe, **settings):
            yield
    elif original is None:
        raise ValueError(f"{variant.name}: needs the folder of tomesd 0.1.3; give --original")
    else:
        model = denoiser(pipe)
        # It forks the global generators when it first runs: same state, same draws.
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            original.apply_patch(pipe, **variant.settings)
            try:
                yield
            finally:
                original.remove_patch(pipe)
                for module in model.modules():
                    module.__dict__.pop("_tome_info", None)  # left behind by it
