"""Rules for the arguments in example inputs of diffusers models.

Models share the names of their arguments: `ARGUMENTS` has one rule per name. `OF_UNETS` and `OWN`
have the exceptions for UNets and for single classes.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .example import Example, Rule

_IMAGE, _ONE_FRAME = "in_channels height width", "in_channels 1 height width"
_TWO_FRAMES, _PAST = "in_channels 2 height width", "in_channels 16 height width"
_VIDEO = "in_channels frames height width"
_TEXT_WIDTH = (
    "joint_attention_dim|caption_channels|text_dim|text_embed_dim|cap_feat_dim|context_in_dim"
    "|in_text_dim|encoder_hid_dim|cross_attention_dim"
)


def _where(entry: str, rule: Rule) -> Rule:
    """Limits a rule to models with a configuration entry; "a|b": with either of them."""
    names = entry.split("|")
    return lambda c: c.make(rule) if any(getattr(c, name) for name in names) else None


def _condition(c: Example) -> Tensor:
    """The condition of a ControlNet: packed tokens if it uses positions, otherwise a latent."""
    more = c.extra_condition_channels or c.extra_conditioning_channels or 0
    channels = c.in_channels + more
    return c.tensor(c.tokens, channels) if c.axes_dims_rope else c.tensor(channels, *c.size)


def _more_channels(c: Example) -> Tensor | None:
    """The input channels beyond those of the output, if there are any."""
    channels = c.in_channels - (c.out_channels or c.in_channels)
    return c.tensor(channels, c.frames, *c.size) if channels > 0 else None


def _text_ids(c: Example) -> Tensor:
    return c.whole().new_zeros(c.text, len(c.axes_dims_rope))


def _image_ids(c: Example, axes: int | None = None) -> Tensor:
    """Positions `[tokens, axes]`. The second and third axis are row and column in all models."""
    more = [0] * ((axes or len(c.axes_dims_rope)) - 3)
    rows, columns = map(range, c.grid)
    return c.known([[0, row, column, *more] for row in rows for column in columns])


def _all_ids(c: Example) -> Tensor:
    """Positions `[B, text + tokens, 3]`. Those of the image are far from those of the text."""
    text = c.count(c.text)[:, None].expand(-1, 3)
    return torch.cat([text, _image_ids(c, 3) + 65536]).expand(c.batch, -1, -1)


def _turns(c: Example, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) of rotary positions, each `[tokens, width]`, with all angles zero."""
    zeros = c.zeros(tokens, width).float()
    return zeros.cos(), zeros


def _image_rope(c: Example) -> Any:
    return _turns(c, c.tokens, c.attention_head_dim)


def _cogvideox_rope(c: Example) -> Any:
    if not c.use_rotary_positional_embeddings:
        return None
    return _turns(c, c.frames_of_tokens * c.tokens, c.attention_head_dim)


