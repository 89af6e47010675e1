"""The table of ComfyUI's diffusion transformers, whose blocks use other names than diffusers.

docs/development.md explains the fields of a row.
"""

from dataclasses import replace
from typing import Any

from ..regions import Along
from ..schedule import Timeline
from .layouts_comfy import from_comfy_image, from_comfy_lumina, from_comfy_video
from .transformers import Blocks, Transformer

# Used unless ComfyUI gives a timeline of its own, which nodes can change.
_SIGMAS = Timeline(1.0, flow=True)
_THOUSAND = Timeline(1000.0, flow=True)

# Arguments by which other nodes act between the blocks, or replace them.
_BETWEEN = (
    "control",
    "transformer_options.patches_replace.dit",
    "transformer_options.patches.double_block",
    "transformer_options.patches.single_block",
)

# Arguments of newer versions that give reference images a modulation of their own, by the index of
# their tokens.
_OWN_MODULATION = ("timestep_zero_index", "modulation_dims", "modulation_dims_img")

_ROPE = Along("pe", (2,), sequence=True)  # [B, 1, T + N, d, 2, 2]
# Blocks of Flux change their input in place.
_OF_FLUX: dict[str, Any] = {
    "along": (_ROPE,),
    "refused": ("attn_mask", *_OWN_MODULATION),
    "in_place": True,
}
_FLUX = (
    Blocks(path="double_blocks", input="img", output=0, other="txt", **_OF_FLUX),
    Blocks(path="single_blocks", input="x", joint=True, **_OF_FLUX),
)
_SD3 = Blocks(path="joint_blocks", input="x", output=1, other="context", names=("context", "x"))
_QWEN = Blocks(
    path="transformer_blocks",
    output=1,
    along=(Along("image_rotary_emb", (2,), sequence=True),),
    refused=_OWN_MODULATION,
)
_LUMINA = Blocks(
    path="layers",
    input="x",
    joint=True,
    along=(Along("freqs_cis", (1,), sequence=True),),
    refused=("x_mask", *_OWN_MODULATION),
)
_WAN = Blocks(path="blocks", input="x", along=(Along("freqs", (1,)),))  # [1, N, 1, d, 2, 2]
_WAN_ALONE = replace(_WAN, alone=True)  # something is added to all tokens between the blocks


def _row(
    name: str, *lists: Blocks, layout: Any = from_comfy_image, timeline: Any = _SIGMAS, **more: Any
) -> Transformer:
    return Transformer(name, lists, layout, timeline, between=_BETWEEN, **more)


COMFY_TRANSFORMERS = (
    _row("Flux", *_FLUX),
    _row("Chroma", *_FLUX),
    _row("MMDiT", _SD3, timeline=_THOUSAND, time="timesteps", text=154),  # Stable Diffusion 3
    _row("QwenImageTransformer2DModel", _QWEN, text=256),
    # Lumina 2, Z-Image
    _row("NextDiT", _LUMINA, layout=from_comfy_lumina, time="timesteps", text=256),
    _row("WanModel", _WAN, layout=from_comfy_video, timeline=_THOUSAND),
    Transformer("VaceWanModel", (_WAN_ALONE,), from_comfy_video, _THOUSAND),
    Transformer("AnimateWanModel", (_WAN_ALONE,), from_comfy_video, _THOUSAND),
    *(
        Transformer(name, reason="its blocks attend to audio frame by frame, and need whole frames")
        for name in ("WanModel_S2V", "HumoWanModel")
    ),
)
