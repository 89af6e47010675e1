"""The table of diffusion transformers. To add a model, add a row.

docs/development.md explains the fields of a row.
"""

import math
from typing import Any

from ..regions import Along, Coarse
from ..schedule import LinearQuadratic, Shift, Timeline
from . import layouts as at
from .transformers import Blocks, Transformer

# Timesteps run from 1 or 1000 (noise) to 0, or from 0 (noise) to 1 or 1000. Models without one of
# these timelines use their scheduler's.
_SIGMAS = Timeline(1.0, flow=True)
_THOUSAND = Timeline(1000.0, flow=True)
_RISING = Timeline(0.0, 1.0, flow=True)
_MOCHI = Timeline(0.0, 1000.0, flow=True, shift=LinearQuadratic())
# Of rectified flows whose models are told the share of the steps, and not the level of the noise.
_STEPS = Timeline(1000.0)


def _cosmos_timeline(model: Any) -> Timeline:
    """The first Cosmos takes log(sigma) / 4 as its time, for sigma from 80 to 0.002."""
    is_first = model.config["extra_pos_embed_type"] is not None
    return Timeline(math.log(80) / 4, math.log(0.002) / 4) if is_first else _SIGMAS


def _flux2_growth(tokens: int) -> float:
    """What the pipelines of Flux 2 compute for few steps, whatever their scheduler says. For more
    steps it is a little less, which nobody can know from one of them."""
    small = tokens <= 4300
    return 8.48e-5 * tokens + 1.944 if small else 1.6927e-4 * tokens + 0.45666666


# Attributes with blocks, and names of arguments.
_FIRST, _SECOND = "transformer_blocks", "single_transformer_blocks"
_VISUAL = "visual_transformer_blocks"
_ROPE, _MASK = "image_rotary_emb", "attention_mask"
_CONTROL = ("controlnet_block_samples", "controlnet_single_block_samples")


def _of_image(name: str, **more: Any) -> Along:
    """`[B, N, ...]`."""
    return Along(name, (1,), **more)


def _of_all(name: str, **more: Any) -> Along:
    """`[B, T + N, ...]`."""
    return Along(name, (1,), sequence=True, **more)


def _rows(name: str, **more: Any) -> Along:
    """`[N, ...]`, for all items."""
    return Along(name, (0,), batched=False, **more)


_ALL_ROWS = _rows(_ROPE, sequence=True)  # [T + N, d]
_IMAGE_ROWS = _rows(_ROPE)  # [N, d]
_FIRST_PART = _rows(_ROPE, parts=(0,))  # (rows of the image, rows of the text)
_KEY_MASK = Along(_MASK, (3,), sequence=True)  # [B, 1, 1, N + T]
_SCORE_MASK = Along(_MASK, (2, 3), sequence=True)  # [B, 1, T + N, T + N]
_PADDING_MASK = "hidden_states_masks"
_WAN = (_of_image("rotary_emb"), _of_image("temb", ndim=4))
_LTX2 = (
    *(
        Along(name, (axis,), ndim=axis + 2)
        for name in ("video_rotary_emb", "ca_video_rotary_emb")
        for axis in (1, 2)
    ),
    *(_of_image(name) for name in ("temb", "temb_ca_scale_shift", "temb_ca_gate")),
)
_COSMOS = (
    _IMAGE_ROWS,
    _of_image("extra_pos_emb"),
    *(_of_image(name, ndim=3) for name in ("embedded_timestep", "temb")),
    _of_image("controlnet_residual", mean=True),
)


# How the latent and the arguments for its size are made coarse. Where positions are given, a coarse
# token gets the mean of those it stands for; elsewhere, the model simply sees a smaller image.
_RESIZED = Coarse()
_PLACED = Coarse(side=2, places="img_ids", mask=_MASK, full=_CONTROL)


def _list(path: str, *along: Along, **fields: Any) -> tuple[Blocks]:
    """One list of blocks."""
    return (Blocks(path=path, along=along, **fields),)


def _dual(*along: Along, **fields: Any) -> tuple[Blocks]:
    """One list of blocks with separate text and image; their output has the image first."""
    return _list(_FIRST, *along, output=0, **fields)


def _apart(*along: Along, alone: bool = False) -> tuple[Blocks, Blocks]:
    """Two lists of blocks with separate text and image, as in Flux."""
    fields: dict[str, Any] = {"output": 1, "alone": alone}
    return *_list(_FIRST, *along, **fields), *_list(_SECOND, *along, **fields)


