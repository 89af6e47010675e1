"""Inputs of the nodes, made from the options of tomesd, and options from the values of inputs."""

import ast
import hashlib
import inspect
import textwrap
from pathlib import Path
from typing import Any, get_args, get_type_hints

import folder_paths

import tomesd
from tomesd.presets import Preset

__all__ = [
    "AUTO",
    "INPUTS",
    "MORE_INPUTS",
    "SETTINGS",
    "fingerprint",
    "load",
    "options",
    "settings_files",
]

AUTO = "auto"
"""The choice in a list that leaves an option out. For numbers, -1 (any below 0) does that."""
SETTINGS = "TOMESD_SETTINGS"
"""The type of links that pass options between nodes."""

# ComfyUI saves inputs by their position in these lists: append only.
_MAIN = ("ratio", "start", "end", "target", "when")
_MORE = (
    *("selector", "metric", "share", "refresh", "window", "sx", "sy", "st", "use_rand"),
    *("max_downsample", "merge_attn", "merge_crossattn", "merge_mlp", "proportional"),
    *("reference_ratio", "schedule", "ratio_end", "tau", "protect", "protect_share"),
    *("depth_from", "depth_to", "backend", "reuse", "reuse_start", "reuse_within", "extrapolate"),
    *("reuse_end", "reuse_attention"),
)
_DEPTH = ("depth_from", "depth_to")
_YES_NO = ("yes", "no")
_PRESET = (
    "Settings with measured speed and quality. They skip parts of some steps. Options that are set "
    "take precedence."
)

Input = tuple[Any, dict[str, Any]]
"""An input as ComfyUI declares it: a type or a list of choices, and further properties."""


def _inputs(names: tuple[str, ...]) -> dict[str, Input]:
    documentation = _documentation()
    return {name: _input(name, documentation) for name in names}


def _input(name: str, documentation: dict[str, str]) -> Input:
    field = "depth" if name in _DEPTH else name
    about: dict[str, Any] = {"tooltip": documentation[field].replace("`None`", AUTO)}
    hint = get_type_hints(tomesd.Settings)[field]
    kinds = get_args(hint) or (hint,)
    words = [word for kind in kinds for word in (get_args(kind) or (kind,)) if _is_word(word)]
    if bool in kinds:
        words = [*_YES_NO]
    if words:
        return _choices(words, **about)
    about["tooltip"] += f" -1: {AUTO}."
    if int in kinds:
        return "INT", {"default": -1, "min": -1, "max": 4096, **about}
    return "FLOAT", {"default": -1.0, "min": -1.0, "max": 1.0, "step": 0.05, **about}


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value != AUTO


def _choices(words: list[str], unset: str = AUTO, **about: Any) -> Input:
    return [unset, *words], {"default": unset, **about}


def _documentation() -> dict[str, str]:
    """The docstrings of the fields of `tomesd.Settings`, by name."""
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(tomesd.Settings))).body
    assert isinstance(cls, ast.ClassDef)
    found = {}
    for field, below in zip(cls.body, cls.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


# Made on import, not when ComfyUI asks for them on some thread: the parser of Python 3.11 is not
# thread-safe.
INPUTS = {"preset": _choices([*get_args(Preset)], "none", tooltip=_PRESET), **_inputs(_MAIN)}
"""The inputs for the options that matter most, by name."""
MORE_INPUTS = _inputs(_MORE)
"""The inputs for all other options."""


def options(
    settings: dict[str, Any] | None = None, mask: Any = None, **given: Any
) -> dict[str, Any]:
    """Options for `tomesd.Settings`, from the inputs of a node.

    Args:
        settings: options from another node.
        mask: where to merge last, `[b, h, w]`.
        given: the values of other inputs, which take precedence over `settings`.
    """
    made = dict(settings or {})
    made |= {name: _value(value) for name, value in given.items() if _is_given(value)}
    if any(end in made for end in _DEPTH):
        first, last = made.get("depth") or (0.0, 1.0)
        made["depth"] = (made.pop("depth_from", first), made.pop("depth_to", last))
    if mask is not None:
        made["protect"] = mask
    return made


def _is_given(value: Any) -> bool:
    return value != AUTO if isinstance(value, str) else value is not None and value >= 0


def _value(value: Any) -> Any:
    return value == "yes" if value in _YES_NO else value


def settings_files() -> list[str]:
    """The JSON files in ComfyUI's input folder."""
    folder = Path(folder_paths.get_input_directory())
    return sorted(path.name for path in folder.glob("*.json"))


def load(file: str) -> dict[str, Any]:
    return tomesd.load(folder_paths.get_annotated_filepath(file))


def fingerprint(file: str) -> str:
    """A hash of the content of a settings file."""
    content = Path(folder_paths.get_annotated_filepath(file)).read_bytes()
    return hashlib.sha256(content).hexdigest()
