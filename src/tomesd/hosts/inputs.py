"""Inputs of the right shape for a model, to find out what it does at an image size.

UNets have a builder per class. The transformers of diffusers share the names of their arguments:
one table says what belongs to a name, and a row per class says what differs there.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
    has to be as it is, positions and masks, is of integers or booleans, or inside tuples.

    Args:
        module: a UNet or transformer of diffusers, or a UNet of ldm.
        size: height and width in latent pixels, before any of them become one token.
        batch: of the call.
        frames: latent frames of a video; models of images ignore it.
        text: tokens of text for a transformer; as many as its pipeline makes, if None.
    """
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
    return torch.zeros(shape, device=like.device, dtype=like.dtype)


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

    def whole(self, *shape: int, value: int = 1) -> Tensor:
        """Integers [B, ...]."""
        device = next(self.module.parameters()).device
        return torch.full((self.batch, *shape), value, device=device)

    def mask(self, tokens: int) -> Tensor:
        """A mask [B, tokens] that hides nothing."""
        return self.whole(tokens).bool()

    def grid(self, patch: int = 2) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return self.height // patch, self.width // patch

    def picture(self, channels: int) -> Tensor:
        """[B, channels, height, width]."""
        return self.tensor(channels, self.height, self.width)

    def video(self, channels: int, frames: int | None = None) -> Tensor:
        """[B, channels, frames, height, width]."""
        frames = self.frames if frames is None else frames
        return self.tensor(channels, frames, self.height, self.width)


_Rule = Callable[[_Call], Any]


def _image(call: _Call) -> Tensor:
    return call.picture(call.in_channels)


def _packed(call: _Call) -> Tensor:
    """[B, rows * columns, channels], for models whose pipeline makes tokens of 2x2 pixels."""
    rows, columns = call.grid()
    return call.tensor(rows * columns, call.in_channels)


def _video(call: _Call) -> Tensor:
    return call.video(call.in_channels)


def _tokens_of_video(call: _Call) -> Tensor:
    return call.tensor(call.frames * call.height * call.width, call.in_channels)


