"""Inputs of the nodes from the options of tomesd, and options from what inputs are set to."""

import ast
import hashlib
import inspect
import textwrap
from pathlib import Path
from typing import Any, get_args, get_type_hints

import folder_paths

import tomesd
from tomesd.presets import PRESETS

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
"""Of a list: the option is not given. Of numbers, -1 and all below 0 say that."""
SETTINGS = "TOMESD_SETTINGS"
"""The type of options on their way from node to node."""

# ComfyUI saves inputs by their place in these lists: add to their ends only.
_MAIN = ("ratio", "start", "end", "target", "when")
_MORE = (
    *("selector", "metric", "share", "refresh", "window", "sx", "sy", "st", "use_rand"),
    *("max_downsample", "merge_attn", "merge_crossattn", "merge_mlp", "proportional"),
    *("reference_ratio", "schedule", "ratio_end", "tau", "protect", "protect_share"),
    *("depth_from", "depth_to", "backend", "reuse", "reuse_start", "reuse_within", "extrapolate"),
    "reuse_end",
)
_DEPTH = ("depth_from", "depth_to")
_YES_NO = ("yes", "no")
_PRESET = (
    "Settings that have been measured: UNets merge tokens, and transformers leave parts of steps "
    "out. What is set besides wins."
)

Input = tuple[Any, dict[str, Any]]
"""As ComfyUI has it: a type or a list of words, and what else is known."""


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


# Made here and not when ComfyUI asks, on any thread: the parser of Python 3.11 does not go with
# threads.
INPUTS = {"preset": _choices([*PRESETS], "none", tooltip=_PRESET), **_inputs(_MAIN)}
"""Inputs of a node for the options that matter most, by name."""
MORE_INPUTS = _inputs(_MORE)
"""The same for all others."""


def options(
    settings: dict[str, Any] | None = None, mask: Any = None, **given: Any
) -> dict[str, Any]:
    """Options for `tomesd.Settings`, from what the inputs of a node are set to.

    Args:
        settings: from another node.
        mask: where to merge last, `[b, h, w]`.
        given: what inputs are set to; they win over settings.
    """
    made = dict(settings or {})
    made |= {name: _value(value) for name, value in given.items() if _is_given(value)}
    if any(end in made for end in _DEPTH):
        made["depth"] = (made.pop("depth_from", 0.0), made.pop("depth_to", 1.0))
    if mask is not None:
        made["protect"] = mask
    return made


def _is_given(value: Any) -> bool:
    return value != AUTO if isinstance(value, str) else value is not None and value >= 0


def _value(value: Any) -> Any:
    return value == "yes" if value in _YES_NO else value


def settings_files() -> list[str]:
    """The settings files in ComfyUI's folder for inputs."""
    folder = Path(folder_paths.get_input_directory())
    return sorted(path.name for path in folder.glob("*.json"))


def load(file: str) -> dict[str, Any]:
    return tomesd.load(folder_paths.get_annotated_filepath(file))


def fingerprint(file: str) -> str:
    """Differs when what is in the file does."""
    content = Path(folder_paths.get_annotated_filepath(file)).read_bytes()
    return hashlib.sha256(content).hexdigest()
