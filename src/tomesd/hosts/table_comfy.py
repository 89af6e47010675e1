"""The table of ComfyUI's diffusion transformers: their blocks call things by other names.

What a row needs is in docs/development.md.
"""

from ..regions import Along
from ..schedule import Timeline
from .layouts_comfy import from_comfy_image, from_comfy_lumina, from_comfy_video
from .row import Blocks, Transformer

__all__ = ["COMFY_TRANSFORMERS"]

# Where ComfyUI knows better, because of a node that changes how times run, that counts.
_SIGMAS = Timeline(1.0, flow=True)
_THOUSAND = Timeline(1000.0, flow=True)

# What other nodes put between the blocks, or in their place.
_BETWEEN = (
    "control",
    "transformer_options.patches_replace.dit",
    "transformer_options.patches.double_block",
    "transformer_options.patches.single_block",
)

_ROPE = Along("pe", (2,), sequence=True)  # [B, 1, T + N, d, 2, 2]

# Blocks of Flux add to the tokens they are given.
_FLUX = (
    Blocks(
        "double_blocks",
        "img",
        0,
        along=(_ROPE,),
        other="txt",
        refused=("attn_mask",),
        in_place=True,
    ),
    Blocks("single_blocks", "x", joint=True, along=(_ROPE,), refused=("attn_mask",), in_place=True),
)
_WAN = Blocks("blocks", "x", along=(Along("freqs", (1,)),))  # [1, N, 1, d, 2, 2]
_WAN_ALONE = Blocks("blocks", "x", along=_WAN.along, alone=True)

COMFY_TRANSFORMERS = (
    Transformer("Flux", _FLUX, from_comfy_image, _SIGMAS, between=_BETWEEN),
    Transformer("Chroma", _FLUX, from_comfy_image, _SIGMAS, between=_BETWEEN),
    Transformer(
        "MMDiT",  # Stable Diffusion 3
        (Blocks("joint_blocks", "x", 1, other="context", names=("context", "x")),),
        from_comfy_image,
        _THOUSAND,
        time="timesteps",
        between=_BETWEEN,
    ),
    Transformer(
        "QwenImageTransformer2DModel",
        (
            Blocks(
                "transformer_blocks",
                output=1,
                along=(Along("image_rotary_emb", (2,), sequence=True),),
            ),
        ),
        from_comfy_image,
        _SIGMAS,
        between=_BETWEEN,
    ),
    Transformer(
        "NextDiT",  # Lumina 2, Z-Image
        (
            Blocks(
                "layers",
                "x",
                joint=True,
                along=(Along("freqs_cis", (1,), sequence=True),),
                refused=("x_mask",),
            ),
        ),
        from_comfy_lumina,
        _SIGMAS,
        time="timesteps",
        between=_BETWEEN,
    ),
    Transformer("WanModel", (_WAN,), from_comfy_video, _THOUSAND, between=_BETWEEN),
    # Something is added to all tokens between their blocks.
    Transformer("VaceWanModel", (_WAN_ALONE,), from_comfy_video, _THOUSAND),
    Transformer("AnimateWanModel", (_WAN_ALONE,), from_comfy_video, _THOUSAND),
    *(
        Transformer(name, reason="its blocks listen to sound frame by frame, and need whole frames")
        for name in ("WanModel_S2V", "HumoWanModel")
    ),
)
