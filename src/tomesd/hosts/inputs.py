"""Inputs of the right shape for a model, to find out what it does at an image size.

UNets have a builder per class. The transformers of diffusers share the names of their arguments:
one table says what belongs to a name, and another what differs in a class.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from . import layouts as at
from .inputs_comfy import comfy_inputs
from .names import is_comfy
from .transformers import find_row

__all__ = ["example_inputs"]

_FRAMES = 8
_PIXELS_PER_LATENT = 8

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
        module: a UNet or transformer of diffusers, or a UNet of ldm.
        size: height and width in latent pixels, before any of them become one token.
        batch: of the call.
        frames: latent frames of a video; models of images ignore it.
        text: tokens of text for a transformer; as many as its pipeline makes, if None.
    """
    if is_comfy(module) and (inputs := comfy_inputs(module, size, batch, frames, text)) is not None:
        return inputs
    call = _Call(module, batch, *size, frames, text or 77)
    for cls in type(module).__mro__:
        if cls.__name__ in _UNETS:
            return _UNETS[cls.__name__](replace(call, text=77))
        if cls.__name__ in _DIT:
            return _inputs(call, cls, _image)
    row = find_row(module)
    if row is None:
        return None
    cls = next(c for c in type(module).__mro__ if c.__name__ == row.name)
    usual = next((count for count, names in _TEXTS.items() if row.name in names), 512)
    # Some have positions for a text of one length only.
    fixed = call.max_text_seq_length or call.text_len
    return _inputs(replace(call, text=fixed or text or usual), cls, _MAIN.get(row.layout, _image))


@dataclass(frozen=True)
class _Call:
    """One call of a model, and tensors for it."""

    module: Any
    batch: int
    height: int  # in latent pixels, as width
    width: int
    frames: int
    text: int  # tokens of text

    def __getattr__(self, name: str) -> Any:
        """An entry of the model's configuration; None if it has none."""
        return self.module.config.get(name)

    def tensor(self, *shape: int) -> Tensor:
        """Data [B, ...]."""
        return self.zeros(self.batch, *shape)

    def zeros(self, *shape: int) -> Tensor:
        like = next(p for p in self.module.parameters() if p.is_floating_point())
        # Models of diffusers know better: a few of their parameters may stay in full precision.
        dtype = getattr(self.module, "dtype", like.dtype)
        return torch.zeros(shape, device=like.device, dtype=dtype)

    def whole(self, *shape: int, value: int = 0) -> Tensor:
        """Integers [B, ...]."""
        device = next(self.module.parameters()).device
        return torch.full((self.batch, *shape), value, device=device, dtype=torch.int64)

    def known(self, values: Any) -> Tensor:
        """A tensor whose values a model can read even when it runs on shapes without data."""
        return torch.tensor(values, device=next(self.module.parameters()).device)

    def mask(self, tokens: int) -> Tensor:
        """A mask [B, tokens] that hides nothing."""
        return self.known([[True] * tokens] * self.batch)

    def count(self, stop: int, start: int = 0) -> Tensor:
        """start ... stop - 1."""
        return self.known(list(range(start, stop)))

    def picture(self, channels: int) -> Tensor:
        """[B, channels, height, width]."""
        return self.tensor(channels, self.height, self.width)

    def video(self, channels: int, frames: int | None = None) -> Tensor:
        """[B, channels, frames, height, width]."""
        return self.tensor(channels, frames or self.frames, self.height, self.width)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens, of 2x2 pixels in all models that ask."""
        return self.height // 2, self.width // 2

    @property
    def tokens(self) -> int:
        """Tokens of one frame."""
        return math.prod(self.grid)

    @property
    def frames_of_tokens(self) -> int:
        return -(-self.frames // (self.patch_size_t or 1))


_Rule = Callable[[_Call], Any]


def _unet(c: _Call, *frames: int) -> Inputs:
    width = c.encoder_hid_dim or c.cross_attention_dim
    inputs: Inputs = {
        "sample": c.tensor(c.in_channels, *frames, c.height, c.width),
        "timestep": c.whole(value=1),
        "encoder_hidden_states": c.tensor(c.text, width if isinstance(width, int) else width[0]),
    }
    if c.num_class_embeds or c.class_embed_type == "timestep":
        inputs["class_labels"] = c.whole(value=1)
    if c.addition_embed_type == "text_time":
        ids = 6
        text = c.projection_class_embeddings_input_dim - ids * c.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {"text_embeds": c.tensor(text), "time_ids": c.tensor(ids)}
    return inputs


def _motion_unet(c: _Call) -> Inputs:
    inputs = _unet(c, c.frames)
    text = inputs["encoder_hidden_states"]  # one caption per frame
    return {**inputs, "encoder_hidden_states": text.repeat_interleave(c.frames, dim=0)}


def _controlnet(c: _Call) -> Inputs:
    pixels = (side * _PIXELS_PER_LATENT for side in (c.height, c.width))
    return {**_unet(c), "controlnet_cond": c.tensor(c.conditioning_channels or 3, *pixels)}


def _multi_controlnet(c: _Call) -> Inputs:
    inputs, count = _controlnet(replace(c, module=c.module.nets[0])), len(c.module.nets)
    given = {"controlnet_cond": [inputs["controlnet_cond"]] * count}
    return {**inputs, **given, "conditioning_scale": [1.0] * count}


def _svd(c: _Call) -> Inputs:
    inputs = _unet(replace(c, text=1), c.frames)
    sample = inputs["sample"].transpose(1, 2)
    return {**inputs, "sample": sample, "added_time_ids": c.tensor(3)}


def _ldm_unet(c: _Call) -> Inputs:
    module = c.module
    inputs: Inputs = {"x": c.picture(module.in_channels), "timesteps": c.whole(value=1)}
    widths = [m.attn2.to_k.in_features for m in module.modules() if hasattr(m, "attn2")]
    if widths:
        inputs["context"] = c.tensor(c.text, widths[0])
    if module.num_classes is not None:
        dense = next((m for m in module.label_emb.modules() if isinstance(m, nn.Linear)), None)
        inputs["y"] = c.whole(value=1) if dense is None else c.tensor(dense.in_features)
    return inputs


_UNETS: dict[str, Callable[[_Call], Inputs]] = {
    "UNet2DConditionModel": _unet,
    "ControlNetModel": _controlnet,
    "MultiControlNetModel": _multi_controlnet,
    "UNetModel": _ldm_unet,
    "UNetMotionModel": _motion_unet,
    "UNet3DConditionModel": lambda c: _unet(c, c.frames),
    "UNetSpatioTemporalConditionModel": _svd,
}
_DIT = ("DiTTransformer2DModel", "PixArtTransformer2DModel")


def _inputs(call: _Call, cls: type, main: _Rule) -> Inputs:
    """What a transformer's forward asks for, as far as there is a rule for it."""
    rules = {**_ARGUMENTS, "hidden_states": main, **_OWN.get(cls.__name__, {})}
    inputs = {}
    for name, parameter in inspect.signature(cls.forward).parameters.items():  # type: ignore
        optional = parameter.default is not inspect.Parameter.empty
        if name in rules and not (name == "encoder_attention_mask" and optional):
            value = rules[name](call)
            if value is not None or not optional:
                inputs[name] = value
    return inputs


