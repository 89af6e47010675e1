"""Tiny, seeded diffusion transformers of diffusers, and inputs for them.

Every `Dit` builds one model with random weights. Its inputs are those of `example_inputs`, filled
with noise; item k of a batch is drawn from a seed of its own, so it is the same at every batch size
and `alone` can take it out.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import zoo_dit_calls as calls
from torch import Tensor, nn
from zoo_diffusers import TEXT, noise
from zoo_dit_calls import Change, Inputs

from tomesd.hosts.inputs import example_inputs
from tomesd.hosts.table import TRANSFORMERS
from tomesd.schedule import Timeline

ROWS = {row.name: row for row in TRANSFORMERS}
GAIN = 1.4  # how much larger a layer makes a signal
TIMES = ("timestep", "timesteps", "t", "sigma", "audio_timestep", "r_timestep")
# Arguments without a batch axis: one for all items.
SHARED = {
    "img_ids", "txt_ids", "image_rotary_emb", "ofs", "num_frames", "height", "width",
    "audio_num_frames", "indices_latents", "indices_latents_clean", "indices_latents_history_2x",
    "indices_latents_history_4x", "position_ids", "visual_rope_pos", "text_rope_pos",
    "enable_diffusion_forcing", "image_cond_ids", "padding_mask",
    "input_img_latents", "input_image_sizes", "cross_attention_kwargs",
}  # fmt: skip
# Arguments that are a list of one tensor [B, ...] per layer, not of one entry per item.
LAYERS = {"text_encoder_layers", "id_vit_hidden", "context_latents"}
# Arguments whose batch axis is not the first one.
BATCH_AXIS = {"encoder_hidden_states_llama3": 1}


@dataclass(frozen=True)
class Dit:
    """One model: how to build it, what to feed it, which tensor of its output counts.

    Args:
        kind: name of the class in diffusers.
        config: its arguments.
        size: latent height and width of a small call.
        frames: latent frames of a small call of a model of videos.
        change: what is different from the plain call of the class.
    """

    name: str
    kind: str
    config: dict[str, Any]
    size: tuple[int, int] = (12, 8)
    frames: int = 3
    change: Change | None = None

    def build(self, seed: int = 0, **changes: Any) -> Any:
        """The model, the same at every call; other arguments change its configuration."""
        return seeded(getattr(diffusers, self.kind), seed=seed, **(self.config | changes))

    def inputs(
        self,
        batch: int = 2,
        size: tuple[int, int] | None = None,
        frames: int | None = None,
        seed: int = 0,
    ) -> Inputs:
        """Keyword arguments of one call: noise, and texts and timesteps of each item's own."""
        size, frames = size or self.size, frames or self.frames
        plain = example_inputs(_shapes_of(self.name), size, batch, frames, TEXT)
        assert plain is not None, f"no inputs known for {self.kind}"
        # Fewer tokens of a given picture than its encoder makes, which would outweigh the rest.
        if "image_embeds" in plain:
            plain["image_embeds"] = plain["image_embeds"][:, :TEXT]
        if self.change is not None:
            plain |= self.change(plain, *size, frames)
        return {
            name: _timesteps(value) * largest_time(self.kind)
            if name in TIMES
            else _filled(value, seed, salt, BATCH_AXIS.get(name, 0), name in LAYERS)
            for salt, (name, value) in enumerate(plain.items())
        }

    def output(self, result: Any) -> Tensor:
        """The picture or video of what a call returned; lists of items become [B, ...]."""
        sample = result if isinstance(result, Tensor) else result[0]
        return torch.stack(sample) if isinstance(sample, list) else sample

    def run(self, model: Callable[..., Any], inputs: Inputs) -> Tensor:
        """One call without gradients."""
        with torch.no_grad():
            return self.output(model(**inputs, return_dict=False))


def largest_time(kind: str) -> float:
    """Of the times that a class is given: 1 or 1000."""
    timeline = ROWS[kind].timeline
    known = isinstance(timeline, Timeline) and timeline.noise is not None
    return max(timeline.noise, timeline.image) if known else 1000.0


