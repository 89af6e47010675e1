"""The table of diffusion transformers: one row each. To add a model is to add a row.

What a row needs is in docs/development.md.
"""

from ..regions import Along
from ..schedule import Timeline
from .layouts import (
    from_cogvideox,
    from_flux2,
    from_frames,
    from_hidream,
    from_hunyuan_video,
    from_ids,
    from_image,
    from_ltx,
    from_lumina2,
    from_qwen,
    from_video,
    from_z_image,
)
from .row import Blocks, Transformer

__all__ = ["TRANSFORMERS"]

# How times run: from 1 or 1000 (noise) to 0, or from 0 (noise) to 1 or 1000. Models without one of
# these go by their scheduler.
_SIGMAS = Timeline(1.0, flow=True)
_THOUSAND = Timeline(1000.0, flow=True)
_RISING = Timeline(0.0, 1.0, flow=True)
_TO_THOUSAND = Timeline(0.0, 1000.0, flow=True)

# Where blocks are, and arguments that lie along their tokens.
_FIRST, _SECOND = "transformer_blocks", "single_transformer_blocks"
_ROPE, _MASK = "image_rotary_emb", "attention_mask"
_CONTROL = ("controlnet_block_samples", "controlnet_single_block_samples")

_ALL_ROWS = Along(_ROPE, (0,), sequence=True, batched=False)  # [T + N, d]
_IMAGE_ROWS = Along(_ROPE, (0,), batched=False)  # [N, d]
_FREQUENCIES = Along("freqs_cis", (0,), batched=False)
_FIRST_PART = Along(_ROPE, (0,), batched=False, parts=(0,))  # rows of the image, rows of the text
_ROWS_OF_ITEMS = Along(_ROPE, (1,), sequence=True)  # [B, T + N, d]
_MASK_OF_ALL = Along(_MASK, (1,), sequence=True)  # [B, T + N]
_KEY_MASK = Along(_MASK, (3,), sequence=True)  # [B, 1, 1, N + T]
_PADDING_MASK = "hidden_states_masks"

_WAN = (Along("rotary_emb", (1,)), Along("temb", (1,), ndim=4))
_LTX2 = (
    *(
        Along(n, (a,), ndim=a + 2)
        for n in ("video_rotary_emb", "ca_video_rotary_emb")
        for a in (1, 2)
    ),
    *(Along(name, (1,)) for name in ("temb", "temb_ca_scale_shift", "temb_ca_gate")),
)


def _apart(*along: Along, alone: bool = False) -> tuple[Blocks, Blocks]:
    """Two lists of blocks; text and image are apart in both, as in Flux."""
    first, second = (Blocks(path, output=1, along=along, alone=alone) for path in (_FIRST, _SECOND))
    return first, second


def _then_joint(*along: Along, first: str = _FIRST) -> tuple[Blocks, Blocks]:
    """Two lists of blocks; text and image are apart in the first, and joint in the second."""
    return Blocks(first, output=1, along=along), Blocks(_SECOND, joint=True, along=along)


def _image_first(rows: Along) -> tuple[Blocks, Blocks]:
    """Two lists as in HunyuanVideo: the image comes first, and masks cover the text too."""
    return (
        Blocks(_FIRST, output=0, text="after", along=(_KEY_MASK, rows)),
        Blocks(_SECOND, output=0, text="after", along=(_KEY_MASK, _IMAGE_ROWS)),
    )


def _dual(*along: Along, refused: tuple[str, ...] = ()) -> tuple[Blocks]:
    """One list; text and image are apart, and the image comes first in what blocks give."""
    return (Blocks(_FIRST, output=0, along=along, refused=refused),)


