"""Hugging Face Diffusers: UNets, ControlNets and the transformers built on the same block."""

from .table import Family

__all__ = ["FAMILIES"]

# Temporal transformers (TransformerTemporalModel, AnimateDiffTransformer3D) hold the same blocks,
# but their tokens are frames. They are not named here, so they are left alone.
FAMILIES = (
    Family(
        name="Diffusers (UNet2DConditionModel, ControlNetModel, UNetMotionModel, "
        "UNetSpatioTemporalConditionModel, UNet3DConditionModel, DiT, PixArt)",
        stacks={
            "Transformer2DModel": "config.patch_size",
            "DiTTransformer2DModel": "config.patch_size",
            "PixArtTransformer2DModel": "config.patch_size",
            "TransformerSpatioTemporalModel": None,
        },
    ),
)