def _image(c: _Call) -> Tensor:
    return c.picture(c.in_channels)


def _packed(c: _Call) -> Tensor:
    """[B, tokens, channels]: the pipeline makes tokens of 2x2 pixels."""
    return c.tensor(c.tokens, c.in_channels)


def _video(c: _Call) -> Tensor:
    return c.video(c.in_channels)


def _frames_second(c: _Call) -> Tensor:
    """[B, frames, channels, height, width]; as many frames as make whole tokens."""
    frames = c.frames_of_tokens * (c.patch_size_t or 1)
    return c.tensor(frames, c.in_channels, c.height, c.width)


def _channels_last(c: _Call) -> Tensor:
    """[B, frames, height, width, channels]; behind the channels, a picture and where it is."""
    channels = c.in_visual_dim * 2 + 1 if c.visual_cond else c.in_visual_dim
    return c.tensor(c.frames, c.height, c.width, channels)


# The main input, by how it is read; `_image` for the others.
_MAIN: dict[Any, _Rule] = {
    **dict.fromkeys((at.from_ids, at.from_flux2, at.from_flux3), _packed),
    **dict.fromkeys((at.from_qwen, at.from_qwen21, at.from_nucleus), _packed),
    at.from_krea2: _packed,
    at.from_video: _video,
    at.from_hunyuan_video: _video,
    at.from_frames: lambda c: c.video(c.in_channels, c.video_length),
    at.from_frames_first: _frames_second,
    at.from_channels_last: _channels_last,
    at.from_ltx: lambda c: c.tensor(c.frames * c.height * c.width, c.in_channels),
    at.from_ideogram4: lambda c: c.tensor(c.text + c.tokens, c.in_channels),
    at.from_joy_image_plus: lambda c: c.tensor(c.tokens, c.in_channels, 1, 2, 2),
}