_IMAGES = (
    Transformer("FluxTransformer2DModel", _apart(_ALL_ROWS), from_ids, _SIGMAS, between=_CONTROL),
    Transformer("Flux2Transformer2DModel", _then_joint(_ALL_ROWS), from_flux2, _SIGMAS),
    Transformer(
        "ChromaTransformer2DModel",
        _then_joint(_ALL_ROWS, _MASK_OF_ALL),
        from_ids,
        _SIGMAS,
        between=_CONTROL,
    ),
    Transformer(
        "SD3Transformer2DModel",
        (Blocks(_FIRST, output=1),),
        from_image,
        _THOUSAND,
        between=("block_controlnet_hidden_states", "skip_layers"),
    ),
    Transformer(
        "QwenImageTransformer2DModel",
        (Blocks(_FIRST, output=1, along=(_FIRST_PART, Along("modulate_index", (1,)))),),
        from_qwen,
        _SIGMAS,
        between=_CONTROL,
    ),
    Transformer(
        "ZImageTransformer2DModel",
        (
            Blocks(
                "layers",
                input="x",
                joint=True,
                text="after",
                along=tuple(Along(n, (1,), sequence=True) for n in ("attn_mask", "freqs_cis")),
                refused=("noise_mask",),
            ),
        ),
        from_z_image,
        _RISING,
        time="t",
        between=("controlnet_block_samples",),
    ),
    Transformer(
        "Lumina2Transformer2DModel",
        (Blocks("layers", joint=True, text="ragged", along=(_MASK_OF_ALL, _ROWS_OF_ITEMS)),),
        from_lumina2,
        _RISING,
    ),
    Transformer(
        "LuminaNextDiT2DModel",
        (Blocks("layers", along=(Along(_ROPE, (1,)), Along(_MASK, (1,)))),),
        from_image,
        _RISING,
    ),
    Transformer(
        "AuraFlowTransformer2DModel",
        _then_joint(first="joint_transformer_blocks"),
        from_image,
        _SIGMAS,
    ),
    Transformer(
        "HiDreamImageTransformer2DModel",
        (
            Blocks(
                "double_stream_blocks",
                output=0,
                text="after",
                along=(_ROWS_OF_ITEMS, Along(_PADDING_MASK, (1,))),
            ),
            Blocks(
                "single_stream_blocks",
                joint=True,
                text="after",
                along=(_ROWS_OF_ITEMS, Along(_PADDING_MASK, (1,), sequence=True)),
                alone=True,  # text is put in between blocks
            ),
        ),
        from_hidream,
        _THOUSAND,
        time="timesteps",
    ),
    Transformer("HunyuanImageTransformer2DModel", _image_first(_IMAGE_ROWS), from_image, _THOUSAND),
    Transformer(
        "HunyuanDiT2DModel",
        (Blocks("blocks", along=(_IMAGE_ROWS, Along("skip", (1,), mean=True)), alone=True),),
        from_image,
        between=("controlnet_block_samples",),
    ),
    Transformer("CogView3PlusTransformer2DModel", _dual()),
    Transformer(
        "CogView4Transformer2DModel", _dual(_IMAGE_ROWS, refused=(_MASK,)), from_image, _THOUSAND
    ),
    Transformer(
        "GlmImageTransformer2DModel",
        _dual(_IMAGE_ROWS, refused=(_MASK,)),
        from_image,
        _THOUSAND,
        between=("kv_caches",),
    ),
    Transformer("BriaTransformer2DModel", _apart(_ALL_ROWS), from_ids, _THOUSAND, between=_CONTROL),
    Transformer("BriaFiboTransformer2DModel", _then_joint(_ALL_ROWS), from_ids, _SIGMAS),
    Transformer("OvisImageTransformer2DModel", _apart(_ALL_ROWS), from_ids, _SIGMAS),
    Transformer("LongCatImageTransformer2DModel", _apart(_ALL_ROWS), from_ids, _SIGMAS),
    Transformer(
        "OmniGenTransformer2DModel",
        (Blocks("layers", joint=True, along=(_ALL_ROWS, Along(_MASK, (2, 3), sequence=True))),),
        from_image,
        _RISING,
    ),
    Transformer(
        "JoyImageEditTransformer3DModel",
        (Blocks("double_blocks", output=0, along=(_FIRST_PART,)),),
        from_video,
        _THOUSAND,
    ),
    Transformer(
        "PRXTransformer2DModel", (Blocks("blocks", along=(Along(_ROPE, (2,)),)),), timeline=_SIGMAS
    ),
)

