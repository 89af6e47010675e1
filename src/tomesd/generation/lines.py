"""Settings as text: what to type to get them, in Python and on the command line."""

import shlex
from collections.abc import Mapping
from typing import Any

from ..presets import changed
from ..settings import Settings


def arguments(options: Mapping[str, Any]) -> str:
    """`ratio=0.5, target='kv'`"""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def python_line(options: Mapping[str, Any]) -> str:
    """The call that merges with these options."""
    return f"tomesd.apply_patch(pipe, {arguments(options)})"


def command_line(prompt: str, settings: Settings, **options: Any) -> str:
    """The command that makes the merged image.

    Args:
        options: what else to give; None is left out.
    """
    given = {"prompt": prompt, **options, **changed(settings)}
    words = [word for name, value in given.items() for word in _words(name, value)]
    return shlex.join(["tomesd", "generate", *words])


def _words(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    values = value if isinstance(value, list | tuple) else [value]
    pairs = (":".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for v in values)
    return [f"--{option}", *pairs]