def alone(inputs: Inputs, k: int) -> Inputs:
    """Item k of a batch of inputs, as a batch of one."""
    shared = SHARED - {"position_ids"} if "input_ids" in inputs else SHARED  # OmniGen: [B, S]
    return {
        name: value if name in shared or value is None else _item(name, value, k)
        for name, value in inputs.items()
    }


def _item(name: str, value: Any, k: int) -> Any:
    if isinstance(value, Tensor):
        return value.narrow(BATCH_AXIS.get(name, 0), k, 1)
    if isinstance(value, tuple) or name in LAYERS:  # tensors [B, ...], one per layer
        return type(value)(part[k : k + 1] for part in value)
    return value[k : k + 1]  # a list of the items


def _filled(value: Any, seed: int, salt: int, axis: int = 0, layers: bool = False) -> Any:
    """Noise instead of the zeros in `value`, of each item's own along the batch axis.

    A list holds one tensor per item, or if `layers` one tensor [B, ...] per layer.
    """
    if isinstance(value, dict):
        return {name: _filled(inner, seed, salt + 100) for name, inner in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        if not value[0].is_floating_point():
            return value
        if layers:
            return [_filled(part, seed, salt + 100 * k) for k, part in enumerate(value)]
        return [noise(k + 1, *part.shape, seed=seed, salt=salt)[k] for k, part in enumerate(value)]
    if isinstance(value, Tensor) and value.is_floating_point():
        shape = value.movedim(axis, 0).shape
        return noise(*shape, seed=seed, salt=salt).movedim(0, axis)
    return value


def _timesteps(value: Tensor) -> Tensor:
    """0.3, 0.4, ... for the items; 0 where `value` is negative, which says: no noise here."""
    times = 0.3 + 0.1 * torch.arange(len(value), dtype=torch.float32)
    return times.view(-1, *[1] * (value.ndim - 1)) * (value >= 0)


def seeded(make: Callable[..., nn.Module], *args: Any, seed: int = 0, **kwargs: Any) -> Any:
    """Build a module from `seed` without touching the global RNG; every part has an effect.

    The usual weights of an untrained layer make its output smaller than its input, so that blocks
    would add little to what they get, and gates and output layers are zero: both get more. Memory
    that waits for a checkpoint becomes noise.
    """
    before = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)  # makes memory that nobody filled NaN
        try:
            module = make(*args, **kwargs)
        finally:
            torch.use_deterministic_algorithms(before)
        with torch.no_grad():
            for layer in module.modules():
                if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)):
                    layer.weight.normal_(std=GAIN * math.prod(layer.weight.shape[1:]) ** -0.5)
            for parameter in module.parameters():
                if parameter.ndim == 0:
                    parameter.fill_(0.6)
                elif parameter.isnan().any() or not parameter.any():
                    parameter.normal_(std=0.15)
    return module.eval().requires_grad_(False)


@functools.cache
def _shapes_of(name: str) -> Any:
    return DITS[name].build()