# How many tokens pipelines make of a text; 512, where nothing is said.
_TEXTS = {
    64: ("GlmImageTransformer2DModel",),
    77: ("HunyuanDiT2DModel", "HunyuanDiT2DControlNetModel"),
    120: ("LatteTransformer3DModel",),
    128: (
        "BriaTransformer2DModel", "ErnieImageTransformer2DModel", "HiDreamImageTransformer2DModel",
        "LTXVideoTransformer3DModel", "OmniGenTransformer2DModel", "ZImageTransformer2DModel",
    ),
    224: ("CogView3PlusTransformer2DModel", "CogView4Transformer2DModel"),
    226: ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"),
    256: (
        "AuraFlowTransformer2DModel", "EasyAnimateTransformer3DModel",
        "HunyuanVideoFramepackTransformer3DModel", "HunyuanVideoTransformer3DModel",
        "Kandinsky5Transformer3DModel", "Lumina2Transformer2DModel", "LuminaNextDiT2DModel",
        "MochiTransformer3DModel", "NucleusMoEImageTransformer2DModel",
        "OvisImageTransformer2DModel", "PRXTransformer2DModel", "QwenImageControlNetModel",
        "QwenImageTransformer2DModel",
    ),
    300: ("SanaTransformer2DModel",),
    333: ("SD3ControlNetModel", "SD3Transformer2DModel"),
    1000: ("HunyuanImageTransformer2DModel", "HunyuanVideo15Transformer3DModel"),
    1024: (
        "BriaFibo2Transformer2DModel", "BriaFiboTransformer2DModel", "LTX2VideoTransformer3DModel",
    ),
}  # fmt: skip

_TEXT_WIDTHS = (
    "joint_attention_dim", "caption_channels", "text_dim", "text_embed_dim", "cap_feat_dim",
    "context_in_dim", "in_text_dim", "cross_attention_dim",
)  # fmt: skip


def _text(c: _Call) -> Tensor:
    return c.tensor(c.text, next(width for n in _TEXT_WIDTHS if (width := getattr(c, n))))


def _text_t5(c: _Call) -> Tensor | None:
    width = c.text_embed_dim_t5 or c.cross_attention_dim_t5
    if isinstance(c.caption_channels, (list, tuple)):
        width = c.caption_channels[0]
    return c.tensor(c.text_len_t5 or c.text, width) if width else None


def _if_any(width: int | None, c: _Call, *shape: int) -> Tensor | None:
    return c.tensor(*shape, width) if width else None


def _condition(c: _Call) -> Tensor:
    """For ControlNets: in tokens, where they have positions."""
    more = c.extra_condition_channels or c.extra_conditioning_channels or 0
    channels = c.in_channels + more
    return c.tensor(c.tokens, channels) if c.axes_dims_rope else c.picture(channels)


def _text_ids(c: _Call) -> Tensor:
    return c.whole().new_zeros(c.text, len(c.axes_dims_rope))


def _image_ids(c: _Call, axes: int | None = None) -> Tensor:
    """Positions [tokens, axes]: row and column are the second and third axis everywhere."""
    more = [0] * ((axes or len(c.axes_dims_rope)) - 3)
    rows, columns = map(range, c.grid)
    return c.known([[0, row, column, *more] for row in rows for column in columns])


def _all_ids(c: _Call) -> Tensor:
    """Positions [B, text + tokens, 3]: those of the image are far from those of the text."""
    text = c.count(c.text)[:, None].expand(-1, 3)
    return torch.cat([text, _image_ids(c, 3) + 65536]).expand(c.batch, -1, -1)


