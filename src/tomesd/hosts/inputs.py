"""Inputs of the right shape for a model, to find out what it does at an image size.

The transformers of diffusers share the names of their arguments: one table says what belongs to a
name, and another what differs in a class.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from . import layouts as at
from .inputs_comfy import comfy_inputs
from .inputs_example import PIXELS_PER_LATENT, Example
from .inputs_unets import UNETS
from .names import is_comfy
from .transformers import find_row

__all__ = ["example_inputs"]

_FRAMES = 8

Inputs = dict[str, Any]


def example_inputs(
    module: nn.Module,
    size: tuple[int, int],
    batch: int,
    frames: int = _FRAMES,
    text: int | None = None,
) -> Inputs | None:
    """Arguments for `module.forward` on a latent of `size`, or None if its class is not known.

    Tensors of floating point are zeros that stand for data, and may be filled with anything. What
    has to be as it is, positions and masks, is of integers or booleans, or inside tuples. Masks and
    positions are made by `torch.tensor`, so that under `FakeTensorMode` they are constants: there
    are models that read them, to cut the text.

    Args:
        module: a UNet or transformer of diffusers or ComfyUI, or a UNet of ldm.
        size: height and width in latent pixels, before any of them become one token.
        batch: of the call.
        frames: latent frames of a video; models of images ignore it.
        text: tokens of text for a transformer; as many as its pipeline makes, if None.
    """
    example = Example(module, batch, *size, frames, text or 77)
    if is_comfy(module) and (inputs := comfy_inputs(example, text)) is not None:
        return inputs
    for cls in type(module).__mro__:
        if cls.__name__ in UNETS:
            return UNETS[cls.__name__](replace(example, text=77))
        if cls.__name__ in _DIT:
            return _inputs(example, cls, _IMAGE)
    row = find_row(module)
    if row is None:
        return None
    cls = next(c for c in type(module).__mro__ if c.__name__ == row.name)
    # Some have positions for a text of one length only.
    fixed = example.max_text_seq_length or example.text_len
    example = replace(example, text=fixed or text or _usual_text(cls))
    return _inputs(example, cls, _MAIN.get(row.layout, _IMAGE))


_DIT = ("DiTTransformer2DModel", "PixArtTransformer2DModel")


_Rule = str | Callable[[Example], Any]
"""What to give for an argument: data of a shape (see `Example.data`), or what a function says.
None leaves it out."""


def _make(example: Example, rule: _Rule) -> Any:
    return example.data(rule) if isinstance(rule, str) else rule(example)


def _inputs(example: Example, cls: type, main: _Rule) -> Inputs:
    """What a transformer's forward asks for, as far as there is a rule for it."""
    rules = {**_ARGUMENTS, "hidden_states": main, **_OWN.get(cls.__name__, {})}
    inputs = {}
    for name, parameter in inspect.signature(cls.forward).parameters.items():  # type: ignore
        optional = parameter.default is not inspect.Parameter.empty
        if name in rules and not (name == "encoder_attention_mask" and optional):
            value = _make(example, rules[name])
            if value is not None or not optional:
                inputs[name] = value
    return inputs


_IMAGE = "in_channels height width"
_VIDEO = "in_channels frames height width"
_ONE_FRAME = "in_channels 1 height width"
_TWO_FRAMES, _PAST = "in_channels 2 height width", "in_channels 16 height width"
_PACKED = "tokens in_channels"  # the pipeline makes tokens of 2x2 pixels


def _frames_second(c: Example) -> Tensor:
    """[B, frames, channels, height, width]; as many frames as make whole tokens."""
    frames = c.frames_of_tokens * (c.patch_size_t or 1)
    return c.tensor(frames, c.in_channels, c.height, c.width)


def _channels_last(c: Example) -> Tensor:
    """[B, frames, height, width, channels]; behind the channels, a picture and where it is."""
    channels = c.in_visual_dim * 2 + 1 if c.visual_cond else c.in_visual_dim
    return c.tensor(c.frames, c.height, c.width, channels)


# The main input, by how it is read; `_IMAGE` for the others.
_MAIN: dict[Any, _Rule] = {
    **dict.fromkeys((at.from_ids, at.from_flux2, at.from_flux3), _PACKED),
    **dict.fromkeys((at.from_qwen, at.from_qwen21, at.from_nucleus, at.from_krea2), _PACKED),
    **dict.fromkeys((at.from_video, at.from_hunyuan_video), _VIDEO),
    at.from_frames: "in_channels video_length height width",
    at.from_frames_first: _frames_second,
    at.from_channels_last: _channels_last,
    at.from_ltx: lambda c: c.tensor(c.frames * c.height * c.width, c.in_channels),
    at.from_ideogram4: "sequence in_channels",
    at.from_joy_image_plus: "tokens in_channels 1 2 2",
}

