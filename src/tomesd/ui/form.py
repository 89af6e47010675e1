"""The form with every option of `Settings`, made from its fields and their documentation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import docstring_parser
import gradio as gr

from ..settings import Settings

FIRST = ("ratio", "target", "end", "when")
"""The options that matter most, which are shown first."""

_DEFAULT = "default"
"""How a choice that is None is shown."""


@dataclass(frozen=True)
class Option:
    """A field of `Settings` in the form."""

    name: str
    doc: str
    kind: Literal["switch", "choice", "share", "int", "float", "list", "map"]
    choices: tuple[str, ...]
    default: Any

    def component(self, settings: Settings) -> gr.components.Component:
        about = {"label": self.name, "info": self.doc, "elem_id": f"option-{self.name}"}
        value = self.shown(getattr(settings, self.name))
        if self.kind == "switch":
            return gr.Checkbox(value, **about)
        if self.kind == "choice":
            none = [_DEFAULT] if self.default is None else []
            return gr.Dropdown([*none, *self.choices], value=value, **about)
        if self.kind == "share":
            return gr.Slider(0, 1, value, step=0.01, **about)
        if self.default is None:  # which a component for numbers would show as 0
            return gr.Textbox(value, placeholder=_DEFAULT, **about)
        return gr.Number(value, **about)

    def shown(self, value: Any) -> Any:
        """What the form shows for a value of the option."""
        if value is None:
            return _DEFAULT if self.kind == "choice" else ""
        if isinstance(value, Mapping):
            return ", ".join(f"{key}: {item:g}" for key, item in value.items())
        if isinstance(value, list | tuple):
            return ", ".join(_shown_item(item) for item in value)
        return value if self.default is not None or isinstance(value, str) else f"{value:g}"

    def read(self, value: Any) -> Any:
        """The value of the option, as far as what the form shows is one. `Settings` checks it."""
        if self.kind == "choice":
            return None if value == _DEFAULT else value
        if isinstance(value, str):
            value = _READ.get(self.kind, _number)(value) if value.strip() else None
        whole = self.kind == "int" and isinstance(value, float) and value.is_integer()
        return int(value) if whole else value


def read_form(values: Mapping[str, Any], **others: Any) -> Settings:
    """Settings from what the components show, by name.

    Raises:
        ValueError, TypeError: the option, its value, and what is allowed.
    """
    return Settings(**{name: OPTIONS[name].read(value) for name, value in values.items()}, **others)


def shown_values(settings: Settings) -> dict[str, Any]:
    """What the components show for settings, by name."""
    return {name: option.shown(getattr(settings, name)) for name, option in OPTIONS.items()}


def _shown_item(item: Any) -> str:
    return f"{item[0]}: {item[1]:g}" if isinstance(item, list | tuple) else f"{item:g}"


def _read_list(text: str) -> Any:
    """`cosine`, or `0.5, 0.25`, or `grid: 0.75, 0.5`."""
    pairs = [part.rpartition(":") for part in text.split(",")]
    items = [(name.strip(), _number(item)) if name else _number(item) for name, _, item in pairs]
    return text.strip() if any(isinstance(item, str) for item in items) else items


def _read_map(text: str) -> dict[int | str, float | str]:
    """`1: 0.5, 2: 0.25`."""
    pairs = (part.partition(":") for part in text.split(","))
    return {_key(key.strip()): _number(value) for key, _, value in pairs}


def _key(word: str) -> int | str:
    return int(word) if word.isdecimal() else word


def _number(word: str) -> float | str:
    """A word that is no number stays a word: the check of the option then names it."""
    try:
        return float(word)
    except ValueError:
        return word.strip()


_READ = {"list": _read_list, "map": _read_map}


def _kind_of(type_: Any) -> tuple[Any, tuple[str, ...]]:
    """Kind of component for a type, and the words to choose from."""
    union = get_origin(type_) in (Union, UnionType)
    parts = [part for part in get_args(type_) if part is not NoneType] if union else [type_]
    origins = [origin for part in parts if isinstance(origin := get_origin(part), type)]
    for kind, many in (("list", Sequence), ("map", Mapping)):
        if any(issubclass(origin, many) for origin in origins):
            return kind, ()
    words = [get_args(part) for part in parts if get_origin(part) is Literal]
    if words:
        return "choice", words[0]
    plain = {bool: "switch", int: "int", float: "float"}
    return plain[parts[0]], ()


def _options() -> dict[str, Option]:
    documented = docstring_parser.parse_from_object(Settings).params
    docs = {one.arg_name: " ".join(str(one.description).split()) for one in documented}
    options = {}
    for field in fields(Settings):
        kind, words = _kind_of(field.type)
        if kind == "float" and field.default is not None:
            kind = "share"
        options[field.name] = Option(field.name, docs[field.name], kind, words, field.default)
    del options["seed"]  # which is that of the image too
    return {name: options[name] for name in (*FIRST, *options)}


OPTIONS = _options()
"""Every option but the seed, by name: the first ones first."""
