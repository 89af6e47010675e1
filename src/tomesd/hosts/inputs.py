"""Inputs of the right shape for a model, to find out what it does at an image size.

UNets have a builder per class. The transformers of diffusers share the names of their arguments:
one table says what belongs to a name, and a row per class says what differs there.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .inputs_comfy import comfy_inputs
from .names import is_comfy

__all__ = ["example_inputs"]

_TEXT_TOKENS = 77
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
    for cls in type(module).__mro__:
        if cls.__name__ in _BUILDERS:
            return _BUILDERS[cls.__name__](module, size, batch)
        if cls.__name__ in _VIDEO_BUILDERS:
            return _VIDEO_BUILDERS[cls.__name__](module, size, batch, frames)
        if cls.__name__ in _TRANSFORMERS:
            return _transformer(module, cls, size, batch, frames, text)
    return None


def _tensor(module: nn.Module, *shape: int) -> Tensor:
    like = next(p for p in module.parameters() if p.is_floating_point())
    # Models of diffusers know better: a few of their parameters may stay in full precision.
    return torch.zeros(shape, device=like.device, dtype=getattr(module, "dtype", like.dtype))


def _steps(module: nn.Module, batch: int) -> Tensor:
    return torch.ones(batch, device=next(module.parameters()).device, dtype=torch.int64)


def _unet(module: Any, size: tuple[int, int], batch: int, frames: tuple[int, ...] = ()) -> Inputs:
    config = module.config
    width = config.get("encoder_hid_dim") or config["cross_attention_dim"]
    if isinstance(width, (list, tuple)):
        width = width[0]
    inputs: Inputs = {
        "sample": _tensor(module, batch, config["in_channels"], *frames, *size),
        "timestep": _steps(module, batch),
        "encoder_hidden_states": _tensor(module, batch, _TEXT_TOKENS, width),
    }
    if config.get("num_class_embeds") or config.get("class_embed_type") == "timestep":
        inputs["class_labels"] = _steps(module, batch)
    if config.get("addition_embed_type") == "text_time":
        ids = 6
        text = config["projection_class_embeddings_input_dim"]
        text -= ids * config["addition_time_embed_dim"]
        inputs["added_cond_kwargs"] = {
            "text_embeds": _tensor(module, batch, text),
            "time_ids": _tensor(module, batch, ids),
        }
    return inputs


def _video_unet(module: Any, size: tuple[int, int], batch: int, frames: int) -> Inputs:
    return _unet(module, size, batch, frames=(frames,))


def _motion_unet(module: Any, size: tuple[int, int], batch: int, frames: int) -> Inputs:
    inputs = _video_unet(module, size, batch, frames)
    text = inputs["encoder_hidden_states"]  # one caption per frame
    return {**inputs, "encoder_hidden_states": text.repeat_interleave(frames, dim=0)}


def _controlnet(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    channels = module.config.get("conditioning_channels", 3)
    pixels = (side * _PIXELS_PER_LATENT for side in size)
    condition = _tensor(module, batch, channels, *pixels)
    return {**_unet(module, size, batch), "controlnet_cond": condition}


def _multi_controlnet(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    inputs = _controlnet(module.nets[0], size, batch)
    count = len(module.nets)
    return {
        **inputs,
        "controlnet_cond": [inputs["controlnet_cond"]] * count,
        "conditioning_scale": [1.0] * count,
    }


def _svd(module: Any, size: tuple[int, int], batch: int, frames: int) -> Inputs:
    width = module.config["cross_attention_dim"]
    return {
        "sample": _tensor(module, batch, frames, module.config["in_channels"], *size),
        "timestep": _steps(module, batch),
        "encoder_hidden_states": _tensor(
            module, batch, 1, width if isinstance(width, int) else width[0]
        ),
        "added_time_ids": _tensor(module, batch, 3),
    }


def _dit(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    return {
        "hidden_states": _tensor(module, batch, module.config["in_channels"], *size),
        "timestep": _steps(module, batch),
        "class_labels": _steps(module, batch),
    }


def _pixart(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    inputs: Inputs = {
        "hidden_states": _tensor(module, batch, module.config["in_channels"], *size),
        "timestep": _steps(module, batch),
        "encoder_hidden_states": _tensor(
            module, batch, _TEXT_TOKENS, module.config["caption_channels"]
        ),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    if module.use_additional_conditions:
        inputs["added_cond_kwargs"] = {
            "resolution": _tensor(module, batch, 2),
            "aspect_ratio": _tensor(module, batch, 1),
        }
    return inputs


def _ldm_unet(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    inputs: Inputs = {
        "x": _tensor(module, batch, module.in_channels, *size),
        "timesteps": _steps(module, batch),
    }
    widths = [m.attn2.to_k.in_features for m in module.modules() if hasattr(m, "attn2")]
    if widths:
        inputs["context"] = _tensor(module, batch, _TEXT_TOKENS, widths[0])
    if module.num_classes is not None:
        label = module.label_emb
        dense = next((m for m in label.modules() if isinstance(m, nn.Linear)), None)
        inputs["y"] = (
            _steps(module, batch) if dense is None else _tensor(module, batch, dense.in_features)
        )
    return inputs


_BUILDERS: dict[str, Callable[[Any, tuple[int, int], int], Inputs]] = {
    "UNet2DConditionModel": _unet,
    "ControlNetModel": _controlnet,
    "MultiControlNetModel": _multi_controlnet,
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
    "UNetModel": _ldm_unet,
}
_VIDEO_BUILDERS: dict[str, Callable[[Any, tuple[int, int], int, int], Inputs]] = {
    "UNetMotionModel": _motion_unet,
    "UNet3DConditionModel": _video_unet,
    "UNetSpatioTemporalConditionModel": _svd,
}


@dataclass(frozen=True)
class _Call:
    """One call of a transformer, and tensors for it."""

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
        return _tensor(self.module, self.batch, *shape)

    def whole(self, *shape: int, value: int = 0) -> Tensor:
        """Integers [B, ...]."""
        return _steps(self.module, self.batch).new_full((self.batch, *shape), value)

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
        frames = self.frames if frames is None else frames
        return self.tensor(channels, frames, self.height, self.width)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens, of 2x2 pixels in all models that ask."""
        return self.height // 2, self.width // 2

    @property
    def tokens(self) -> int:
        """Tokens of one frame."""
        return math.prod(self.grid)