def _then_joint(*along: Along, first: str = _FIRST) -> tuple[Blocks, Blocks]:
    """Two lists of blocks; text and image are separate in the first, and joint in the second."""
    return *_list(first, *along, output=1), *_list(_SECOND, *along, joint=True)


def _image_first(rows: Along, anew: str = "") -> tuple[Blocks, Blocks]:
    """Two lists of blocks as in HunyuanVideo: image first, and masks that cover the text too."""
    return (
        *_list(_FIRST, _KEY_MASK, rows, output=0, text="after"),
        *_list(_SECOND, _KEY_MASK, _IMAGE_ROWS, output=0, text="after", anew=anew),
    )


def _image(name: str, *row: Any, **fields: Any) -> Transformer:
    """The row of a class whose name ends in `Transformer2DModel`."""
    return Transformer(f"{name}Transformer2DModel", *row, **fields)


def _video(
    name: str,
    lists: tuple[Blocks, ...],
    layout: Any = at.from_video,
    timeline: Any = _THOUSAND,
    **fields: Any,
) -> Transformer:
    return Transformer(f"{name}Transformer3DModel", lists, layout, timeline, **fields)


_IMAGES = (
    _image("Flux", _apart(_ALL_ROWS), at.from_ids, _SIGMAS, between=_CONTROL, coarse=_PLACED),
    _image(
        "Flux2",
        _then_joint(_ALL_ROWS),
        at.from_flux2,
        Timeline(1.0, flow=True, shift=Shift(growth=_flux2_growth)),
        coarse=Coarse(side=2, places="img_ids", full=("kv_cache_mode",)),
    ),
    # In the blocks before these, each image is by itself.
    _image(
        "Flux3", _list(_SECOND, _ALL_ROWS, _of_image("temb_mod"), output=1), at.from_flux3, _SIGMAS
    ),
    _image(
        "Chroma",
        _then_joint(_ALL_ROWS, _of_all(_MASK)),
        at.from_ids,
        _SIGMAS,
        between=_CONTROL,
        coarse=_PLACED,
    ),
    _image(
        "SD3",
        _list(_FIRST, output=1),
        at.from_image,
        _THOUSAND,
        between=("block_controlnet_hidden_states", "skip_layers"),
        coarse=Coarse(full=("block_controlnet_hidden_states",)),
        text=333,
    ),
    _image(
        "QwenImage",
        _list(_FIRST, _FIRST_PART, _of_image("modulate_index"), output=1),
        at.from_qwen,
        _SIGMAS,
        between=_CONTROL,
        coarse=Coarse(side=2, grids="img_shapes", full=_CONTROL),
        text=256,
    ),
    _image(
        "QwenImage21",
        _list(
            _FIRST,
            _rows("rotary_emb", sequence=True),
            _rows("target_token_mask", sequence=True),
            _of_all("key_valid"),
            joint=True,
            refused=(_MASK,),
        ),
        at.from_qwen21,
        _SIGMAS,
    ),
    _image(
        "ZImage",
        _list(
            "layers",
            _of_all("attn_mask"),
            _of_all("freqs_cis"),
            input="x",
            joint=True,
            text="after",
            refused=("noise_mask",),
        ),
        at.from_z_image,
        _RISING,
        time="t",
        between=("controlnet_block_samples",),
        coarse=Coarse(full=("controlnet_block_samples", "siglip_feats", "image_noise_mask")),
        text=128,
    ),
    _image(
        "Lumina2",
        _list("layers", _of_all(_MASK), _of_all(_ROPE), joint=True, text="ragged"),
        at.from_lumina2,
        _RISING,
        coarse=_RESIZED,
        text=256,
    ),
    Transformer(
        "LuminaNextDiT2DModel",
        _list("layers", _of_image(_ROPE), _of_image(_MASK)),
        timeline=_RISING,
        text=256,
    ),
    _image(
        "AuraFlow",
        _then_joint(first="joint_transformer_blocks"),
        timeline=_SIGMAS,
        coarse=_RESIZED,
        text=256,
    ),
    _image(
        "HiDreamImage",
        (
            *_list(
                "double_stream_blocks",
                _of_all(_ROPE),
                _of_image(_PADDING_MASK),
                output=0,
                text="after",
            ),
            *_list(
                "single_stream_blocks",
                _of_all(_ROPE),
                _of_all(_PADDING_MASK),
                joint=True,
                text="after",
                alone=True,  # text is inserted between blocks
            ),
        ),
        at.from_hidream,
        _THOUSAND,
        time="timesteps",
        text=128,
    ),
    _image(
        "HunyuanImage",
        _image_first(_IMAGE_ROWS),
        timeline=_THOUSAND,
        coarse=Coarse(full=("timestep_r",)),
        text=1000,
    ),
    Transformer(
        "HunyuanDiT2DModel",
        _list("blocks", _IMAGE_ROWS, _of_image("skip", mean=True), alone=True),
        between=("controlnet_block_samples",),
        text=77,
    ),
    _image("CogView3Plus", _dual(), text=224),
    _image("CogView4", _dual(_IMAGE_ROWS, refused=(_MASK,)), timeline=_STEPS, text=224),
    _image(
        "GlmImage",
        _dual(_IMAGE_ROWS, refused=(_MASK,)),
        timeline=_STEPS,
        between=("kv_caches",),
        text=64,
    ),
    _image("Bria", _apart(_ALL_ROWS), at.from_ids, _THOUSAND, between=_CONTROL, text=128),
    _image("BriaFibo", _then_joint(_ALL_ROWS), at.from_ids, _THOUSAND, text=1024),
    _image(
        "BriaFibo2",
        _list(
            "layers",
            *(_of_all(name) for name in ("attn_mask", "freqs_cis", "noise_mask")),
            input="x",
            joint=True,
            after_with="attn_mask",
        ),
        at.from_bria_fibo2,
        _SIGMAS,
        text=1024,
    ),
    _image("OvisImage", _apart(_ALL_ROWS), at.from_ids, _SIGMAS, text=256),
    _image("LongCatImage", _apart(_ALL_ROWS), at.from_ids, _SIGMAS),
    _image(
        "OmniGen", _list("layers", _ALL_ROWS, _SCORE_MASK, joint=True), timeline=_RISING, text=128
    ),
    _video("JoyImageEdit", _list("double_blocks", _FIRST_PART, output=0)),
    _video(
        "JoyImageEditPlus",
        _list("double_blocks", _of_image(_ROPE), _KEY_MASK, output=0, text="after"),
        at.from_joy_image_plus,
    ),
    _image("Krea2", _list(_FIRST, _ALL_ROWS, _KEY_MASK, joint=True), at.from_krea2, _SIGMAS),
    _image(
        "NucleusMoEImage",
        _list(_FIRST, _FIRST_PART, _of_all("attention_kwargs", parts=(_MASK,)), text="after"),
        at.from_nucleus,
        _SIGMAS,
        text=256,
    ),
    _image(
        "ErnieImage",
        _list(
            "layers",
            _of_all("rotary_pos_emb"),
            _of_all("temb", tokens_first=True),
            _KEY_MASK,
            input="x",
            tokens_first=True,
            joint=True,
            text="after",
        ),
        timeline=_THOUSAND,
        text=128,
    ),
    _image(
        "Ideogram4",
        _list("layers", _SCORE_MASK, _of_all(_ROPE), _of_all("adaln_input"), joint=True),
        at.from_ideogram4,
        _RISING,
    ),
    _image("PRX", _list("blocks", Along(_ROPE, (2,))), timeline=_SIGMAS, text=256),
)

