"""What the nodes do: they merge in one clone of a model, and only during calls of that clone."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import WrappersMP

import tomesd

try:
    from tomesd.api import Prepared, prepare
except ImportError as error:
    raise ImportError(
        f"the Token Merging nodes need tomesd 1.0 or later, and {tomesd.__file__} is an older one "
        "or another package of that name; the README of the nodes says how to install it"
    ) from error

__all__ = ["Merging", "describe", "merge_tokens"]

KEY = "tomesd"


class Merging:
    """A wrapper that makes a model merge during its calls.

    ComfyUI keeps it with one clone of a model and the clones made from that, and uses it for their
    calls only. Between calls, the model itself is unpatched, so other clones and other workflows
    never merge.
    """

    def __init__(self, options: dict[str, Any], preset: Any = None) -> None:
        self.options, self.preset = options, preset
        self._found: tuple[Any, Any, Prepared] | None = None

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        with self.prepare(executor.class_obj).merging():
            return executor(*args, **kwargs)

    def begin(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the making of an image. One that was cancelled may have left its results."""
        if self._found is not None:
            for _, patch in self._found[-1].parts:
                patch.steps.restart()
        return executor(*args, **kwargs)

    def prepare(self, model: Any) -> Prepared:
        """The changes to make in a model; found again if nodes have replaced its parts."""
        parts = model.diffusion_model, model.model_sampling
        if self._found is None or any(a is not b for a, b in zip(parts, self._found, strict=False)):
            self._found = (*parts, prepare(model, self.options, self.preset))
        return self._found[-1]


def merge_tokens(model: Any, options: dict[str, Any], preset: str = "none") -> Any:
    """A clone of a model (a `ModelPatcher`) that merges tokens, instead of any earlier merging.

    `options` take precedence over the preset.

    Raises:
        ValueError, TypeError: an option is out of range, or has no meaning on this model.
        tomesd.UnsupportedModelError: tokens cannot be merged in this model.
    """
    merging = Merging(options, None if preset == "none" else preset)
    _, patch = merging.prepare(model.model).parts[0]
    patch.asked.warn_if_capped()
    clone = model.clone()
    for kind, wrapper in (
        (WrappersMP.APPLY_MODEL, merging),
        (WrappersMP.OUTER_SAMPLE, merging.begin),
    ):
        clone.remove_wrappers_with_key(kind, KEY)
        clone.add_wrapper_with_key(kind, KEY, wrapper)
    return clone


def describe(model: Any, width: int, height: int, frames: int, batch: int) -> str:
    """A text that says what merges in a model at an image size."""
    comfy.model_management.load_model_gpu(model)  # whether merging pays depends on the device
    pixels = getattr(model.model.latent_format, "spacial_downscale_ratio", 8)
    described = SimpleNamespace(model=model.model, vae_scale_factor=pixels)

    wrappers = model.get_wrappers(WrappersMP.APPLY_MODEL, KEY)
    merging = wrappers[0].prepare(model.model).merging() if wrappers else nullcontext()
    # ComfyUI runs nodes in inference mode, where a model cannot run on shapes alone.
    with merging, torch.inference_mode(False):
        return str(tomesd.describe(described, height, width, frames, batch=batch))