_SIZES = {
    1: "num_refiner_layers n_refiner_layers approximator_layers perceiver_num_layers "
    "num_text_blocks num_layerwise_text_blocks num_refiner_text_blocks LFE_ff_mult",
    2: "num_attention_heads n_heads num_heads n_kv_heads audio_num_attention_heads "
    "num_kv_heads text_num_attention_heads text_num_key_value_heads face_encoder_num_heads "
    "cross_attn_num_heads LFE_num_heads LFE_num_id_token num_decoder_layers "
    "cross_attn_interval controlnet_block_every_n inject_face_latents_blocks gist_step",
    3: "num_mmdit_layers mmdit_layers num_text_layers video_length",
    4: "in_channels out_channels latent_channels in_visual_dim out_visual_dim condition_dim "
    "motion_dim num_layers num_single_layers num_single_dit_layers n_layers depth "
    "num_visual_blocks num_cross_attention_heads num_experts min_num_gist_tokens gist_min_text_len "
    "LFE_num_querie",
    5: "text_len_t5 LFE_depth",
    6: "audio_in_channels audio_out_channels in_audio_dim out_audio_dim LFE_id_dim",
    7: "text_len max_text_seq_length",
    8: "sample_width audio_attention_head_dim cross_attention_head_dim cross_attn_dim_head "
    "LFE_dim_head LFE_vit_dim adaln_lora_dim motion_style_dim approximator_num_channels "
    "max_num_gist_tokens gist_max_text_len",
    9: "sample_frames",
    12: "sample_height in_text_dim2 vace_in_channels",
    16: "attention_head_dim sample_size pos_embed_max_size time_embed_dim timestep_embed_dim "
    "time_step_dim time_dim timestep_channels timestep_guidance_channels cond_in_channels "
    "audio_cross_attention_dim adaln_dim approximator_hidden_dim moe_intermediate_dim "
    "motion_encoder_size motion_encoder_dim face_encoder_hidden_dim multiple_of "
    "max_sequence_length",
    24: "caption_channels cap_feat_dim pooled_projection_dim image_embed_dim image_proj_dim "
    "text_emb_dim text_encoder_dim text_hidden_dim text_in_dim in_text_dim "
    "cross_attention_dim_t5 llm_features_dim",
    32: "hidden_size dim model_dim joint_attention_dim cross_attention_dim "
    "caption_projection_dim text_embed_dim text_dim text_intermediate_size freq_dim "
    "rope_max_seq_len LFE_output_dim prior_vq_quantizer_codebook_size",
    48: "intermediate_size ff_dim",
    64: "ffn_dim ffn_hidden_size vocab_size",
}
TINY: dict[str, Any] = {
    **{name: size for size, names in _SIZES.items() for name in names.split()},
    **dict.fromkeys(("axes_dims_rope", "axes_dims", "rope_axes_dim", "rope_dim_list"), (4, 6, 6)),
    "rope_dim": (4, 6, 6),
    "axes_dim_rope": (4, 4, 4),
    "axes_dim": (8, 8),
    "mrope_section": (4, 2, 2),
    "max_size": (4, 16, 16),
    "max_resolution": (16, 16),
    "injection_layer_ids": (1, 2),
}
"""What every tiny model has, as far as its class takes it."""

# What several cases of a class share, or classes that are made alike.
FLUX: dict[str, Any] = {"in_channels": 16, "out_channels": None, "num_layers": 3}
FLUX2 = FLUX | {"axes_dims_rope": (4, 4, 4, 4)}
SD3: dict[str, Any] = {"attention_head_dim": 8, "num_attention_heads": 4, "pos_embed_max_size": 24}
QWEN: dict[str, Any] = {"in_channels": 16}
ZIMAGE: dict[str, Any] = {"axes_lens": (256, 64, 64)}
LUMINA2: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 4, "axes_lens": (300, 32, 32)}
HUNYUAN: dict[str, Any] = {"num_layers": 3, "num_single_layers": 3}
HUNYUAN_IMAGE = HUNYUAN | {"rope_axes_dim": (8, 8)}
FIBO2: dict[str, Any] = {"axes_lens": (64, 32, 32)}
PICTURE = {"image_dim": 24, "added_kv_proj_dim": 32}
ROPE = {"use_rotary_positional_embeddings": True}
LTX: dict[str, Any] = {"in_channels": 8, "out_channels": 8}
COSMOS = {"concat_padding_mask": False}  # would need torchvision


def _dit(
    name: str,
    kind: str,
    family: dict[str, Any] | None = None,
    *,
    size: tuple[int, int] = (12, 8),
    frames: int = 3,
    change: Change | None = None,
    **special: Any,
) -> Dit:
    """A tiny model.

    Args:
        kind: name of the class, without what all of them end in.
        family: what it has in common with others; as `TINY`, as far as its class takes it.
        special: all else that it has.
    """
    ends = ("Transformer2DModel", "Transformer3DModel", "2DModel")
    kind = next(kind + end for end in ends if hasattr(diffusers, kind + end))
    takes = inspect.signature(getattr(diffusers, kind).__init__).parameters
    common = {key: value for key, value in (TINY | (family or {})).items() if key in takes}
    return Dit(name, kind, common | special, size, frames, change)


