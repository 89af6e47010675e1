"""Tiny, seeded diffusion transformers of diffusers, and inputs for them.

Every `Dit` builds one model with random weights. Its inputs are those of `example_inputs`, filled
with noise; item k of a batch is drawn from a seed of its own, so it is the same at every batch size
and `alone` can take it out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers.models import embeddings
from torch import Tensor, nn
from zoo_diffusers import TEXT, noise

from tomesd.hosts import inputs as host_inputs

Inputs = dict[str, Any]
# (inputs, height, width, frames) -> inputs, with what makes a case out of the plain call
Change = Callable[[Inputs, int, int, int], Inputs]

GAIN = 1.4  # how much larger a layer makes a signal
# Models whose time is 0 ... 1; that of the others is 0 ... 1000.
UNIT_TIME = {
    "FluxTransformer2DModel", "Flux2Transformer2DModel", "Flux3Transformer2DModel",
    "ChromaTransformer2DModel", "QwenImageTransformer2DModel", "ZImageTransformer2DModel",
    "Lumina2Transformer2DModel", "LuminaNextDiT2DModel", "AuraFlowTransformer2DModel",
    "OvisImageTransformer2DModel", "LongCatImageTransformer2DModel", "Krea2Transformer2DModel",
    "NucleusMoEImageTransformer2DModel", "PRXTransformer2DModel", "OmniGenTransformer2DModel",
    "BriaFibo2Transformer2DModel", "Ideogram4Transformer2DModel", "QwenImage21Transformer2DModel",
}  # fmt: skip
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

    def build(self) -> Any:
        """The model, the same at every call."""
        return seeded(getattr(diffusers, self.kind), **self.config)

    def inputs(
        self,
        batch: int = 2,
        size: tuple[int, int] | None = None,
        frames: int | None = None,
        seed: int = 0,
    ) -> Inputs:
        """Keyword arguments of one call: noise, and texts and timesteps of each item's own."""
        size, frames = size or self.size, frames or self.frames
        plain = host_inputs.example_inputs(_shapes_of(self.name), size, batch, frames, TEXT)
        assert plain is not None, f"no inputs known for {self.kind}"
        # Fewer tokens of a given picture than its encoder makes, which would outweigh the rest.
        if "image_embeds" in plain:
            plain["image_embeds"] = plain["image_embeds"][:, :TEXT]
        if self.change is not None:
            plain = self.change(plain, *size, frames)
        return {
            name: _timesteps(value) * (1 if self.kind in UNIT_TIME else 1000)
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


FLUX: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 3,
    "num_single_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
FLUX_POOLED = FLUX | {"pooled_projection_dim": 24}
FLUX2 = FLUX | {"axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16}
CHROMA = FLUX | {
    "approximator_num_channels": 8,
    "approximator_hidden_dim": 16,
    "approximator_layers": 1,
}
SD3: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 24,
    "out_channels": 4,
    "pos_embed_max_size": 24,
}
QWEN: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
QWEN21 = {k: v for k, v in QWEN.items() if k != "joint_attention_dim"}
QWEN21 |= {"context_in_dim": 32, "out_channels": 16}
ZIMAGE: dict[str, Any] = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 4,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 24,
    "axes_dims": [4, 6, 6],
    "axes_lens": [256, 64, 64],
}
LUMINA2: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "hidden_size": 48,
    "num_layers": 4,
    "num_refiner_layers": 1,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "multiple_of": 16,
    "axes_dim_rope": (4, 4, 4),
    "axes_lens": (300, 32, 32),
    "cap_feat_dim": 24,
}
AURA: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "num_mmdit_layers": 3,
    "num_single_dit_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "out_channels": 4,
    "pos_embed_max_size": 256,
}
HIDREAM: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "caption_channels": [32, 24],
    "text_emb_dim": 24,
    "axes_dims_rope": (4, 6, 6),
    "max_resolution": (16, 16),
    "llama_layers": (0, 1, 1, 2, 2, 2),
}
HUNYUAN_IMAGE: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 3,
    "num_single_layers": 3,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "rope_axes_dim": (8, 8),
}
HUNYUAN_DIT: dict[str, Any] = {
    "sample_size": 16,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "patch_size": 2,
    "hidden_size": 32,
    "num_layers": 6,
    "cross_attention_dim": 32,
    "cross_attention_dim_t5": 24,
    "pooled_projection_dim": 8,
    "text_len": 7,
    "text_len_t5": 5,
    "activation_fn": "gelu-approximate",
}
COGVIEW: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "text_embed_dim": 32,
    "time_embed_dim": 16,
    "condition_dim": 4,
    "pos_embed_max_size": 16,
    "sample_size": 16,
}
WAN: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 4,
    "rope_max_seq_len": 32,
}
WAN_I2V = WAN | {"in_channels": 9, "image_dim": 24, "added_kv_proj_dim": 32}
HUNYUAN_VIDEO: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 3,
    "num_single_layers": 3,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "pooled_projection_dim": 24,
    "rope_axes_dim": (4, 6, 6),
}
FRAMEPACK = HUNYUAN_VIDEO | {
    "has_image_proj": True,
    "image_proj_dim": 24,
    "has_clean_x_embedder": True,
}
HUNYUAN_15: dict[str, Any] = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 4,
    "num_refiner_layers": 1,
    "text_embed_dim": 32,
    "text_embed_2_dim": 24,
    "image_embed_dim": 24,
    "rope_axes_dim": (4, 6, 6),
}
COGVIDEOX: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 16,
    "text_embed_dim": 32,
    "num_layers": 4,
    "sample_width": 8,
    "sample_height": 12,
    "sample_frames": 9,
    "max_text_seq_length": 7,
}
COGVIDEOX_5B = COGVIDEOX | {"use_rotary_positional_embeddings": True}
COGVIDEOX_15 = COGVIDEOX_5B | {"patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 16}
LTX: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "num_layers": 4,
    "caption_channels": 24,
}
LTX2 = LTX | {
    "audio_in_channels": 6,
    "audio_out_channels": 6,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
}
MOCHI: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 4,
    "pooled_projection_dim": 24,
    "in_channels": 4,
    "text_embed_dim": 32,
    "time_embed_dim": 8,
    "max_sequence_length": 16,
}
ALLEGRO: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
    "cross_attention_dim": 48,
    "sample_width": 8,
    "sample_height": 12,
    "sample_frames": 3,
    "caption_channels": 24,
}
EASYANIMATE: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "sample_width": 8,
    "sample_height": 12,
    "num_layers": 4,
    "mmdit_layers": 3,
    "time_embed_dim": 8,
    "text_embed_dim": 32,
}
LATTE: dict[str, Any] = {
    "sample_size": 8,
    "num_layers": 4,
    "patch_size": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "caption_channels": 24,
    "in_channels": 4,
    "out_channels": 8,
    "cross_attention_dim": 32,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "video_length": 3,
}
FLUX3 = FLUX2 | {"cond_in_channels": 16, "timestep_channels": 16}
FLUX3.pop("timestep_guidance_channels")
NUCLEUS = QWEN | {
    "mlp_ratio": 8.0,  # the width inside is cut down to a multiple of 128
    "dense_moe_strategy": "leave_first_block_dense",
    "num_experts": 4,
    "moe_intermediate_dim": 16,
    "capacity_factors": 2.0,
}
KREA2: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "timestep_embed_dim": 16,
    "text_hidden_dim": 24,
    "num_text_layers": 3,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 32,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1,
    "axes_dims_rope": (4, 6, 6),
}
LUMINA_NEXT: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 4,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "multiple_of": 16,
    "cross_attention_dim": 32,
}
PRX: dict[str, Any] = {
    "in_channels": 4,
    "context_in_dim": 24,
    "hidden_size": 32,
    "num_heads": 2,
    "depth": 4,
    "axes_dim": [8, 8],
}
OMNIGEN: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_layers": 4,
    "in_channels": 4,
    "time_step_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
    "pos_embed_max_size": 16,
    "rope_scaling": {"long_factor": list(range(1, 9)), "short_factor": list(range(1, 9))},
}
ERNIE: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_layers": 4,
    "ffn_hidden_size": 64,
    "in_channels": 8,
    "out_channels": 8,
    "text_in_dim": 24,
    "rope_axes_dim": (4, 6, 6),
}
JOY: dict[str, Any] = {
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 24,
    "num_layers": 4,
    "rope_dim_list": [4, 6, 6],
}
GLM: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "text_embed_dim": 32,
    "time_embed_dim": 16,
    "condition_dim": 4,
    "prior_vq_quantizer_codebook_size": 32,
}
SANA: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 4,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 32,
    "caption_channels": 24,
    "sample_size": 8,
}
WAN_ANIMATE = WAN | {
    "in_channels": 12,
    "latent_channels": 4,
    "image_dim": 24,
    "added_kv_proj_dim": 32,
    "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
    "motion_encoder_size": 16,
    "motion_style_dim": 8,
    "motion_dim": 4,
    "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
}
CONSISID = COGVIDEOX | {
    "num_attention_heads": 3,
    "use_rotary_positional_embeddings": True,
    "is_train_face": True,
    "cross_attn_interval": 2,
    "cross_attn_dim_head": 8,
    "cross_attn_num_heads": 2,
    "LFE_id_dim": 6,
    "LFE_vit_dim": 8,
    "LFE_depth": 5,
    "LFE_dim_head": 8,
    "LFE_num_heads": 2,
    "LFE_num_id_token": 2,
    "LFE_num_querie": 4,
    "LFE_output_dim": 32,  # two thirds of the width
    "LFE_ff_mult": 1,
}
MOTIF: dict[str, Any] = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 3,
    "num_single_layers": 5,
    "num_decoder_layers": 2,
    "text_embed_dim": 32,
    "image_embed_dim": 24,
    "rope_axes_dim": (4, 6, 6),
}
COSMOS: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 4,
    "text_embed_dim": 32,
    "adaln_lora_dim": 8,
    "max_size": (4, 16, 16),
    "concat_padding_mask": False,  # would need torchvision
    "controlnet_block_every_n": 2,
}
KANDINSKY5: dict[str, Any] = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 24,
    "in_text_dim2": 12,
    "time_dim": 16,
    "model_dim": 32,
    "ff_dim": 48,
    "num_text_blocks": 1,
    "num_visual_blocks": 4,
    "axes_dims": (4, 6, 6),
}