_VIDEOS = (
    _video("Wan", _list("blocks", *_WAN, attention="attn1"), coarse=_RESIZED),
    _video(
        "WanVACE", _list("blocks", *_WAN, attention="attn1"), between=("control_hidden_states",)
    ),
    _video("WanAnimate", _list("blocks", *_WAN, alone=True)),  # an adapter needs whole frames
    _video("SkyReelsV2", _list("blocks", _WAN[0], Along("temb", (2,), ndim=4), refused=(_MASK,))),
    _video("ChronoEdit", _list("blocks", *_WAN)),
    _video(
        "AnyFlow",
        _list(
            "blocks",
            Along("rotary_emb", (2,), parts=("query", "key")),
            _of_image("temb"),
            attention="attn1",
            keys=(Along("rotary_emb", (2,), parts=("key",)),),
        ),
        at.from_frames_first,
    ),
    _video(
        "Helios",
        _list(
            "blocks",
            _of_all("rotary_emb"),
            _of_all("temb", ndim=4),
            Along("original_context_length", ()),
            joint=True,  # with past frames, which come first
        ),
    ),
    _video(
        "HunyuanVideo",
        _image_first(_rows("freqs_cis")),
        at.from_hunyuan_video,
        coarse=_RESIZED,
        text=256,
    ),
    _video(
        "HunyuanVideoFramepack",
        (
            # Joint with past frames, which come first.
            *_dual(_rows("freqs_cis", sequence=True), _KEY_MASK, joint=True),
            *_list(_SECOND, _ALL_ROWS, _KEY_MASK, output=0, joint=True),
        ),
        text=256,
    ),
    _video("HunyuanVideo15", _dual(_rows("freqs_cis")), text=1000),
    _video("MotifVideo", _image_first(_IMAGE_ROWS, anew="num_decoder_layers")),
    _video("CogVideoX", _dual(_IMAGE_ROWS), at.from_frames_first, None, text=226),
    _video(
        "ConsisID", _dual(_IMAGE_ROWS), at.from_frames_first, None, between=("id_cond",), text=226
    ),
    _video(
        "Cosmos",
        _list(_FIRST, *_COSMOS),
        timeline=_cosmos_timeline,
        between=("block_controlnet_hidden_states",),
    ),
    _video(
        "Kandinsky5",
        _list(_VISUAL, _of_image("rope"), input="visual_embed", refused=("sparse_params",)),
        at.from_channels_last,
        text=256,
    ),
    _video(
        "Kandinsky6",
        _list(_VISUAL, _rows("vis_rope"), input="vis", other="aud", output=0),
        at.from_channels_last,
    ),
    _video(
        "LTXVideo",
        _list(_FIRST, _of_image(_ROPE), _of_image("temb"), attention="attn1"),
        at.from_ltx,
        coarse=Coarse(side=1, numbers=("height", "width"), full=("video_coords",)),
        text=128,
    ),
    _video(
        "LTX2Video",
        _dual(*_LTX2, other="audio_hidden_states", refused=("self_attention_mask",)),
        at.from_ltx2,
        text=1024,
    ),
    _video("Mochi", _dual(_IMAGE_ROWS), timeline=_MOCHI, text=256),
    _video("EasyAnimate", _dual(_IMAGE_ROWS), text=256),
    _video("Allegro", _list(_FIRST, _of_image(_ROPE, parts=(1,)), refused=(_MASK,)), timeline=None),
    _video(
        "Latte",
        # Temporal blocks run between these.
        _list(_FIRST, alone=True, refused=(_MASK,), attention="attn1", keys=()),
        at.from_frames,
        None,
        text=120,
    ),
)