_UNEVEN_TEXTS = calls.uneven("encoder_attention_mask")
_UNEVEN_STATES = calls.uneven("encoder_hidden_states_mask")
_IMAGES = (
    _dit("flux", "Flux", FLUX, guidance_embeds=True),
    _dit("flux_schnell", "Flux", FLUX),
    _dit("flux_kontext", "Flux", FLUX, change=calls.reference_flux),
    _dit("flux2", "Flux2", FLUX2),
    _dit("flux2_edit", "Flux2", FLUX2, change=calls.reference_flux),
    _dit("flux3", "Flux3", FLUX2),
    _dit("flux3_edit", "Flux3", FLUX2, change=calls.reference_flux3),
    _dit("chroma", "Chroma", FLUX, change=calls.uneven("attention_mask", end=TEXT)),
    _dit("bria", "Bria", FLUX, pooled_projection_dim=None),
    _dit("bria_fibo", "BriaFibo", FLUX, pooled_projection_dim=None),
    _dit("bria_fibo2", "BriaFibo2", FIBO2, change=calls.reference_fibo),
    _dit("bria_fibo2_uneven", "BriaFibo2", FIBO2, change=calls.fibo_texts),
    _dit("ovis", "OvisImage", FLUX, out_channels=16),
    _dit("longcat", "LongCatImage", FLUX),
    _dit("sd3", "SD3", SD3),
    _dit("sd35", "SD3", SD3, qk_norm="rms_norm", dual_attention_layers=(0, 1)),
    _dit("qwen", "QwenImage", QWEN),
    _dit("qwen_uneven", "QwenImage", QWEN, change=_UNEVEN_STATES),
    _dit("qwen_edit", "QwenImage", QWEN, change=calls.reference_qwen),
    _dit("qwen_edit_2511", "QwenImage", QWEN, change=calls.reference_qwen, zero_cond_t=True),
    _dit("qwen21", "QwenImage21", QWEN, change=_UNEVEN_STATES, context_in_dim=32, out_channels=16),
    _dit(
        "nucleus",
        "NucleusMoEImage",
        QWEN,
        change=_UNEVEN_STATES,
        mlp_ratio=8.0,  # the width inside is cut down to a multiple of 128
        dense_moe_strategy="leave_first_block_dense",
        capacity_factors=2.0,
    ),
    _dit("zimage", "ZImage", ZIMAGE),
    _dit("zimage_uneven", "ZImage", ZIMAGE, change=calls.long_caption),
    _dit("lumina2", "Lumina2", LUMINA2),
    _dit("lumina2_uneven", "Lumina2", LUMINA2, change=_UNEVEN_TEXTS),
    _dit("lumina_next", "LuminaNextDiT", change=calls.lumina_rope, num_kv_heads=1),
    _dit(
        "auraflow", "AuraFlow", attention_head_dim=8, num_attention_heads=4, pos_embed_max_size=256
    ),
    _dit(
        "hidream",
        "HiDreamImage",
        HUNYUAN,
        patch_size=2,
        caption_channels=[32, 24],
        llama_layers=(0, 1, 1, 2, 2, 2),
    ),
    _dit("hunyuan_image", "HunyuanImage", HUNYUAN_IMAGE, size=(6, 4)),
    _dit(
        "hunyuan_image_ocr",
        "HunyuanImage",
        HUNYUAN_IMAGE,
        size=(6, 4),
        change=calls.second_text,
        text_embed_2_dim=24,
    ),
    _dit(
        "hunyuan_dit",
        "HunyuanDiT",
        change=calls.hunyuan_dit_rope,
        patch_size=2,
        num_layers=6,
        pooled_projection_dim=8,
        activation_fn="gelu-approximate",
    ),
    _dit("cogview3", "CogView3Plus"),
    _dit("cogview4", "CogView4", rope_axes_dim=(16, 16)),
    _dit("glm_image", "GlmImage"),
    _dit("krea2", "Krea2", change=_UNEVEN_TEXTS, in_channels=16, num_key_value_heads=1),
    _dit("prx", "PRX", change=calls.uneven("attention_mask"), context_in_dim=24),
    _dit(
        "omnigen",
        "OmniGen",
        num_key_value_heads=2,
        pad_token_id=0,
        rope_scaling={"long_factor": list(range(1, 9)), "short_factor": list(range(1, 9))},
    ),
    _dit(
        "ernie", "ErnieImage", size=(6, 4), change=calls.text_lengths, in_channels=8, out_channels=8
    ),
    _dit("joyimage", "JoyImageEdit", text_dim=24),
    _dit("joyimage_plus", "JoyImageEditPlus", change=calls.reference_joy, text_dim=24),
    _dit("ideogram4", "Ideogram4", in_channels=16),
    _dit("sana", "Sana", size=(6, 4), num_attention_heads=4, attention_head_dim=8, sample_size=8),
)

