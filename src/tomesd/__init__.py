"""Token merging for diffusion models: less work per step, no retraining, nearly the same image."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import merge
    from .api import apply_patch, patched, remove_patch
    from .description import Description, describe
    from .hosts import UnsupportedModelError
    from .presets import load, save
    from .settings import MergeWarning, Settings

__all__ = [
    "Description",
    "MergeWarning",
    "Settings",
    "UnsupportedModelError",
    "apply_patch",
    "describe",
    "load",
    "merge",
    "patched",
    "remove_patch",
    "save",
]

__version__ = "1.0.0.dev0"

_MODULES = ("settings", "presets", "hosts", "api", "description")


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is first asked for.

    The commands set how threads wait before torch is loaded, and their help does without it.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "merge":
        return import_module(".merge", __name__)
    modules = [import_module(f".{module}", __name__) for module in _MODULES]
    globals()[name] = next(getattr(m, name) for m in modules if hasattr(m, name))
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