_Rule = Callable[[_Call], Any]


def _image(call: _Call) -> Tensor:
    return call.picture(call.in_channels)


def _packed(call: _Call) -> Tensor:
    """[B, tokens, channels]: the pipeline makes tokens of 2x2 pixels."""
    return call.tensor(call.tokens, call.in_channels)


def _video(call: _Call) -> Tensor:
    return call.video(call.in_channels)


def _packed_video(call: _Call) -> Tensor:
    return call.tensor(call.frames * call.height * call.width, call.in_channels)


def _frames_second(call: _Call) -> Tensor:
    """[B, frames, channels, height, width]; as many frames as make whole tokens."""
    frames = _frames_of_tokens(call) * (call.patch_size_t or 1)
    return call.tensor(frames, call.in_channels, call.height, call.width)


def _frames_of_tokens(call: _Call) -> int:
    return -(-call.frames // (call.patch_size_t or 1))


def _channels_last(call: _Call) -> Tensor:
    """[B, frames, height, width, channels]; behind the channels, a picture and where it is."""
    channels = call.in_visual_dim * 2 + 1 if call.visual_cond else call.in_visual_dim
    return call.tensor(call.frames, call.height, call.width, channels)


_TEXT_WIDTHS = (
    "joint_attention_dim",
    "caption_channels",
    "text_dim",
    "text_embed_dim",
    "cap_feat_dim",
    "context_in_dim",
    "in_text_dim",
    "cross_attention_dim",
)


def _text(call: _Call) -> Tensor:
    width = next(width for name in _TEXT_WIDTHS if (width := getattr(call, name)))
    return call.tensor(call.text, width)


def _text_t5(call: _Call) -> Tensor | None:
    width = call.text_embed_dim_t5 or call.cross_attention_dim_t5
    if isinstance(call.caption_channels, (list, tuple)):
        width = call.caption_channels[0]
    return call.tensor(call.text_len_t5 or call.text, width) if width else None


def _text_ids(call: _Call) -> Tensor:
    return call.whole().new_zeros(call.text, len(call.axes_dims_rope))


def _image_ids(call: _Call) -> Tensor:
    """Positions [tokens, axes]: row and column are the second and third axis everywhere."""
    rows, columns = call.grid
    more = [0] * (len(call.axes_dims_rope) - 3)
    return call.known([[0, row, column, *more] for row in range(rows) for column in range(columns)])


def _turns(call: _Call, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [tokens, width], of rotary positions: all turns are by zero."""
    zeros = _tensor(call.module, tokens, width).float()
    return zeros.cos(), zeros


def _cogvideox_rope(call: _Call) -> Any:
    if not call.use_rotary_positional_embeddings:
        return None
    return _turns(call, _frames_of_tokens(call) * call.tokens, call.attention_head_dim)


def _lumina_rope(call: _Call) -> Tensor:
    """[384, 384, width], of which the model takes the rows and columns it has."""
    cos, sin = _turns(call, 384 * 384, call.hidden_size // call.num_attention_heads // 2)
    return torch.complex(cos, sin).view(384, 384, -1)


def _allegro_rope(call: _Call) -> Any:
    """Tables for time, rows and columns, and the positions [1, tokens] in each."""
    lengths = (call.frames, *call.grid)
    tables = tuple(_turns(call, length, call.attention_head_dim // 3) for length in lengths)
    positions = torch.cartesian_prod(*(call.count(length) for length in lengths))
    return tables, tuple(axis[None] for axis in positions.T)


def _omnigen_mask(call: _Call) -> Tensor:
    """[B, S, S]: text and time look back only, the picture looks at everything."""
    before, length = call.text + 1, call.text + 1 + call.tokens
    mask = call.whole(length, length, value=1).tril()
    mask[:, before:] = 1
    return mask


_AUDIO_TOKENS = 126  # five seconds
_CLIP_TOKENS, _SIGLIP_TOKENS, _EVA_TOKENS = 257, 729, 577  # a picture for these encoders

# What an argument is, in whichever model has it: a rule that answers None leaves it out.
_ARGUMENTS: dict[str, _Rule] = {
    "timestep": lambda c: c.tensor(),
    "timesteps": lambda c: c.tensor(),
    "t": lambda c: c.tensor(),
    "timestep_r": lambda c: c.tensor() if c.use_meanflow else None,
    "sigma": lambda c: c.tensor() if c.cross_attn_mod or c.audio_cross_attn_mod else None,
    "guidance": lambda c: c.tensor() if c.guidance_embeds else None,
    "fps": lambda c: [0] * c.batch if c.inject_sample_info else None,
    # text
    "encoder_hidden_states": _text,
    "encoder_hidden_states_t5": _text_t5,
    "encoder_hidden_states_llama3": lambda c: c.tensor(
        max(c.llama_layers) + 1, c.text, c.caption_channels[1]
    ).transpose(0, 1),
    "encoder_attention_mask": lambda c: c.mask(c.text),
    "encoder_mask": lambda c: c.mask(c.text),
    "text_embedding_mask": lambda c: c.mask(c.text),
    "text_embedding_mask_t5": lambda c: c.mask(c.text_len_t5),
    "pooled_projections": lambda c: (
        c.tensor(width) if (width := c.pooled_projection_dim or c.in_text_dim2) else None
    ),
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
    "encoder_hidden_states_image": lambda c: (
        c.tensor(_CLIP_TOKENS, c.image_dim) if c.image_dim else None
    ),
    "image_embeds": lambda c: (
        c.tensor(_SIGLIP_TOKENS, width)
        if (width := c.image_embed_dim or c.image_proj_dim)
        else None
    ),
    "id_cond": lambda c: c.tensor(c.LFE_id_dim) if c.is_train_face else None,
    "id_vit_hidden": lambda c: (
        [c.tensor(_EVA_TOKENS, c.LFE_vit_dim) for _ in range(c.LFE_num_scale)]
        if c.is_train_face
        else None
    ),
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
    "audio_hidden_states": lambda c: c.tensor(_AUDIO_TOKENS, c.audio_in_channels),
    # Framepack: a picture, and 16 + 2 + 1 frames of the past in smaller and smaller patches
    "latents_clean": lambda c: c.video(c.in_channels, 2),
    "latents_history_2x": lambda c: c.video(c.in_channels, 2),
    "latents_history_4x": lambda c: c.video(c.in_channels, 16),
    "indices_latents_history_4x": lambda c: c.count(17, 1),
    "indices_latents_history_2x": lambda c: c.count(19, 17),
    "indices_latents_clean": lambda c: 19 * c.count(2),
    "indices_latents": lambda c: c.count(20 + c.frames, 20),
    # sizes and positions
    "img_ids": _image_ids,
    "txt_ids": _text_ids,
    "img_shapes": lambda c: [[(1, *c.grid)]] * c.batch,
    "original_size": lambda c: c.whole(2, value=c.height * _PIXELS_PER_LATENT),
    "target_size": lambda c: c.whole(2, value=c.height * _PIXELS_PER_LATENT),
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
# Given where the model insists on it: without a mask, nothing is hidden.
_MASKS = {"encoder_attention_mask"}

# The main input, and how many tokens the pipeline makes of a text.
_TRANSFORMERS: dict[str, tuple[_Rule, int]] = {
    "AuraFlowTransformer2DModel": (_image, 256),
    "BriaFiboTransformer2DModel": (_packed, 1024),
    "BriaTransformer2DModel": (_packed, 128),
    "ChromaTransformer2DModel": (_packed, 512),
    "CogView3PlusTransformer2DModel": (_image, 224),
    "CogView4Transformer2DModel": (_image, 224),
    "ErnieImageTransformer2DModel": (_image, 128),
    "Flux2Transformer2DModel": (_packed, 512),
    "Flux3Transformer2DModel": (_packed, 512),
    "FluxTransformer2DModel": (_packed, 512),
    "GlmImageTransformer2DModel": (_image, 64),
    "HiDreamImageTransformer2DModel": (_image, 128),
    "HunyuanDiT2DModel": (_image, 77),
    "HunyuanImageTransformer2DModel": (
        lambda c: _image(c) if len(c.patch_size) == 2 else c.video(c.in_channels, 1),
        1000,
    ),
    "JoyImageEditTransformer3DModel": (lambda c: c.video(c.in_channels, 1), 512),
    "Krea2Transformer2DModel": (_packed, 512),
    "LongCatImageTransformer2DModel": (_packed, 512),
    "Lumina2Transformer2DModel": (_image, 256),
    "LuminaNextDiT2DModel": (_image, 256),
    "NucleusMoEImageTransformer2DModel": (_packed, 256),
    "OmniGenTransformer2DModel": (_image, 128),
    "OvisImageTransformer2DModel": (_packed, 256),
    "PRXTransformer2DModel": (_image, 256),
    "QwenImageTransformer2DModel": (_packed, 256),
    "SD3Transformer2DModel": (_image, 333),
    "SanaTransformer2DModel": (_image, 300),
    "ZImageTransformer2DModel": (_image, 128),
    # ControlNets
    "FluxControlNetModel": (_packed, 512),
    "QwenImageControlNetModel": (_packed, 256),
    "SD3ControlNetModel": (_image, 333),
    # videos
    "AllegroTransformer3DModel": (_video, 512),
    "ChronoEditTransformer3DModel": (_video, 512),
    "CogVideoXTransformer3DModel": (_frames_second, 226),
    "ConsisIDTransformer3DModel": (_frames_second, 226),
    "CosmosTransformer3DModel": (_video, 512),
    "EasyAnimateTransformer3DModel": (lambda c: c.video(c.out_channels or c.in_channels), 256),
    "HunyuanVideo15Transformer3DModel": (_video, 1000),
    "HunyuanVideoFramepackTransformer3DModel": (_video, 256),
    "HunyuanVideoTransformer3DModel": (_video, 256),
    "Kandinsky5Transformer3DModel": (_channels_last, 256),
    "LTX2VideoTransformer3DModel": (_packed_video, 1024),
    "LTXVideoTransformer3DModel": (_packed_video, 128),
    "LatteTransformer3DModel": (lambda c: c.video(c.in_channels, c.video_length), 120),
    "MochiTransformer3DModel": (_video, 256),
    "MotifVideoTransformer3DModel": (_video, 512),
    "SkyReelsV2Transformer3DModel": (_video, 512),
    "WanAnimateTransformer3DModel": (_video, 512),
    "WanTransformer3DModel": (_video, 512),
    "WanVACETransformer3DModel": (_video, 512),
}

# Where a name means something else, or is needed in one model only.
_OWN: dict[str, dict[str, _Rule]] = {
    "AllegroTransformer3DModel": {"image_rotary_emb": _allegro_rope},
    "ChromaTransformer2DModel": {"attention_mask": lambda c: c.mask(c.text + c.tokens)},
    "CogVideoXTransformer3DModel": {
        "image_rotary_emb": _cogvideox_rope,
        "ofs": lambda c: c.whole(value=2)[:1] if c.ofs_embed_dim else None,
    },
    "ConsisIDTransformer3DModel": {"image_rotary_emb": _cogvideox_rope},
    "CosmosTransformer3DModel": {
        "encoder_hidden_states": lambda c: c.tensor(
            c.text,
            c.crossattn_proj_in_channels if c.use_crossattn_projection else c.text_embed_dim,
        )
    },
    "HiDreamImageTransformer2DModel": {"img_ids": lambda c: None},  # made by the model
    "HunyuanDiT2DModel": {"image_rotary_emb": lambda c: _turns(c, c.tokens, c.attention_head_dim)},
    "FluxControlNetModel": {"controlnet_cond": _packed},
    "HunyuanVideo15Transformer3DModel": {
        "encoder_hidden_states_2": lambda c: c.tensor(256, c.text_embed_2_dim),
        "encoder_attention_mask_2": lambda c: c.mask(256),
    },
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
    "QwenImageControlNetModel": {
        "controlnet_cond": lambda c: c.tensor(
            c.tokens, c.in_channels + (c.extra_condition_channels or 0)
        )
    },
    "SD3ControlNetModel": {
        "controlnet_cond": lambda c: c.picture(c.in_channels + (c.extra_conditioning_channels or 0))
    },
    "OmniGenTransformer2DModel": {
        "attention_mask": _omnigen_mask,
        "position_ids": lambda c: c.count(c.text + 1 + c.tokens).expand(c.batch, -1),
    },
}


def _transformer(
    module: Any, cls: Any, size: tuple[int, int], batch: int, frames: int, text: int | None
) -> Inputs:
    hidden_states, usual = _TRANSFORMERS[cls.__name__]
    # Some have positions for a text of one length only.
    fixed = module.config.get("max_text_seq_length") or module.config.get("text_len")
    call = _Call(module, batch, *size, frames, fixed or text or usual)
    rules = {**_ARGUMENTS, "hidden_states": hidden_states, **_OWN.get(cls.__name__, {})}
    inputs = {}
    for name, parameter in inspect.signature(cls.forward).parameters.items():
        optional = parameter.default is not inspect.Parameter.empty
        if name in rules and not (name in _MASKS and optional):
            value = rules[name](call)
            if value is not None or not optional:
                inputs[name] = value
    return inputs
