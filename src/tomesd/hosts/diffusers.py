"""Hugging Face Diffusers: UNets, ControlNets and the transformers built on the same block."""

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
    ),
)