# The output of every block is passed to the controlled model.
_CONTROLNETS = (
    Transformer("FluxControlNetModel", _apart(_ALL_ROWS, alone=True), at.from_ids, _SIGMAS),
    Transformer(
        "SD3ControlNetModel", _list(_FIRST, output=1, alone=True), timeline=_THOUSAND, text=333
    ),
    Transformer(
        "QwenImageControlNetModel",
        _list(_FIRST, _FIRST_PART, output=1, alone=True),
        at.from_qwen,
        _SIGMAS,
        text=256,
    ),
    Transformer("HunyuanDiT2DControlNetModel", _list("blocks", _IMAGE_ROWS, alone=True), text=77),
)

_CONVOLUTIONS = (
    "its feed-forward layers are convolutions over the whole grid of tokens, and its attention is "
    "linear, so there would be little to gain"
)
_KEPT_KEYS = "keys and values are kept from one part of the video to the next, and"
_REFUSED = tuple(
    Transformer(name, reason=reason)
    for name, reason in {
        "SanaTransformer2DModel": _CONVOLUTIONS,
        "SanaVideoTransformer3DModel": _CONVOLUTIONS,
        "SanaWMTransformer3DModel": _CONVOLUTIONS,
        "SanaControlNetModel": _CONVOLUTIONS,
        "SanaWMLTX2RefinerTransformer3DModel": "it is not told the grid that its tokens are on",
        "AnyFlowFARTransformer3DModel": f"{_KEPT_KEYS} the masks of its attention are laid out for "
        "all tokens",
        "WanAnimate2Transformer3DModel": f"{_KEPT_KEYS} its attention computes positions from the "
        "grid, for all tokens",
        "Kandinsky6SRTransformer3DModel": "its attention is sparse, and chooses among squares of "
        "8x8 tokens",
        "Cosmos3OmniTransformer": "text, pictures, sound and actions are packed into one sequence "
        "without a batch",
        "MiniMaxH3Transformer3DModel": "text, pictures, sound and video are packed into one "
        "sequence, whose order only its pipeline knows",
        "DreamLiteUNetModel": "its blocks have self-attention on coarse grids only, so there would "
        "be little to gain",
        "CosmosControlNetModel": "its blocks give a projection of all tokens besides the tokens",
        "ZImageControlNetModel": "its blocks give, with their tokens, what all blocks before gave",
    }.items()
)

TRANSFORMERS = (*_IMAGES, *_VIDEOS, *_CONTROLNETS, *_REFUSED)