def _frames_second(call: _Call) -> Tensor:
    """[B, frames, channels, height, width]; as many frames as make whole tokens."""
    patch = call.patch_size_t or 1
    frames = -(-call.frames // patch) * patch
    return call.tensor(frames, call.in_channels, call.height, call.width)


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


def _image_ids(call: _Call) -> Tensor:
    """Positions [tokens, axes]: row and column are the second and third axis everywhere."""
    rows, columns = call.grid()
    ids = call.whole(value=0).new_zeros(rows, columns, len(call.axes_dims_rope))
    ids[..., 1] = torch.arange(rows, device=ids.device)[:, None]
    ids[..., 2] = torch.arange(columns, device=ids.device)
    return ids.flatten(0, 1)


def _text_ids(call: _Call) -> Tensor:
    return call.whole(value=0).new_zeros(call.text, len(call.axes_dims_rope))


def _cogvideox_rope(call: _Call) -> Any:
    """(cos, sin), each [tokens, head width], as the pipeline makes them."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    if not call.use_rotary_positional_embeddings:
        return None
    grid = call.grid(call.patch_size)
    return get_3d_rotary_pos_embed(
        embed_dim=call.attention_head_dim,
        crops_coords=None,
        grid_size=grid,
        temporal_size=-(-call.frames // (call.patch_size_t or 1)),
        grid_type="slice",
        max_size=grid,
        device=call.whole().device,
    )


def _hunyuan_dit_rope(call: _Call) -> Any:
    """(cos, sin), each [tokens, head width], as the pipeline makes them."""
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    grid = call.grid(call.patch_size)
    return get_2d_rotary_pos_embed(
        call.attention_head_dim, ((0, 0), grid), grid, device=call.whole().device, output_type="pt"
    )


def _allegro_rope(call: _Call) -> Any:
    """Tables of (cos, sin) for time, rows and columns, and the positions [1, tokens] in each."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    grid = call.grid(call.patch_size)
    scales = ("interpolation_scale_t", "interpolation_scale_h", "interpolation_scale_w")
    time, rows, columns, *axes = get_3d_rotary_pos_embed_allegro(
        embed_dim=call.attention_head_dim,
        crops_coords=((0, 0), grid),
        grid_size=grid,
        temporal_size=call.frames,
        interpolation_scale=tuple(getattr(call, scale) for scale in scales),
        device=call.whole().device,
    )
    positions = torch.cartesian_prod(*(axis.long() for axis in axes)).T
    return (time, rows, columns), tuple(axis[None] for axis in positions)


def _indices(first: int, count: int) -> _Rule:
    """Numbers of the frames that an argument of Framepack holds; a negative count: all frames."""
    return lambda c: torch.arange(first, first + (c.frames if count < 0 else count))


_AUDIO_TOKENS = 126  # of five seconds
_IMAGE_TOKENS = 729  # of SigLIP at 384 pixels

# What an argument is for the models that need it: a rule that answers None leaves it out.
_ARGUMENTS: dict[str, _Rule] = {
    "timestep": lambda c: c.whole(),
    "timestep_r": lambda c: c.whole() if c.use_meanflow else None,
    "guidance": lambda c: c.tensor() if c.guidance_embeds else None,
    "encoder_hidden_states": _text,
    "encoder_attention_mask": lambda c: c.mask(c.text),
    "encoder_hidden_states_image": lambda c: c.tensor(257, c.image_dim) if c.image_dim else None,
    "pooled_projections": lambda c: (
        c.tensor(c.pooled_projection_dim) if c.pooled_projection_dim else None
    ),
    "image_embeds": lambda c: (
        c.tensor(_IMAGE_TOKENS, c.image_embed_dim) if c.image_embed_dim else None
    ),
    "img_ids": _image_ids,
    "txt_ids": _text_ids,
    "img_shapes": lambda c: [[(1, *c.grid())]] * c.batch,
    "original_size": lambda c: c.whole(2, value=c.height * _PIXELS_PER_LATENT),
    "target_size": lambda c: c.whole(2, value=c.height * _PIXELS_PER_LATENT),
    "crop_coords": lambda c: c.whole(2, value=0),
    "num_frames": lambda c: c.frames,
    "height": lambda c: c.height,
    "width": lambda c: c.width,
}
# Masks are given where the model insists on them: without one, nothing is hidden.
_MASKS = {"encoder_attention_mask"}


@dataclass(frozen=True)
class _Row:
    """What a transformer takes: tokens of text, its main input, and what is its own."""

    text: int
    hidden_states: _Rule
    own: dict[str, _Rule] = field(default_factory=dict)


# For models that give the embedding of the time the dtype of the time.
_FLOAT_TIME: dict[str, _Rule] = {"timestep": lambda c: c.tensor()}
_WAN = _Row(512, _video)
_TRANSFORMERS: dict[str, _Row] = {
    # images
    "FluxTransformer2DModel": _Row(512, _packed),
    "Flux2Transformer2DModel": _Row(512, _packed),
    "ChromaTransformer2DModel": _Row(
        512,
        _packed,
        {"attention_mask": lambda c: c.mask(c.text + c.grid()[0] * c.grid()[1])},
    ),
    "SD3Transformer2DModel": _Row(333, _image),
    "QwenImageTransformer2DModel": _Row(256, _packed),
    "ZImageTransformer2DModel": _Row(
        128,
        _image,
        {
            "x": lambda c: [picture[:, None] for picture in _image(c)],
            "cap_feats": lambda c: list(c.tensor(c.text, c.cap_feat_dim)),
            "t": lambda c: c.whole(),
        },
    ),
    "Lumina2Transformer2DModel": _Row(256, _image),
    "AuraFlowTransformer2DModel": _Row(256, _image),
    "HiDreamImageTransformer2DModel": _Row(
        128,
        _image,
        {
            "timesteps": lambda c: c.whole(),
            "encoder_hidden_states_t5": lambda c: c.tensor(c.text, c.caption_channels[0]),
            "encoder_hidden_states_llama3": lambda c: c.tensor(
                max(c.llama_layers) + 1, c.text, c.caption_channels[1]
            ).transpose(0, 1),
            "pooled_embeds": lambda c: c.tensor(c.text_emb_dim),
            "img_ids": lambda c: None,
        },
    ),
    "HunyuanImageTransformer2DModel": _Row(
        1000, lambda c: (_image if len(c.patch_size) == 2 else _video)(c), _FLOAT_TIME
    ),
    "HunyuanDiT2DModel": _Row(
        77,
        _image,
        {
            **_FLOAT_TIME,
            "encoder_hidden_states": lambda c: c.tensor(c.text_len, c.cross_attention_dim),
            "text_embedding_mask": lambda c: c.mask(c.text_len),
            "encoder_hidden_states_t5": lambda c: c.tensor(c.text_len_t5, c.cross_attention_dim_t5),
            "text_embedding_mask_t5": lambda c: c.mask(c.text_len_t5),
            "image_meta_size": lambda c: c.whole(6),
            "style": lambda c: c.whole(value=0),
            "image_rotary_emb": _hunyuan_dit_rope,
        },
    ),
    "CogView3PlusTransformer2DModel": _Row(224, _image),
    "CogView4Transformer2DModel": _Row(224, _image),
    # video
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": _Row(
        512, _video, {"control_hidden_states": lambda c: c.video(c.vace_in_channels)}
    ),
    "HunyuanVideoTransformer3DModel": _Row(256, _video),
    "HunyuanVideoFramepackTransformer3DModel": _Row(
        256,
        _video,
        {
            "image_embeds": lambda c: c.tensor(_IMAGE_TOKENS, c.image_proj_dim),
            # The image, 16 + 2 + 1 frames of the past, each further back in larger patches.
            "latents_history_4x": lambda c: c.video(c.in_channels, 16),
            "indices_latents_history_4x": _indices(1, 16),
            "latents_history_2x": lambda c: c.video(c.in_channels, 2),
            "indices_latents_history_2x": _indices(17, 2),
            "latents_clean": lambda c: c.video(c.in_channels, 2),
            "indices_latents_clean": lambda c: torch.tensor([0, 19]),
            "indices_latents": _indices(20, -1),
        },
    ),
    "HunyuanVideo15Transformer3DModel": _Row(
        1000,
        _video,
        {
            **_FLOAT_TIME,
            "encoder_hidden_states_2": lambda c: c.tensor(256, c.text_embed_2_dim),
            "encoder_attention_mask_2": lambda c: c.mask(256),
        },
    ),
    "CogVideoXTransformer3DModel": _Row(
        226,
        _frames_second,
        {
            "ofs": lambda c: c.whole()[:1] if c.ofs_embed_dim else None,
            "image_rotary_emb": _cogvideox_rope,
        },
    ),
    "LTXVideoTransformer3DModel": _Row(128, _tokens_of_video),
    "LTX2VideoTransformer3DModel": _Row(
        1024,
        _tokens_of_video,
        {
            "encoder_hidden_states": lambda c: c.tensor(
                c.text, c.caption_channels if c.use_prompt_embeddings else c.cross_attention_dim
            ),
            "audio_encoder_hidden_states": lambda c: c.tensor(
                c.text,
                c.caption_channels if c.use_prompt_embeddings else c.audio_cross_attention_dim,
            ),
            "audio_hidden_states": lambda c: c.tensor(_AUDIO_TOKENS, c.audio_in_channels),
            "audio_num_frames": lambda c: _AUDIO_TOKENS,
            "sigma": lambda c: c.whole() if c.cross_attn_mod or c.audio_cross_attn_mod else None,
        },
    ),
    "MochiTransformer3DModel": _Row(256, _video),
    "AllegroTransformer3DModel": _Row(512, _video, {"image_rotary_emb": _allegro_rope}),
    "EasyAnimateTransformer3DModel": _Row(
        256,
        lambda c: c.video(c.out_channels or c.in_channels),
        {
            "encoder_hidden_states_t5": lambda c: (
                c.tensor(c.text, c.text_embed_dim_t5) if c.text_embed_dim_t5 else None
            ),
            # Mask and picture of inpainting, or a control video: the channels that are left.
            "inpaint_latents": lambda c: (
                c.video(c.in_channels - c.out_channels)
                if c.in_channels > (c.out_channels or c.in_channels)
                else None
            ),
        },
    ),
    "LatteTransformer3DModel": _Row(120, lambda c: c.video(c.in_channels, c.video_length)),
}


def _transformer(
    module: Any, cls: Any, size: tuple[int, int], batch: int, frames: int, text: int | None
) -> Inputs:
    row = _TRANSFORMERS[cls.__name__]
    # CogVideoX adds positions to a text of one length only.
    text = module.config.get("max_text_seq_length") or text or row.text
    call = _Call(module, batch, *size, frames, text)
    rules = {**_ARGUMENTS, "hidden_states": row.hidden_states, **row.own}
    inputs = {}
    for name, parameter in inspect.signature(cls.forward).parameters.items():
        optional = parameter.default is not inspect.Parameter.empty
        if name not in rules or (name in _MASKS and optional):
            continue
        value = rules[name](call)
        if value is not None:
            inputs[name] = value
    return inputs
