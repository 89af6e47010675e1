"""Readers of layouts for ComfyUI's transformers; see `layouts`.

All of them take a latent and pad it to whole patches, each of which becomes a token.
"""

import math
from typing import Any

from torch import Tensor

from ..layout import Layout, LayoutPart
from ..regions import Given
from ..state import Grid
from .layouts import layout_on, reads


def _grid(module: Any, latent: Tensor) -> Grid:
    """Frames, rows and columns of the tokens of a latent `[B, C, (F,) H, W]`."""
    side = module.patch_size
    sides = (1, side, side) if isinstance(side, int) else (1, 1, *side)[-3:]
    frames = latent.shape[2] if latent.ndim == 5 else 1
    t, h, w = (-(-n // s) for n, s in zip((frames, *latent.shape[-2:]), sides, strict=True))
    return t, h, w


def _layout(module: Any, latent: Tensor, *more: LayoutPart) -> Layout:
    return layout_on((latent.shape[-2], latent.shape[-1]), _grid(module, latent), *more)


@reads("latent_channels height width", references=True)
def from_comfy_image(module: Any, given: Given) -> Layout:
    """An image, followed by reference images, which may differ in size."""
    others = given["ref_latents"] or ()
    references = [LayoutPart.on(_grid(module, other), reference=True) for other in others]
    return _layout(module, given["x"], *references)


@reads("latent_channels height width")
def from_comfy_lumina(module: Any, given: Given) -> Layout:
    """An image, followed by the padding of the sequence in Z-Image."""
    tokens = math.prod(_grid(module, given["x"]))
    padding = -tokens % (module.pad_tokens_multiple or 1)
    return _layout(module, given["x"], LayoutPart(padding))


@reads("latent_channels frames height width", frames=True)
def from_comfy_video(module: Any, given: Given) -> Layout:
    """A video, followed by given frames, which are left alone.

    Nothing merges if frames have times, and so modulations, of their own, or if a reference image
    precedes the video.
    """
    more, time = given["time_dim_concat"], given["timestep"]
    tokens = 0 if more is None else math.prod(_grid(module, more))
    layout = _layout(module, given["x"], LayoutPart(tokens, reference=True))
    own_times = isinstance(time, Tensor) and time.ndim > 1 and time.shape[1] > 1
    led = getattr(module, "ref_conv", None) is not None and given["reference_latent"] is not None
    return layout.left_alone() if own_times or led else layout