def _lumina_rope(c: Example) -> Tensor:
    """`[384, 384, width]`, of which the model takes as many rows and columns as it needs."""
    cos, sin = _turns(c, 384 * 384, c.hidden_size // c.num_attention_heads // 2)
    return torch.complex(cos, sin).view(384, 384, -1)


def _allegro_rope(c: Example) -> Any:
    """Tables for time, rows and columns, and the position `[1, tokens]` of each token in them."""
    lengths = (c.frames, *c.grid)
    tables = tuple(_turns(c, length, c.attention_head_dim // 3) for length in lengths)
    positions = torch.cartesian_prod(*(c.count(length) for length in lengths))
    return tables, tuple(axis[None] for axis in positions.T)


def _omnigen_mask(c: Example) -> Tensor:
    """`[B, S, S]`: text and time attend to earlier tokens only, the image to all tokens."""
    before, length = c.text + 1, c.text + 1 + c.tokens
    mask = c.whole(length, length, value=1).tril()
    mask[:, before:] = 1
    return mask


def _size_conditions(c: Example) -> Any:
    if not c.module.use_additional_conditions:
        return {"resolution": None, "aspect_ratio": None}
    return {"resolution": c.tensor(2), "aspect_ratio": c.tensor(1)}


_AUDIO_TOKENS = 126  # five seconds
_CLIP_TOKENS, _SIGLIP_TOKENS, _EVA_TOKENS = 257, 729, 577  # tokens per image of these encoders

ARGUMENTS: dict[str, Rule] = {
    **dict.fromkeys(("timestep", "timesteps", "t"), ""),
    "timestep_r": _where("use_meanflow", ""),
    "sigma": _where("cross_attn_mod|audio_cross_attn_mod", ""),
    "guidance": _where("guidance_embeds", ""),
    "fps": _where("inject_sample_info", lambda c: [0] * c.batch),
    "class_labels": lambda c: c.whole(value=1),
    # text
    "encoder_hidden_states": f"text {_TEXT_WIDTH}",
    "encoder_hidden_states_t5": "text_len_t5|text text_embed_dim_t5|cross_attention_dim_t5",
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
    # latents, and conditions other than text
    "x": lambda c: [picture[:, None] for picture in c.tensor(c.in_channels, *c.size)],
    "encoder_hidden_states_image": f"{_CLIP_TOKENS} image_dim",
    "image_embeds": f"{_SIGLIP_TOKENS} image_embed_dim|image_proj_dim",
    "id_cond": _where("is_train_face", "LFE_id_dim"),
    "id_vit_hidden": _where(
        "is_train_face",
        lambda c: [c.tensor(_EVA_TOKENS, c.LFE_vit_dim) for _ in range(c.LFE_num_scale)],
    ),
    "controlnet_cond": _condition,
    "control_hidden_states": "vace_in_channels frames height width",
    "pose_hidden_states": lambda c: c.tensor(c.latent_channels, c.frames - 1, *c.size),
    "face_pixel_values": lambda c: c.tensor(
        3, 4 * (c.frames - 1), c.motion_encoder_size, c.motion_encoder_size
    ),
    "inpaint_latents": _more_channels,
    "padding_mask": _where("concat_padding_mask", lambda c: c.zeros(1, 1, *c.size)),
    "prior_token_id": lambda c: c.whole(c.tokens),
    "prior_token_drop": lambda c: c.known([False] * c.batch),
    "input_img_latents": lambda c: [],
    "input_image_sizes": lambda c: {},
    "audio_hidden_states": f"{_AUDIO_TOKENS} audio_in_channels|in_audio_dim",
    # 16, 2 and 1 past frames, in smaller and smaller patches, and an image or the first frame
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
    **dict.fromkeys(("original_size", "target_size"), lambda c: c.whole(2, value=c.pixels[0])),
    "crop_coords": lambda c: c.whole(2),
    "image_meta_size": lambda c: c.whole(6, value=c.pixels[0]),
    "style": lambda c: c.whole(),
    "num_frames": lambda c: c.frames,
    "height": lambda c: c.height,
    "width": lambda c: c.width,
    "audio_num_frames": lambda c: _AUDIO_TOKENS,
    "visual_rope_pos": lambda c: [c.count(length) for length in (c.frames, *c.grid)],
    "text_rope_pos": lambda c: c.count(c.text),
}
"""The rule for each argument name, in all models that have it."""


def _unet_label(c: Example) -> Tensor | None:
    labelled = c.num_class_embeds or c.class_embed_type == "timestep"
    return c.whole(value=1) if labelled else None


def _text_and_sizes(c: Example) -> Any:
    if c.addition_embed_type != "text_time":
        return None
    ids = 6
    text = c.projection_class_embeddings_input_dim - ids * c.addition_time_embed_dim
    return {"text_embeds": c.tensor(text), "time_ids": c.tensor(ids)}


def _unet_condition(c: Example) -> Tensor:
    return c.tensor(c.conditioning_channels or 3, *c.pixels)


def _text_per_frame(c: Example) -> Tensor:
    """`[B * frames, text, width]`."""
    each = replace(c, batch=c.batch * c.frames)
    return each.make(ARGUMENTS["encoder_hidden_states"])


OF_UNETS: dict[str, Rule] = {
    "sample": _IMAGE,
    "timestep": lambda c: c.whole(value=1),
    "class_labels": _unet_label,
    "added_cond_kwargs": _text_and_sizes,
    "added_time_ids": "3",
    "controlnet_cond": _unet_condition,
}
"""Exceptions in UNets and their ControlNets."""

OWN: dict[str, dict[str, Rule]] = {
    "UNetMotionModel": {"sample": _VIDEO, "encoder_hidden_states": _text_per_frame},
    "UNet3DConditionModel": {"sample": _VIDEO},
    "UNetSpatioTemporalConditionModel": {
        "sample": "frames in_channels height width",
        "encoder_hidden_states": f"1 {_TEXT_WIDTH}",
    },
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
    "HiDreamImageTransformer2DModel": {
        "img_ids": lambda c: None,  # the model makes them
        "encoder_hidden_states_t5": "text caption_channels",
        "encoder_hidden_states_llama3": lambda c: c.tensor(
            max(c.llama_layers) + 1, c.text, c.caption_channels[1]
        ).transpose(0, 1),
    },
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
        "cross_attention_kwargs": lambda c: {},  # the default, None, raises an error
    },
    "NucleusMoEImageTransformer2DModel": {"img_shapes": lambda c: [(1, *c.grid)] * c.batch},
    "OmniGenTransformer2DModel": {
        "attention_mask": _omnigen_mask,
        "position_ids": lambda c: c.counts(c.text + 1 + c.tokens),
    },
    "PixArtTransformer2DModel": {"added_cond_kwargs": _size_conditions},
}
"""Exceptions in single classes, and arguments that only one class needs."""
