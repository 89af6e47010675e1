"""Models to measure: architectures with random weights, the embedded model, or any pipeline."""

import copy
import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ..generation.loading import (
    denoiser,
    denoiser_name,
    load_pipeline,
    pick_device,
    pick_dtype,
    quiet_diffusers,
    set_attention,
)

_CROSS_DOWN, _CROSS_UP = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"

_SD15 = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": (_CROSS_DOWN, _CROSS_DOWN, _CROSS_DOWN, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", _CROSS_UP, _CROSS_UP, _CROSS_UP),
    "layers_per_block": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 768,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "sd15": _SD15,
    "sd21": {
        **_SD15,
        "sample_size": 96,
        "attention_head_dim": (5, 10, 20, 20),
        "cross_attention_dim": 1024,
        "use_linear_projection": True,
        "upcast_attention": True,
    },
    "sdxl": {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", _CROSS_DOWN, _CROSS_DOWN),
        "up_block_types": (_CROSS_UP, _CROSS_UP, "UpBlock2D"),
        "layers_per_block": 2,
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}
"""Configurations of `UNet2DConditionModel`, as they are published."""

VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
_SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}

_M = TypeVar("_M", bound=nn.Module)


@dataclass(frozen=True)
class Subject:
    """A model under measurement, unpatched."""

    name: str
    pipe: Any
    """A diffusers pipeline. Of an architecture, it has no text encoder."""
    device: torch.device
    dtype: torch.dtype
    attention: str

    @property
    def model(self) -> Any:
        return denoiser(self.pipe)

    @property
    def pixels_per_latent(self) -> int:
        return int(getattr(self.pipe, "vae_scale_factor", 8))

    def pipe_with(self, model: nn.Module) -> Any:
        """The pipeline around another denoising model."""
        pipe = copy.copy(self.pipe)
        setattr(pipe, denoiser_name(pipe), model)
        return pipe


def load_subject(
    name: str, *, device: str = "auto", dtype: str = "auto", attention: str = "default"
) -> Subject:
    """A model by the name of an architecture, or as `load_pipeline` takes it."""
    place = pick_device(device)
    numbers = pick_dtype(dtype, place)
    if name in ARCHITECTURES:
        pipe = _random_pipeline(name, place, numbers)
        set_attention(pipe, attention)
    else:
        pipe = load_pipeline(name, device=device, dtype=dtype, attention=attention)  # type: ignore[arg-type]
    pipe.set_progress_bar_config(disable=True)
    denoiser(pipe).eval().requires_grad_(False)
    return Subject(name, pipe, place, numbers, attention)


def _random_pipeline(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    diffusers = quiet_diffusers()
    large = name == "sdxl"
    unet = random_model(diffusers.UNet2DConditionModel, ARCHITECTURES[name], device, dtype, 0)
    vae_config = {**VAE, "scaling_factor": 0.13025 if large else 0.18215, "force_upcast": large}
    vae = random_model(diffusers.AutoencoderKL, vae_config, device, dtype, 1)
    if large:
        return diffusers.StableDiffusionXLPipeline(
            vae=vae,
            text_encoder=None,
            text_encoder_2=None,
            tokenizer=None,
            tokenizer_2=None,
            unet=unet,
            scheduler=diffusers.EulerDiscreteScheduler(**_SCHEDULE),
            add_watermarker=False,
        )
    kind = {"prediction_type": "v_prediction"} if name == "sd21" else {}
    return diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        unet=unet,
        scheduler=diffusers.DDIMScheduler(**_SCHEDULE, clip_sample=False, **kind),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def random_model(
    cls: Any, config: dict[str, Any], device: torch.device, dtype: torch.dtype, seed: int
) -> Any:
    """Built where it will run: two billion numbers drawn on a CPU would take a minute."""
    before = torch.get_default_dtype()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        try:
            torch.set_default_dtype(dtype)
            model = cls(**config)
        finally:
            torch.set_default_dtype(before)
        # A layer of zeros would hide what comes before it from everything that comes after.
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))
    return model.to(dtype=dtype).eval().requires_grad_(False)


def shared_copy(model: _M) -> _M:
    """A copy with modules of its own and the same weights, so that it takes no memory.

    Each contender patches a copy: all of them stay ready at once, and take turns.
    """
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