# How many tokens pipelines make of a text; 512, where nothing is said. Of the classes, the names
# without what most of them end in.
_TEXTS = {
    64: "GlmImage",
    77: "HunyuanDiT2D HunyuanDiT2DControlNet",
    120: "Latte",
    128: "Bria ErnieImage HiDreamImage LTXVideo OmniGen ZImage",
    224: "CogView3Plus CogView4",
    226: "CogVideoX ConsisID",
    256: "AuraFlow EasyAnimate HunyuanVideo HunyuanVideoFramepack Kandinsky5 Lumina2 "
    "LuminaNextDiT2D Mochi NucleusMoEImage OvisImage PRX QwenImage QwenImageControlNet",
    333: "SD3 SD3ControlNet",
    1000: "HunyuanImage HunyuanVideo15",
    1024: "BriaFibo BriaFibo2 LTX2Video",
}


def _usual_text(cls: type) -> int:
    short = re.sub(r"(Transformer[23]D)?Model$", "", cls.__name__)
    return next((count for count, names in _TEXTS.items() if short in names.split()), 512)


_TEXT = (
    "text joint_attention_dim|caption_channels|text_dim|text_embed_dim|cap_feat_dim|context_in_dim"
    "|in_text_dim|cross_attention_dim"
)


def _where(entry: str, rule: _Rule) -> _Rule:
    """The rule for models that have an entry of the configuration; "a|b": one of them."""

    def given(c: Example) -> Any:
        if not any(getattr(c, name) for name in entry.split("|")):
            return None
        return _make(c, rule)

    return given


def _text_t5(c: Example) -> Tensor | None:
    width = c.text_embed_dim_t5 or c.cross_attention_dim_t5
    if isinstance(c.caption_channels, (list, tuple)):
        width = c.caption_channels[0]
    return c.tensor(c.text_len_t5 or c.text, width) if width else None


def _condition(c: Example) -> Tensor:
    """For ControlNets: in tokens, where they have positions."""
    more = c.extra_condition_channels or c.extra_conditioning_channels or 0
    channels = c.in_channels + more
    return c.tensor(c.tokens, channels) if c.axes_dims_rope else c.tensor(channels, *_size(c))


def _size(c: Example) -> tuple[int, int]:
    return c.height, c.width


def _more_channels(c: Example) -> Tensor | None:
    """The channels of the input that are no part of the output."""
    channels = c.in_channels - (c.out_channels or c.in_channels)
    return c.tensor(channels, c.frames, *_size(c)) if channels > 0 else None


def _text_ids(c: Example) -> Tensor:
    return c.whole().new_zeros(c.text, len(c.axes_dims_rope))


def _image_ids(c: Example, axes: int | None = None) -> Tensor:
    """Positions [tokens, axes]: row and column are the second and third axis everywhere."""
    more = [0] * ((axes or len(c.axes_dims_rope)) - 3)
    rows, columns = map(range, c.grid)
    return c.known([[0, row, column, *more] for row in rows for column in columns])


def _all_ids(c: Example) -> Tensor:
    """Positions [B, text + tokens, 3]: those of the image are far from those of the text."""
    text = c.count(c.text)[:, None].expand(-1, 3)
    return torch.cat([text, _image_ids(c, 3) + 65536]).expand(c.batch, -1, -1)