_VIDEOS = (
    _dit("wan", "Wan"),
    _dit("wan_i2v", "Wan", PICTURE, in_channels=9),
    _dit("wan_ti2v", "Wan", change=calls.time_per_token(2)),
    _dit("wan_vace", "WanVACE", vace_layers=[0, 2]),
    _dit(
        "wan_animate",
        "WanAnimate",
        PICTURE,
        in_channels=12,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
    ),
    _dit("skyreels", "SkyReelsV2", inject_sample_info=True),
    _dit("skyreels_df", "SkyReelsV2", change=calls.diffusion_forcing),
    _dit("chronoedit", "ChronoEdit", PICTURE, in_channels=9),
    _dit("anyflow", "AnyFlow", change=calls.any_times),
    _dit("helios", "Helios", size=(8, 8), is_amplify_history=True),
    _dit("hunyuan_video", "HunyuanVideo", HUNYUAN),
    _dit("hunyuan_video_uneven", "HunyuanVideo", HUNYUAN, change=_UNEVEN_TEXTS),
    _dit("hunyuan_video_i2v", "HunyuanVideo", HUNYUAN, image_condition_type="token_replace"),
    _dit(
        "framepack",
        "HunyuanVideoFramepack",
        HUNYUAN,
        size=(8, 8),
        has_image_proj=True,
        has_clean_x_embedder=True,
    ),
    _dit("hunyuan_video15", "HunyuanVideo15", size=(6, 4), in_channels=9, text_embed_2_dim=24),
    _dit("motif", "MotifVideo", HUNYUAN, in_channels=9, num_single_layers=5),
    _dit("cogvideox_2b", "CogVideoX"),
    _dit("cogvideox_5b", "CogVideoX", ROPE, change=calls.cogvideox_rope()),
    _dit(
        "cogvideox_15",
        "CogVideoX",
        ROPE,
        frames=4,
        change=calls.cogvideox_rope(2),
        patch_size_t=2,
        patch_bias=False,
        ofs_embed_dim=16,
    ),
    _dit(
        "consisid",
        "ConsisID",
        ROPE,
        change=calls.cogvideox_rope(),
        num_attention_heads=3,
        is_train_face=True,
    ),
    _dit("ltx", "LTXVideo", LTX, size=(6, 4), change=_UNEVEN_TEXTS),
    _dit("ltx_i2v", "LTXVideo", LTX, size=(6, 4), change=calls.time_per_token(1)),
    _dit("ltx2", "LTX2Video", LTX, size=(6, 4)),
    _dit("ltx2_i2v", "LTX2Video", LTX, size=(6, 4), change=calls.time_per_token(1)),
    _dit("ltx2_keyframe", "LTX2Video", LTX, size=(6, 4), change=calls.keyframe_ltx2),
    _dit("ltx2_split", "LTX2Video", LTX, size=(6, 4), rope_type="split"),
    _dit("mochi", "Mochi", change=_UNEVEN_TEXTS, time_embed_dim=8),
    _dit(
        "allegro",
        "Allegro",
        change=calls.allegro_rope,
        attention_head_dim=24,
        cross_attention_dim=48,
        sample_frames=3,
    ),
    _dit("easyanimate", "EasyAnimate", patch_size=2, time_embed_dim=8),
    _dit(
        "latte",
        "Latte",
        size=(8, 8),
        sample_size=8,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
    ),
    _dit("cosmos", "Cosmos", COSMOS),
    _dit("cosmos_v2w", "Cosmos", COSMOS, change=calls.time_per_frame),
    _dit("kandinsky5", "Kandinsky5"),
    _dit("kandinsky6", "Kandinsky6", visual_cond=False, ca_rope=True, num_visual_blocks=6),
)

DITS = {dit.name: dit for dit in (*_IMAGES, *_VIDEOS)}
