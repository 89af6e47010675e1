"""Settings by name, and settings in a file."""

import json
import numbers
import os
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

from .allowed import AnyTensor
from .files import write_text
from .settings import MergeWarning, Settings

FORMAT = 1

Preset = Literal["quality", "balanced", "fast"]

Kind = Literal["unet", "transformer"]

# On UNets and on transformers alike, leaving steps out keeps an image closer than merging tokens
# does, and is faster; a coarser image at first makes another one that is as good. See
# docs/quality.md.
PRESETS: dict[Kind, dict[str, dict[str, Any]]] = {
    "unet": {
        "quality": {"ratio": 0.0, "reuse": 2, "reuse_start": 0.5, "reuse_within": 0.15},
        "balanced": {"ratio": 0.0, "reuse": 2, "reuse_start": 0.25, "reuse_within": 0.15},
        "fast": {"ratio": 0.0, "reuse": 2, "reuse_within": 0.15},
    },
    "transformer": {
        "quality": {"ratio": 0.0, "reuse": 2, "reuse_start": 0.25, "reuse_within": 0.15},
        "balanced": {
            **{"ratio": 0.0, "depth": (0.0, 1.0)},
            **{"reuse": 2, "reuse_start": 0.2, "reuse_end": 8, "reuse_within": 0.22},
        },
        "fast": {
            **{"ratio": 0.0, "coarse": 0.35, "depth": (0.0, 1.0)},
            **{"reuse": 6, "reuse_start": 0.35, "reuse_within": 0.2},
        },
    },
}
WITHOUT_COARSE: dict[str, Any] = {"coarse": None, "reuse": 4, "reuse_start": 0.25}
"""What `fast` does instead on transformers that cannot be run on a coarser image."""

MERGING_PRESETS: dict[str, dict[str, Any]] = {
    "quality": {"target": "kv", "ratio": 0.5, "proportional": True},
    "balanced": {"target": "kv", "ratio": 0.75, "window": 8},
    "fast": {"target": "stack", "ratio": 0.5, "end": 0.7},
}
"""What presets do instead where no step can be left out: in UNets of one level, and in parts of
models."""

_RATIOS = {"ratio", "level_ratios", "schedule"}
"""Each of them makes tokens merge where a preset merges none."""

_OF_MERGING = {
    *("max_downsample", "sx", "sy", "st", "use_rand", "window", "share", "refresh"),
    *("merge_attn", "merge_crossattn", "merge_mlp", "proportional", "protect"),
    *("selector", "metric", "reference_ratio", "start", "end", "tau"),
}
"""Options that change nothing where no tokens merge."""

BEST: dict[Kind, Preset] = {"unet": "fast", "transformer": "balanced"}
"""The preset that `apply_patch` takes if no option is given, by kind of model."""


def preset(
    name: str, kind: Kind = "unet", *, coarse: bool = True, reuse: bool = True
) -> dict[str, Any]:
    """The options of a preset for a kind of model, as a dictionary of its own.

    Args:
        coarse: whether the model can be run on a coarser image.
        reuse: whether steps can be left out.
    """
    names = get_args(Preset)
    if name not in names:
        raise ValueError(f"preset={name!r}: must be one of {', '.join(map(repr, names))}")
    options = PRESETS[kind][name] if reuse else MERGING_PRESETS[name]
    return options | WITHOUT_COARSE if "coarse" in options and not coarse else dict(options)


def combined(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a preset or a file, and those that win over them.

    Options of `base` that make no sense beside the given ones are dropped: which steps to leave out
    if none is to be, and `reuse_end` if a larger `reuse` is given.
    """
    base, reuse = dict(base), given.get("reuse", ...)
    if reuse is None:
        base = {name: value for name, value in base.items() if not name.startswith("reuse")}
    elif isinstance(reuse, int) and reuse > base.get("reuse_end", reuse):
        del base["reuse_end"]
    if base.get("ratio") == 0 and given.keys().isdisjoint(_RATIOS):
        for name in _OF_MERGING & given.keys():
            if _differs(given[name], getattr(Settings, name)):
                warnings.warn(
                    f"{name}={given[name]!r} changes nothing: it says how to merge tokens, and the "
                    "preset or file beside it merges none; give a ratio too",
                    MergeWarning,
                    stacklevel=2,
                )
    return {**base, **given}


def changed(settings: Settings) -> dict[str, Any]:
    """The fields that differ from the defaults."""
    values = {
        field.name: (getattr(settings, field.name), field.default) for field in fields(Settings)
    }
    return {name: value for name, (value, default) in values.items() if _differs(value, default)}


def options_of(settings: Settings) -> dict[str, Any]:
    """Options of `apply_patch` that make these settings, as few as possible.

    The ratio is always one of them: without any option, `apply_patch` takes a preset.
    """
    return {"ratio": settings.ratio, **changed(settings)}


def _differs(value: Any, default: Any) -> bool:
    # A tensor compares number by number. No default is one.
    return value is not default and (isinstance(value, AnyTensor) or bool(value != default))


def save(
    path: str | os.PathLike[str], settings: Settings | Mapping[str, Any], **about: Any
) -> None:
    """Writes settings to a JSON file that `load` reads.

    Args:
        settings: a `Settings`, or options of `apply_patch`, which are checked.
        about: what else to write down, for people: it has no effect.
    """
    if not isinstance(settings, Settings):
        settings = _checked(dict(settings), "settings")
    options = {name: _plain(name, value) for name, value in options_of(settings).items()}
    content = {"format": FORMAT, "settings": options, "about": about}
    text = json.dumps(content, indent=1, default=str) + "\n"
    write_text(Path(path), text)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options in a file that `save` or `tomesd tune` wrote, checked.

    `tomesd.apply_patch(model, **tomesd.load("settings.json"))`
    """
    where = f"settings={str(path)!r}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not a JSON file ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
        raise ValueError(f"{where}: not a settings file: it has no {{...}} named 'settings'")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{where}: format {content.get('format')!r}, and this version reads format {FORMAT}"
        )
    options = {name: numbered(value) for name, value in content["settings"].items()}
    return options_of(_checked(options, where))


def _checked(options: dict[str, Any], where: str) -> Settings:
    known = [field.name for field in fields(Settings)]
    for name in options:
        if name not in known:
            raise ValueError(f"{where}: unknown option {name!r}; known are {', '.join(known)}")
    try:
        return Settings(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _plain(name: str, value: Any) -> Any:
    """As JSON has it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    kind = "a function" if callable(value) else f"a {type(value).__name__}"
    raise TypeError(f"{name}: {kind} cannot be saved in a file; only numbers and words can")


def numbered(value: Any) -> Any:
    """Keys of JSON are words; those that are numbers in the settings become numbers again."""
    if isinstance(value, dict):
        return {int(key) if key.isdecimal() else key: item for key, item in value.items()}
    return value