def _turns(c: Example, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [tokens, width], of rotary positions: all turns are by zero."""
    zeros = c.zeros(tokens, width).float()
    return zeros.cos(), zeros


def _image_rope(c: Example) -> Any:
    return _turns(c, c.tokens, c.attention_head_dim)


def _cogvideox_rope(c: Example) -> Any:
    if not c.use_rotary_positional_embeddings:
        return None
    return _turns(c, c.frames_of_tokens * c.tokens, c.attention_head_dim)


def _lumina_rope(c: Example) -> Tensor:
    """[384, 384, width], of which the model takes the rows and columns it has."""
    cos, sin = _turns(c, 384 * 384, c.hidden_size // c.num_attention_heads // 2)
    return torch.complex(cos, sin).view(384, 384, -1)


def _allegro_rope(c: Example) -> Any:
    """Tables for time, rows and columns, and the positions [1, tokens] in each."""
    lengths = (c.frames, *c.grid)
    tables = tuple(_turns(c, length, c.attention_head_dim // 3) for length in lengths)
    positions = torch.cartesian_prod(*(c.count(length) for length in lengths))
    return tables, tuple(axis[None] for axis in positions.T)


def _omnigen_mask(c: Example) -> Tensor:
    """[B, S, S]: text and time look back only, the picture looks at everything."""
    before, length = c.text + 1, c.text + 1 + c.tokens
    mask = c.whole(length, length, value=1).tril()
    mask[:, before:] = 1
    return mask


def _size_conditions(c: Example) -> Inputs:
    if not c.module.use_additional_conditions:
        return {"resolution": None, "aspect_ratio": None}
    return {"resolution": c.tensor(2), "aspect_ratio": c.tensor(1)}


_AUDIO_TOKENS = 126  # five seconds
_CLIP_TOKENS, _SIGLIP_TOKENS, _EVA_TOKENS = 257, 729, 577  # a picture for these encoders

# What an argument is, in whichever model has it.
_ARGUMENTS: dict[str, _Rule] = {
    **dict.fromkeys(("timestep", "timesteps", "t"), ""),
    "timestep_r": _where("use_meanflow", ""),
    "sigma": _where("cross_attn_mod|audio_cross_attn_mod", ""),
    "guidance": _where("guidance_embeds", ""),
    "fps": _where("inject_sample_info", lambda c: [0] * c.batch),
    "class_labels": lambda c: c.whole(value=1),
    # text
    "encoder_hidden_states": _TEXT,
    "encoder_hidden_states_t5": _text_t5,
    "encoder_hidden_states_llama3": lambda c: c.tensor(
        max(c.llama_layers) + 1, c.text, c.caption_channels[1]
    ).transpose(0, 1),
    **dict.fromkeys(
        ("encoder_attention_mask", "encoder_mask", "text_embedding_mask"), lambda c: c.mask(c.text)
    ),
    "text_embedding_mask_t5": lambda c: c.mask(c.text_len_t5),
    "pooled_projections": "pooled_projection_dim|in_text_dim2",
    "pooled_embeds": "text_emb_dim",
    "cap_feats": lambda c: list(c.tensor(c.text, c.cap_feat_dim)),
    "text_bth": "text text_in_dim",
    "text_lens": lambda c: c.whole(value=c.text),
    "text_encoder_layers": lambda c: [
        c.tensor(c.text, c.text_encoder_dim) for _ in range(c.num_layers + c.num_single_layers)
    ],
    "input_ids": lambda c: c.whole(c.text),
    # pictures and videos that the output depends on
    "x": lambda c: [picture[:, None] for picture in c.tensor(c.in_channels, *_size(c))],
    "encoder_hidden_states_image": f"{_CLIP_TOKENS} image_dim",
    "image_embeds": f"{_SIGLIP_TOKENS} image_embed_dim|image_proj_dim",
    "id_cond": _where("is_train_face", "LFE_id_dim"),
    "id_vit_hidden": _where(
        "is_train_face",
        lambda c: [c.tensor(_EVA_TOKENS, c.LFE_vit_dim) for _ in range(c.LFE_num_scale)],
    ),
    "controlnet_cond": _condition,
    "control_hidden_states": "vace_in_channels frames height width",
    "pose_hidden_states": lambda c: c.tensor(c.latent_channels, c.frames - 1, *_size(c)),
    "face_pixel_values": lambda c: c.tensor(
        3, 4 * (c.frames - 1), c.motion_encoder_size, c.motion_encoder_size
    ),
    "inpaint_latents": _more_channels,
    "padding_mask": _where("concat_padding_mask", lambda c: c.zeros(1, 1, *_size(c))),
    "prior_token_id": lambda c: c.whole(c.tokens),
    "prior_token_drop": lambda c: c.known([False] * c.batch),
    "input_img_latents": lambda c: [],
    "input_image_sizes": lambda c: {},
    "audio_hidden_states": f"{_AUDIO_TOKENS} audio_in_channels|in_audio_dim",
    # 16, 2 and 1 frames of the past, in smaller and smaller patches, and a picture or first frame
    **dict.fromkeys(("latents_history_4x", "latents_history_long"), _PAST),
    **dict.fromkeys(("latents_history_2x", "latents_history_mid"), _TWO_FRAMES),
    **dict.fromkeys(("latents_clean", "latents_history_short"), _TWO_FRAMES),
    "indices_latents_history_4x": lambda c: c.count(17, 1),
    "indices_latents_history_2x": lambda c: c.count(19, 17),
    "indices_latents_clean": lambda c: 19 * c.count(2),
    "indices_latents": lambda c: c.count(20 + c.frames, 20),
    "indices_latents_history_long": lambda c: c.counts(17, 1),
    "indices_latents_history_mid": lambda c: c.counts(19, 17),
    "indices_latents_history_short": lambda c: 19 * c.counts(2),
    "indices_hidden_states": lambda c: c.counts(20 + c.frames, 20),
    # sizes and positions
    "img_ids": _image_ids,
    "txt_ids": _text_ids,
    **dict.fromkeys(("img_shapes", "shape_list"), lambda c: [[(1, *c.grid)]] * c.batch),
    "img_mask": lambda c: c.known([[False] * c.text + [True] * (c.tokens // 4)] * c.batch),
    "segment_ids": lambda c: c.whole(c.sequence, value=1),
    "indicator": lambda c: c.known([[3] * c.text + [2] * c.tokens] * c.batch),
    **dict.fromkeys(
        ("original_size", "target_size"), lambda c: c.whole(2, value=c.height * PIXELS_PER_LATENT)
    ),
    "crop_coords": lambda c: c.whole(2),
    "image_meta_size": lambda c: c.whole(6, value=c.height * PIXELS_PER_LATENT),
    "style": lambda c: c.whole(),
    "num_frames": lambda c: c.frames,
    "height": lambda c: c.height,
    "width": lambda c: c.width,
    "audio_num_frames": lambda c: _AUDIO_TOKENS,
    "visual_rope_pos": lambda c: [c.count(length) for length in (c.frames, *c.grid)],
    "text_rope_pos": lambda c: c.count(c.text),
}

# Where a name means something else, or is needed in one model only.
_OWN: dict[str, dict[str, _Rule]] = {
    "AllegroTransformer3DModel": {"image_rotary_emb": _allegro_rope},
    "AnyFlowTransformer3DModel": {"timestep": "frames", "r_timestep": "frames"},
    "BriaFibo2Transformer2DModel": {
        "encoder_hidden_states": lambda c: c.tensor(
            len(c.injection_layer_ids) + 1, c.text, c.cap_feat_dim
        )
    },
    "ChromaTransformer2DModel": {"attention_mask": lambda c: c.mask(c.sequence)},
    "CogVideoXTransformer3DModel": {
        "image_rotary_emb": _cogvideox_rope,
        "ofs": _where("ofs_embed_dim", lambda c: c.whole(value=2)[:1]),
    },
    "ConsisIDTransformer3DModel": {"image_rotary_emb": _cogvideox_rope},
    "CosmosTransformer3DModel": {
        "encoder_hidden_states": lambda c: c.tensor(
            c.text, c.crossattn_proj_in_channels if c.use_crossattn_projection else c.text_embed_dim
        )
    },
    "EasyAnimateTransformer3DModel": {
        "hidden_states": "out_channels|in_channels frames height width"
    },
    "HiDreamImageTransformer2DModel": {"img_ids": lambda c: None},  # made by the model
    "HunyuanDiT2DModel": {"image_rotary_emb": _image_rope},
    "HunyuanDiT2DControlNetModel": {"image_rotary_emb": _image_rope},
    "HunyuanImageTransformer2DModel": {
        "hidden_states": lambda c: c.data(_IMAGE if len(c.patch_size) == 2 else _ONE_FRAME)
    },
    "HunyuanVideo15Transformer3DModel": {
        "encoder_hidden_states_2": "256 text_embed_2_dim",
        "encoder_attention_mask_2": lambda c: c.mask(256),
    },
    "Ideogram4Transformer2DModel": {
        "encoder_hidden_states": "sequence llm_features_dim",
        "position_ids": _all_ids,
    },
    "JoyImageEditTransformer3DModel": {"hidden_states": _ONE_FRAME},
    "Krea2Transformer2DModel": {
        "encoder_hidden_states": "text num_text_layers text_hidden_dim",
        "position_ids": lambda c: torch.cat([_text_ids(c), _image_ids(c)]),
    },
    "LTX2VideoTransformer3DModel": {
        "encoder_hidden_states": lambda c: c.tensor(
            c.text, c.caption_channels if c.use_prompt_embeddings else c.cross_attention_dim
        ),
        "audio_encoder_hidden_states": lambda c: c.tensor(
            c.text, c.caption_channels if c.use_prompt_embeddings else c.audio_cross_attention_dim
        ),
    },
    "LuminaNextDiT2DModel": {
        "image_rotary_emb": _lumina_rope,
        "cross_attention_kwargs": lambda c: {},  # None is the default, and an error
    },
    "NucleusMoEImageTransformer2DModel": {"img_shapes": lambda c: [(1, *c.grid)] * c.batch},
    "OmniGenTransformer2DModel": {
        "attention_mask": _omnigen_mask,
        "position_ids": lambda c: c.counts(c.text + 1 + c.tokens),
    },
    "PixArtTransformer2DModel": {"added_cond_kwargs": _size_conditions},
}
