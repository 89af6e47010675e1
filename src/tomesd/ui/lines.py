"""What to type to make the same image again."""

import shlex
from collections.abc import Mapping
from typing import Any

from ..presets import changed, options_of
from ..settings import Settings

__all__ = ["command_line", "python_line", "settings_words"]


def python_line(settings: Settings) -> str:
    options = (f"{name}={value!r}" for name, value in options_of(settings).items())
    return f"tomesd.apply_patch({', '.join(['pipe', *options])})"


def settings_words(settings: Settings) -> str:
    """What differs from the defaults."""
    options = (f"{name}={value!r}" for name, value in changed(settings).items() if name != "seed")
    return ", ".join(options) or "default settings"


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
