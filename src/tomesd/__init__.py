"""Token merging for diffusion models: less work per step, no retraining, nearly the same image."""

from . import merge
from .api import apply_patch, patched, remove_patch
from .describe import Description, describe
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