HELIOS = WAN | {"rope_dim": (4, 6, 6), "is_amplify_history": True}
HELIOS.pop("rope_max_seq_len")
KANDINSKY6 = KANDINSKY5 | {"in_audio_dim": 6, "out_audio_dim": 6, "visual_cond": False}
KANDINSKY6 |= {"ca_rope": True, "num_visual_blocks": 6}
FIBO2: dict[str, Any] = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 4,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "cap_feat_dim": 24,
    "injection_layer_ids": (1, 2),
    "perceiver_num_layers": 1,
    "min_num_gist_tokens": 4,
    "max_num_gist_tokens": 8,
    "gist_step": 2,
    "gist_min_text_len": 4,
    "gist_max_text_len": 8,
    "axes_dims": (4, 6, 6),
    "axes_lens": (64, 32, 32),
}
IDEOGRAM: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "adaln_dim": 16,
    "llm_features_dim": 24,
    "mrope_section": (4, 2, 2),
}


def _cogvideox_rope(config: dict[str, Any]) -> Change:
    """(cos, sin), each [tokens, head width], that the pipeline makes."""

    def change(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
        grid = (height // 2, width // 2)
        rope = embeddings.get_3d_rotary_pos_embed(
            embed_dim=config["attention_head_dim"],
            crops_coords=None,
            grid_size=grid,
            temporal_size=-(-frames // config.get("patch_size_t", 1)),
            grid_type="slice",
            max_size=grid,
        )
        return inputs | {"image_rotary_emb": rope}

    return change


def _hunyuan_dit_rope(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    grid = (height // 2, width // 2)
    rope = embeddings.get_2d_rotary_pos_embed(
        HUNYUAN_DIT["attention_head_dim"], ((0, 0), grid), grid, output_type="pt"
    )
    return inputs | {"image_rotary_emb": rope}


def _lumina_rope(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    rope = embeddings.get_2d_rotary_pos_embed_lumina(16, 384, 384)
    return inputs | {"image_rotary_emb": rope}


def _allegro_rope(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    grid = (height // 2, width // 2)
    *tables, _, _, _ = embeddings.get_3d_rotary_pos_embed_allegro(
        ALLEGRO["attention_head_dim"], ((0, 0), grid), grid, frames, (2.2, 2.0, 2.0)
    )
    return inputs | {"image_rotary_emb": (tuple(tables), inputs["image_rotary_emb"][1])}


def _reference_flux3(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """A reference of 2 x 3 tokens in an argument of its own."""
    hidden, ids = inputs["hidden_states"], inputs["img_ids"]
    more = torch.cartesian_prod(*map(torch.arange, (1, 2, 3, 1)))
    more[:, 0] = 10
    return inputs | {
        "image_cond_hidden_states": hidden.new_zeros(len(hidden), 6, hidden.shape[2]),
        "image_cond_ids": more.to(ids),
    }


def _reference_joy(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """A reference of 2 x 3 patches behind the picture, and texts of different lengths."""
    hidden, texts = inputs["hidden_states"], inputs["encoder_hidden_states"]
    more = hidden.new_zeros(len(hidden), 6, *hidden.shape[2:])
    mask = torch.ones(texts.shape[:2], dtype=torch.bool)
    inputs = inputs | {
        "hidden_states": torch.cat([hidden, more], dim=1),
        "shape_list": [[*shapes, (1, 2, 3)] for shapes in inputs["shape_list"]],
        "encoder_hidden_states_mask": mask,
    }
    return _uneven("encoder_hidden_states_mask")(inputs, height, width, frames)


def _reference_fibo(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """A reference of 2 x 3 tokens in an argument of its own."""
    hidden = inputs["hidden_states"]
    return inputs | {"context_latents": [hidden.new_zeros(len(hidden), hidden.shape[1], 4, 6)]}


def _second_text(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """A text of letters in the picture, shorter in the second item."""
    batch = len(inputs["hidden_states"])
    more = {"encoder_attention_mask_2": torch.ones(batch, 5, dtype=torch.bool)}
    more = _uneven("encoder_attention_mask_2")(more, height, width, frames)
    return inputs | more | {"encoder_hidden_states_2": torch.zeros(batch, 5, 24)}


def _diffusion_forcing(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """A time per frame: [B, frames]."""
    times = _times(inputs["timestep"], 1, frames)
    return inputs | {"timestep": times, "enable_diffusion_forcing": True}


def _any_times(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """As AnyFlow has it: two times per frame, [B, frames]."""
    times = _times(inputs["timestep"][:, 0], 1, frames)
    return inputs | {"timestep": times, "r_timestep": times}


def _fibo_texts(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """Texts so different in length that the model makes more of one than of the other."""
    shape = inputs["encoder_hidden_states"].shape
    mask = torch.ones(shape[0], shape[2], dtype=torch.bool)
    mask[1:2, 4:] = False
    return inputs | {"encoder_attention_mask": mask}


def _time_per_frame(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """As Cosmos has it for video to world: [B, 1, frames, 1, 1]."""
    return inputs | {"timestep": _times(inputs["timestep"], 1, frames)[:, None, :, None, None]}


def _long_caption(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """The second item has more caption than is filled up to 32 tokens."""
    captions = inputs["cap_feats"]
    more = [captions[0].new_zeros(40, captions[0].shape[1])] if len(captions) > 1 else []
    return inputs | {"cap_feats": [captions[0], *more, *captions[2:]]}


def _text_lengths(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    return inputs | {"text_lens": TEXT - torch.arange(len(inputs["text_lens"]))}


def _mask(name: str, tokens: str) -> Change:
    """A mask that a model may go without, for `tokens`: item k hides its last k tokens."""

    def change(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
        full = torch.ones(inputs[tokens].shape[:2], dtype=torch.bool)
        return _uneven(name)(inputs | {name: full}, height, width, frames)

    return change


def _reference_flux(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """A reference of 2 x 3 tokens behind the picture, as Kontext and Flux 2 have it."""
    hidden, ids = inputs["hidden_states"], inputs["img_ids"]
    rows, columns = torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
    more = ids.new_zeros(6, ids.shape[1])
    more[:, 0] = 1 if ids.shape[1] == 3 else 10
    more[:, 1], more[:, 2] = rows.flatten(), columns.flatten()
    return inputs | {
        "hidden_states": hidden.new_zeros(len(hidden), hidden.shape[1] + 6, hidden.shape[2]),
        "img_ids": torch.cat([ids, more]),
    }


def _reference_qwen(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """A reference of 2 x 3 tokens behind the picture."""
    hidden = inputs["hidden_states"]
    return inputs | {
        "hidden_states": hidden.new_zeros(len(hidden), hidden.shape[1] + 6, hidden.shape[2]),
        "img_shapes": [[*shapes, (1, 2, 3)] for shapes in inputs["img_shapes"]],
    }


def _times(time: Tensor, per_frame: int, frames: int) -> Tensor:
    """[B, frames * per_frame]: the first frame is given, without noise."""
    times = time[:, None].repeat(1, frames * per_frame)
    times[:, :per_frame] = -1
    return times


def _time_per_token(patch: int) -> Change:
    """As Wan 2.2 5B and LTX have it, when the first frame is given: [B, tokens]."""

    def change(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
        time = inputs["timestep"]
        tokens = (height // patch) * (width // patch)
        given = {"audio_timestep": time} if "audio_hidden_states" in inputs else {}
        return inputs | {"timestep": _times(time, tokens, frames)} | given

    return change


def _uneven(name: str, end: int | None = None) -> Change:
    """Texts of different lengths: item k hides its last k tokens, those before `end`."""

    def change(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
        mask = inputs[name].clone()
        stop = end or mask.shape[1]
        for k in range(len(mask)):
            mask[k, stop - k : stop] = False
        return inputs | {name: mask}

    return change


_HUNYUAN = "HunyuanVideoTransformer3DModel"
_COGVIDEOX = "CogVideoXTransformer3DModel"
DITS = {
    dit.name: dit
    for dit in (
        Dit("flux", "FluxTransformer2DModel", FLUX_POOLED | {"guidance_embeds": True}),
        Dit("flux_schnell", "FluxTransformer2DModel", FLUX_POOLED),
        Dit("flux_kontext", "FluxTransformer2DModel", FLUX_POOLED, change=_reference_flux),
        Dit("flux2", "Flux2Transformer2DModel", FLUX2),
        Dit("flux2_edit", "Flux2Transformer2DModel", FLUX2, change=_reference_flux),
        Dit(
            "chroma",
            "ChromaTransformer2DModel",
            CHROMA,
            change=_uneven("attention_mask", end=TEXT),
        ),
        Dit("sd3", "SD3Transformer2DModel", SD3),
        Dit(
            "sd35",
            "SD3Transformer2DModel",
            SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)},
        ),
        Dit("qwen", "QwenImageTransformer2DModel", QWEN),
        Dit(
            "qwen_uneven",
            "QwenImageTransformer2DModel",
            QWEN,
            change=_mask("encoder_hidden_states_mask", "encoder_hidden_states"),
        ),
        Dit("qwen_edit", "QwenImageTransformer2DModel", QWEN, change=_reference_qwen),
        Dit(
            "qwen_edit_2511",
            "QwenImageTransformer2DModel",
            QWEN | {"zero_cond_t": True},
            change=_reference_qwen,
        ),
        Dit(
            "qwen21",
            "QwenImage21Transformer2DModel",
            QWEN21,
            change=_mask("encoder_hidden_states_mask", "encoder_hidden_states"),
        ),
        Dit("zimage", "ZImageTransformer2DModel", ZIMAGE),
        Dit("zimage_uneven", "ZImageTransformer2DModel", ZIMAGE, change=_long_caption),
        Dit("lumina2", "Lumina2Transformer2DModel", LUMINA2),
        Dit(
            "lumina2_uneven",
            "Lumina2Transformer2DModel",
            LUMINA2,
            change=_uneven("encoder_attention_mask"),
        ),
        Dit("auraflow", "AuraFlowTransformer2DModel", AURA),
        Dit("hidream", "HiDreamImageTransformer2DModel", HIDREAM),
        Dit("hunyuan_image", "HunyuanImageTransformer2DModel", HUNYUAN_IMAGE, size=(6, 4)),
        Dit(
            "hunyuan_image_ocr",
            "HunyuanImageTransformer2DModel",
            HUNYUAN_IMAGE | {"text_embed_2_dim": 24},
            size=(6, 4),
            change=_second_text,
        ),
        Dit("hunyuan_dit", "HunyuanDiT2DModel", HUNYUAN_DIT, change=_hunyuan_dit_rope),
        Dit("cogview3", "CogView3PlusTransformer2DModel", COGVIEW),
        Dit("cogview4", "CogView4Transformer2DModel", COGVIEW | {"rope_axes_dim": (16, 16)}),
        Dit("wan", "WanTransformer3DModel", WAN),
        Dit("wan_i2v", "WanTransformer3DModel", WAN_I2V),
        Dit("wan_ti2v", "WanTransformer3DModel", WAN, change=_time_per_token(2)),
        Dit(
            "wan_vace",
            "WanVACETransformer3DModel",
            WAN | {"vace_layers": [0, 2], "vace_in_channels": 12},
        ),
        Dit("hunyuan_video", _HUNYUAN, HUNYUAN_VIDEO),
        Dit(
            "hunyuan_video_uneven",
            _HUNYUAN,
            HUNYUAN_VIDEO,
            change=_uneven("encoder_attention_mask"),
        ),
        Dit(
            "hunyuan_video_i2v",
            _HUNYUAN,
            HUNYUAN_VIDEO | {"image_condition_type": "token_replace"},
        ),
        Dit("framepack", "HunyuanVideoFramepackTransformer3DModel", FRAMEPACK, size=(8, 8)),
        Dit("hunyuan_video15", "HunyuanVideo15Transformer3DModel", HUNYUAN_15, size=(6, 4)),
        Dit("cogvideox_2b", _COGVIDEOX, COGVIDEOX),
        Dit("cogvideox_5b", _COGVIDEOX, COGVIDEOX_5B, change=_cogvideox_rope(COGVIDEOX_5B)),
        Dit(
            "cogvideox_15",
            _COGVIDEOX,
            COGVIDEOX_15,
            frames=4,
            change=_cogvideox_rope(COGVIDEOX_15),
        ),
        Dit(
            "ltx",
            "LTXVideoTransformer3DModel",
            LTX,
            size=(6, 4),
            change=_uneven("encoder_attention_mask"),
        ),
        Dit("ltx_i2v", "LTXVideoTransformer3DModel", LTX, (6, 4), change=_time_per_token(1)),
        Dit("ltx2_i2v", "LTX2VideoTransformer3DModel", LTX2, (6, 4), change=_time_per_token(1)),
        Dit("ltx2", "LTX2VideoTransformer3DModel", LTX2, size=(6, 4)),
        Dit("ltx2_split", "LTX2VideoTransformer3DModel", LTX2 | {"rope_type": "split"}, (6, 4)),
        Dit("mochi", "MochiTransformer3DModel", MOCHI, change=_uneven("encoder_attention_mask")),
        Dit("allegro", "AllegroTransformer3DModel", ALLEGRO, change=_allegro_rope),
        Dit("easyanimate", "EasyAnimateTransformer3DModel", EASYANIMATE),
        Dit("latte", "LatteTransformer3DModel", LATTE, size=(8, 8)),
        Dit("flux3", "Flux3Transformer2DModel", FLUX3),
        Dit("flux3_edit", "Flux3Transformer2DModel", FLUX3, change=_reference_flux3),
        Dit("bria", "BriaTransformer2DModel", FLUX),
        Dit("bria_fibo", "BriaFiboTransformer2DModel", FLUX | {"text_encoder_dim": 24}),
        Dit("ovis", "OvisImageTransformer2DModel", FLUX | {"out_channels": 16}),
        Dit("longcat", "LongCatImageTransformer2DModel", FLUX_POOLED),
        Dit(
            "krea2",
            "Krea2Transformer2DModel",
            KREA2,
            change=_mask("encoder_attention_mask", "encoder_hidden_states"),
        ),
        Dit(
            "nucleus",
            "NucleusMoEImageTransformer2DModel",
            NUCLEUS,
            change=_mask("encoder_hidden_states_mask", "encoder_hidden_states"),
        ),
        Dit("lumina_next", "LuminaNextDiT2DModel", LUMINA_NEXT, change=_lumina_rope),
        Dit(
            "prx",
            "PRXTransformer2DModel",
            PRX,
            change=_mask("attention_mask", "encoder_hidden_states"),
        ),
        Dit("omnigen", "OmniGenTransformer2DModel", OMNIGEN),
        Dit("ernie", "ErnieImageTransformer2DModel", ERNIE, size=(6, 4), change=_text_lengths),
        Dit("joyimage", "JoyImageEditTransformer3DModel", JOY),
        Dit("glm_image", "GlmImageTransformer2DModel", GLM),
        Dit("sana", "SanaTransformer2DModel", SANA, size=(6, 4)),
        Dit("wan_animate", "WanAnimateTransformer3DModel", WAN_ANIMATE),
        Dit("skyreels", "SkyReelsV2Transformer3DModel", WAN | {"inject_sample_info": True}),
        Dit("skyreels_df", "SkyReelsV2Transformer3DModel", WAN, change=_diffusion_forcing),
        Dit("chronoedit", "ChronoEditTransformer3DModel", WAN_I2V),
        Dit("consisid", "ConsisIDTransformer3DModel", CONSISID, change=_cogvideox_rope(CONSISID)),
        Dit("motif", "MotifVideoTransformer3DModel", MOTIF),
        Dit("cosmos", "CosmosTransformer3DModel", COSMOS),
        Dit("cosmos_v2w", "CosmosTransformer3DModel", COSMOS, change=_time_per_frame),
        Dit("kandinsky5", "Kandinsky5Transformer3DModel", KANDINSKY5),
        Dit("kandinsky6", "Kandinsky6Transformer3DModel", KANDINSKY6),
        Dit("anyflow", "AnyFlowTransformer3DModel", WAN, change=_any_times),
        Dit("helios", "HeliosTransformer3DModel", HELIOS, size=(8, 8)),
        Dit("bria_fibo2", "BriaFibo2Transformer2DModel", FIBO2, change=_reference_fibo),
        Dit(
            "bria_fibo2_uneven",
            "BriaFibo2Transformer2DModel",
            FIBO2,
            change=_fibo_texts,
        ),
        Dit("ideogram4", "Ideogram4Transformer2DModel", IDEOGRAM),
        Dit("joyimage_plus", "JoyImageEditPlusTransformer3DModel", JOY, change=_reference_joy),
    )
}
