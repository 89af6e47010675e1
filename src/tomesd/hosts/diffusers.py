"""Hugging Face Diffusers: UNets, ControlNets and the transformers built on the same block."""

import copy
import sys

from ..patch import class_made
from .table import Family

__all__ = ["FAMILIES"]

# Temporal transformers (TransformerTemporalModel, AnimateDiffTransformer3D) hold the same blocks,
# but their tokens are frames. They are not named here, so they are left alone.
FAMILIES = (
    Family(
        name="Diffusers (Stable Diffusion 1, 2, XL and others with a UNet2DConditionModel, their "
        "ControlNets, AnimateDiff, Stable Video Diffusion, UNet3D, DiT, PixArt)",
        stacks={
            "Transformer2DModel": "config.patch_size",
            "DiTTransformer2DModel": "config.patch_size",
            "PixArtTransformer2DModel": "config.patch_size",
            "TransformerSpatioTemporalModel": None,
        },
        direct={"diffusers.models.attention": {"norm_type": "layer_norm", "pos_embed": None}},
    ),
)


def _join_registry(base: type, patched: type) -> None:
    """Puts a new class beside its base in the registry where diffusers looks blocks up.

    Caches, and guidance that skips blocks, find them there by the class itself.
    """
    helpers = sys.modules.get("diffusers.hooks._helpers")
    registry = getattr(helpers, "TransformerBlockRegistry", None)
    if registry is None:
        return
    try:
        entry = registry.get(base)
    except ValueError:  # not a block
        return
    registry.register(patched, copy.copy(entry))  # a copy, because an entry notes its class


class_made.append(_join_registry)