def _turns(c: _Call, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [tokens, width], of rotary positions: all turns are by zero."""
    zeros = c.zeros(tokens, width).float()
    return zeros.cos(), zeros


def _image_rope(c: _Call) -> Any:
    return _turns(c, c.tokens, c.attention_head_dim)


def _cogvideox_rope(c: _Call) -> Any:
    if not c.use_rotary_positional_embeddings:
        return None
    return _turns(c, c.frames_of_tokens * c.tokens, c.attention_head_dim)


def _lumina_rope(c: _Call) -> Tensor:
    """[384, 384, width], of which the model takes the rows and columns it has."""
    cos, sin = _turns(c, 384 * 384, c.hidden_size // c.num_attention_heads // 2)
    return torch.complex(cos, sin).view(384, 384, -1)


def _allegro_rope(c: _Call) -> Any:
    """Tables for time, rows and columns, and the positions [1, tokens] in each."""
    lengths = (c.frames, *c.grid)
    tables = tuple(_turns(c, length, c.attention_head_dim // 3) for length in lengths)
    positions = torch.cartesian_prod(*(c.count(length) for length in lengths))
    return tables, tuple(axis[None] for axis in positions.T)


def _omnigen_mask(c: _Call) -> Tensor:
    """[B, S, S]: text and time look back only, the picture looks at everything."""
    before, length = c.text + 1, c.text + 1 + c.tokens
    mask = c.whole(length, length, value=1).tril()
    mask[:, before:] = 1
    return mask


def _size_conditions(c: _Call) -> Inputs:
    if not c.module.use_additional_conditions:
        return {"resolution": None, "aspect_ratio": None}
    return {"resolution": c.tensor(2), "aspect_ratio": c.tensor(1)}


_AUDIO_TOKENS = 126  # five seconds
_CLIP_TOKENS, _SIGLIP_TOKENS, _EVA_TOKENS = 257, 729, 577  # a picture for these encoders

# What an argument is, in whichever model has it: a rule that answers None leaves it out.
_ARGUMENTS: dict[str, _Rule] = {
    **dict.fromkeys(("timestep", "timesteps", "t"), lambda c: c.tensor()),
    "timestep_r": lambda c: c.tensor() if c.use_meanflow else None,
    "sigma": lambda c: c.tensor() if c.cross_attn_mod or c.audio_cross_attn_mod else None,
    "guidance": lambda c: c.tensor() if c.guidance_embeds else None,
    "fps": lambda c: [0] * c.batch if c.inject_sample_info else None,
    "class_labels": lambda c: c.whole(value=1),
    # text
    "encoder_hidden_states": _text,
    "encoder_hidden_states_t5": _text_t5,
    "encoder_hidden_states_llama3": lambda c: c.tensor(
        max(c.llama_layers) + 1, c.text, c.caption_channels[1]
    ).transpose(0, 1),
    **dict.fromkeys(
        ("encoder_attention_mask", "encoder_mask", "text_embedding_mask"), lambda c: c.mask(c.text)
    ),
    "text_embedding_mask_t5": lambda c: c.mask(c.text_len_t5),
    "pooled_projections": lambda c: _if_any(c.pooled_projection_dim or c.in_text_dim2, c),
    "pooled_embeds": lambda c: c.tensor(c.text_emb_dim),
    "cap_feats": lambda c: list(c.tensor(c.text, c.cap_feat_dim)),
    "text_bth": lambda c: c.tensor(c.text, c.text_in_dim),
    "text_lens": lambda c: c.whole(value=c.text),
    "text_encoder_layers": lambda c: [
        c.tensor(c.text, c.text_encoder_dim) for _ in range(c.num_layers + c.num_single_layers)
    ],
    "input_ids": lambda c: c.whole(c.text),
    # pictures and videos that the output depends on
    "x": lambda c: [picture[:, None] for picture in _image(c)],
    "encoder_hidden_states_image": lambda c: _if_any(c.image_dim, c, _CLIP_TOKENS),
    "image_embeds": lambda c: _if_any(c.image_embed_dim or c.image_proj_dim, c, _SIGLIP_TOKENS),
    "id_cond": lambda c: c.tensor(c.LFE_id_dim) if c.is_train_face else None,
    "id_vit_hidden": lambda c: (
        [c.tensor(_EVA_TOKENS, c.LFE_vit_dim) for _ in range(c.LFE_num_scale)]
        if c.is_train_face
        else None
    ),
    "controlnet_cond": _condition,
    "control_hidden_states": lambda c: c.video(c.vace_in_channels),
    "pose_hidden_states": lambda c: c.video(c.latent_channels, c.frames - 1),
    "face_pixel_values": lambda c: c.tensor(
        3, 4 * (c.frames - 1), c.motion_encoder_size, c.motion_encoder_size
    ),
    "inpaint_latents": lambda c: (
        c.video(left) if (left := c.in_channels - (c.out_channels or c.in_channels)) > 0 else None
    ),
    "padding_mask": lambda c: c.picture(1)[:1] if c.concat_padding_mask else None,
    "prior_token_id": lambda c: c.whole(c.tokens),
    "prior_token_drop": lambda c: c.known([False] * c.batch),
    "input_img_latents": lambda c: [],
    "input_image_sizes": lambda c: {},
    "audio_hidden_states": lambda c: c.tensor(_AUDIO_TOKENS, c.audio_in_channels or c.in_audio_dim),
    # Framepack: a picture, and 16 + 2 + 1 frames of the past in smaller and smaller patches
    "latents_clean": lambda c: c.video(c.in_channels, 2),
    "latents_history_2x": lambda c: c.video(c.in_channels, 2),
    "latents_history_4x": lambda c: c.video(c.in_channels, 16),
    "indices_latents_history_4x": lambda c: c.count(17, 1),
    "indices_latents_history_2x": lambda c: c.count(19, 17),
    "indices_latents_clean": lambda c: 19 * c.count(2),
    "indices_latents": lambda c: c.count(20 + c.frames, 20),
    # Helios: 16, 2 and 1 frames of the past and the first one
    "latents_history_long": lambda c: c.video(c.in_channels, 16),
    "latents_history_mid": lambda c: c.video(c.in_channels, 2),
    "latents_history_short": lambda c: c.video(c.in_channels, 2),
    "indices_latents_history_long": lambda c: c.count(17, 1).expand(c.batch, -1),
    "indices_latents_history_mid": lambda c: c.count(19, 17).expand(c.batch, -1),
    "indices_latents_history_short": lambda c: 19 * c.count(2).expand(c.batch, -1),
    "indices_hidden_states": lambda c: c.count(20 + c.frames, 20).expand(c.batch, -1),
    # sizes and positions
    "img_ids": _image_ids,
    "txt_ids": _text_ids,
    "img_shapes": lambda c: [[(1, *c.grid)]] * c.batch,
    "img_mask": lambda c: c.known([[False] * c.text + [True] * (c.tokens // 4)] * c.batch),
    "shape_list": lambda c: [[(1, *c.grid)]] * c.batch,
    "segment_ids": lambda c: c.whole(c.text + c.tokens, value=1),
    "indicator": lambda c: c.known([[3] * c.text + [2] * c.tokens] * c.batch),
    **dict.fromkeys(
        ("original_size", "target_size"), lambda c: c.whole(2, value=c.height * _PIXELS_PER_LATENT)
    ),
    "crop_coords": lambda c: c.whole(2),
    "image_meta_size": lambda c: c.whole(6, value=c.height * _PIXELS_PER_LATENT),
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
    "AnyFlowTransformer3DModel": dict.fromkeys(
        ("timestep", "r_timestep"), lambda c: c.tensor(c.frames)
    ),
    "BriaFibo2Transformer2DModel": {
        "encoder_hidden_states": lambda c: c.tensor(
            len(c.injection_layer_ids) + 1, c.text, c.cap_feat_dim
        )
    },
    "ChromaTransformer2DModel": {"attention_mask": lambda c: c.mask(c.text + c.tokens)},
    "CogVideoXTransformer3DModel": {
        "image_rotary_emb": _cogvideox_rope,
        "ofs": lambda c: c.whole(value=2)[:1] if c.ofs_embed_dim else None,
    },
    "ConsisIDTransformer3DModel": {"image_rotary_emb": _cogvideox_rope},
    "CosmosTransformer3DModel": {
        "encoder_hidden_states": lambda c: c.tensor(
            c.text, c.crossattn_proj_in_channels if c.use_crossattn_projection else c.text_embed_dim
        )
    },
    "EasyAnimateTransformer3DModel": {
        "hidden_states": lambda c: c.video(c.out_channels or c.in_channels)
    },
    "HiDreamImageTransformer2DModel": {"img_ids": lambda c: None},  # made by the model
    "HunyuanDiT2DModel": {"image_rotary_emb": _image_rope},
    "HunyuanDiT2DControlNetModel": {"image_rotary_emb": _image_rope},
    "HunyuanImageTransformer2DModel": {
        "hidden_states": lambda c: (
            _image(c) if len(c.patch_size) == 2 else c.video(c.in_channels, 1)
        )
    },
    "HunyuanVideo15Transformer3DModel": {
        "encoder_hidden_states_2": lambda c: c.tensor(256, c.text_embed_2_dim),
        "encoder_attention_mask_2": lambda c: c.mask(256),
    },
    "Ideogram4Transformer2DModel": {
        "encoder_hidden_states": lambda c: c.tensor(c.text + c.tokens, c.llm_features_dim),
        "position_ids": _all_ids,
    },
    "JoyImageEditTransformer3DModel": {"hidden_states": lambda c: c.video(c.in_channels, 1)},
    "Krea2Transformer2DModel": {
        "encoder_hidden_states": lambda c: c.tensor(c.text, c.num_text_layers, c.text_hidden_dim),
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
        "position_ids": lambda c: c.count(c.text + 1 + c.tokens).expand(c.batch, -1),
    },
    "PixArtTransformer2DModel": {"added_cond_kwargs": _size_conditions},
}
