"""Two small text-to-image latent diffusion models in the diffusers format, for offline use.

from diffusers import StableDiffusionPipeline
import tomesd_demo_model

pipe = StableDiffusionPipeline.from_pretrained(tomesd_demo_model.path("unet"), safety_checker=None)
image = pipe("a whale and two red apples on a sky blue background").images[0]
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__version__ = "0.1.0"
__all__ = ["__version__", "held_out_captions", "path"]


_FOLDERS = {"unet": "pipeline", "transformer": "transformer"}


def path(model: str = "unet") -> Path:
    """Folder of a pipeline, for `from_pretrained`.

    Args:
        model: "unet", for `StableDiffusionPipeline`, or "transformer", for `FluxPipeline`.
    """
    if model not in _FOLDERS:
        raise ValueError(f"model={model!r}: must be one of {', '.join(_FOLDERS)}")
    return Path(str(files(__package__))) / _FOLDERS[model]


def held_out_captions() -> list[str]:
    """Captions of object combinations that training never showed, in a fixed order.

    `tomesd_demo_model.captions.sample_captions` makes more of them.
    """
    text = (files(__package__) / "held_out_captions.txt").read_text(encoding="utf-8")
    return text.splitlines()