_VIDEOS = (
    Transformer(
        "WanTransformer3DModel",
        (Blocks("blocks", along=_WAN, attention="attn1"),),
        from_video,
        _THOUSAND,
    ),
    Transformer(
        "WanVACETransformer3DModel",
        (Blocks("blocks", along=_WAN, attention="attn1"),),
        from_video,
        _THOUSAND,
        between=("control_hidden_states",),
    ),
    Transformer(
        "WanAnimateTransformer3DModel",
        (Blocks("blocks", along=_WAN, alone=True),),  # an adapter wants whole frames
        from_video,
        _THOUSAND,
    ),
    Transformer(
        "SkyReelsV2Transformer3DModel",
        (
            Blocks(
                "blocks", along=(_WAN[0], Along("temb", (2,), ndim=4)), refused=("attention_mask",)
            ),
        ),
        from_video,
        _THOUSAND,
    ),
    Transformer(
        "ChronoEditTransformer3DModel", (Blocks("blocks", along=_WAN),), from_video, _THOUSAND
    ),
    Transformer(
        "HunyuanVideoTransformer3DModel",
        _image_first(_FREQUENCIES),
        from_hunyuan_video,
        _THOUSAND,
    ),
    Transformer(
        "HunyuanVideoFramepackTransformer3DModel",
        # The frames before are in the sequence of image tokens, in front.
        tuple(
            Blocks(path, output=0, joint=True, along=(rows, _KEY_MASK))
            for path, rows in (
                (_FIRST, Along("freqs_cis", (0,), sequence=True, batched=False)),
                (_SECOND, _ALL_ROWS),
            )
        ),
        from_video,
        _THOUSAND,
    ),
    Transformer("HunyuanVideo15Transformer3DModel", _dual(_FREQUENCIES), from_video, _THOUSAND),
    Transformer("CogVideoXTransformer3DModel", _dual(_IMAGE_ROWS), from_cogvideox),
    Transformer(
        "ConsisIDTransformer3DModel", _dual(_IMAGE_ROWS), from_cogvideox, between=("id_cond",)
    ),
    Transformer(
        "LTXVideoTransformer3DModel",
        (Blocks(_FIRST, along=(Along(_ROPE, (1,)), Along("temb", (1,))), attention="attn1"),),
        from_ltx,
        _THOUSAND,
    ),
    Transformer(
        "LTX2VideoTransformer3DModel",
        (
            Blocks(
                _FIRST,
                output=0,
                along=_LTX2,
                other="audio_hidden_states",
                refused=("self_attention_mask",),
            ),
        ),
        from_ltx,
        _THOUSAND,
    ),
    Transformer("MochiTransformer3DModel", _dual(_IMAGE_ROWS), from_video, _TO_THOUSAND),
    Transformer("EasyAnimateTransformer3DModel", _dual(_IMAGE_ROWS), from_video, _THOUSAND),
    Transformer(
        "AllegroTransformer3DModel",
        (Blocks(_FIRST, along=(Along(_ROPE, (1,), parts=(1,)),), refused=(_MASK,)),),
        from_video,
    ),
    Transformer(
        "LatteTransformer3DModel",
        (Blocks(_FIRST, alone=True, refused=(_MASK,)),),  # blocks over time lie between
        from_frames,
    ),
)

# What every block gives is handed on to the model that is controlled.
_CONTROLNETS = (
    Transformer("FluxControlNetModel", _apart(_ALL_ROWS, alone=True), from_ids, _SIGMAS),
    Transformer(
        "SD3ControlNetModel", (Blocks(_FIRST, output=1, alone=True),), from_image, _THOUSAND
    ),
    Transformer(
        "QwenImageControlNetModel",
        (Blocks(_FIRST, output=1, along=(_FIRST_PART,), alone=True),),
        from_qwen,
        _SIGMAS,
    ),
)

_REFUSED = tuple(
    Transformer(
        name,
        reason="its feed-forward layers are convolutions over the whole grid of tokens, and its "
        "attention is linear, so there would be little to gain",
    )
    for name in ("SanaTransformer2DModel", "SanaVideoTransformer3DModel")
)

TRANSFORMERS = (*_IMAGES, *_VIDEOS, *_CONTROLNETS, *_REFUSED)
