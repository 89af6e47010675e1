"""Latent Diffusion, Stable Diffusion v1 and v2, sgm, and the UIs built on them."""

from .table import Family

__all__ = ["FAMILIES"]

FAMILIES = (
    Family(
        name="Stable Diffusion v1 / v2 and Latent Diffusion (ldm, sgm, Forge, ComfyUI)",
        stacks={"SpatialTransformer": None},
        direct={"ldm.modules.attention": {}, "sgm.modules.attention": {}},
    ),
)
