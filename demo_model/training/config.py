"""Every number of the training runs, in one place: the defaults are what was run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

MAX_TOKENS = 32
DOWNSAMPLING = 4
TRAIN_STEPS = 1000
# Close to zero signal at the last step (0.6 %), so that sampling from pure noise gives true
# background colours, yet not exactly zero: PNDM divides by the signal there.
BETA_SCHEDULE = {"beta_start": 1e-4, "beta_end": 2e-2, "beta_schedule": "linear"}

AUTOENCODER = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (32, 64, 128),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "layers_per_block": 1,
    "norm_num_groups": 16,
    # Without attention the autoencoder is the same function at every picture size.
    "mid_block_add_attention": False,
    "sample_size": 256,
    "scaling_factor": 1.0,
    "force_upcast": False,
}
UNET = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (128, 192, 256),
    "down_block_types": ("CrossAttnDownBlock2D",) * 3,
    "up_block_types": ("CrossAttnUpBlock2D",) * 3,
    "layers_per_block": 1,
    "cross_attention_dim": 256,
    # diffusers reads this as the number of heads: 64 channels each.
    "attention_head_dim": (2, 3, 4),
    "use_linear_projection": True,
}
TEXT_ENCODER = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_TOKENS,
    "projection_dim": 256,
    "hidden_act": "quick_gelu",
}


@dataclass(frozen=True)
class AutoencoderRun:
    """Crops first, whole pictures last; `seconds` is the wall-clock budget of both."""

    seconds: float = 180.0
    crop_share: float = 0.55
    crop_pixels: int = 128
    crop_batch: int = 128
    full_pixels: int = 256
    full_batch: int = 32
    learning_rate: float = 2e-3
    kl_weight: float = 3e-4
    gradient_weight: float = 1.0
    # Share of steps that decode pooled latents against the pooled picture: keeps latents smooth.
    pooled_share: float = 0.25


@dataclass(frozen=True)
class DiffusionRun:
    """Half size, then full size, then full size with other sizes mixed in.

    `*_share` are shares of the wall-clock budget `seconds`; the learning rate falls linearly
    to zero over the last `decay_share`.
    """

    seconds: float = 985.0
    half_share: float = 0.33
    half_latent: int = 32
    half_batch: int = 768
    full_latent: int = 64
    full_batch: int = 192
    mixed_share: float = 0.30
    mixed_rate: float = 0.20
    # Latent side -> batch size of the mixed-in batches.
    mixed: dict[int, int] = field(default_factory=lambda: {48: 320, 96: 72, 32: 512})
    learning_rate: float = 1.5e-3
    adam_factor: float = 0.4
    weight_decay: float = 0.01
    warmup_steps: int = 200
    decay_share: float = 0.40
    ema_decay: float = 0.999
    caption_dropout: float = 0.10
    uniform_timesteps: float = 0.25
    timestep_mean: float = -0.2
    # Each composed scene is used this many times on average, with fresh noise.
    replays: int = 4
    pool_batches: int = 256
    sheet_every: float = 150.0
    sheet_images: int = 24
    warm_only: int = 0
    checkpoint_every: float = 240.0


@dataclass(frozen=True)
class ClassifierRun:
    """The judge of caption agreement: sees composed scenes only, never samples."""

    seconds: float = 70.0
    pixels: int = 128
    batch: int = 256
    learning_rate: float = 2e-3


def parse(run: type[T], **paths: str) -> tuple[T, argparse.Namespace]:
    """A run's settings from the command line: one `--option` per number, plus `paths`."""
    parser = argparse.ArgumentParser(description=run.__doc__)
    for name, text in paths.items():
        parser.add_argument(f"--{name}", type=Path, required=True, help=text)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    numbers = [f for f in fields(run) if isinstance(f.default, int | float)]
    for item in numbers:
        flag = "--" + item.name.replace("_", "-")
        parser.add_argument(flag, type=type(item.default), default=item.default)
    args = parser.parse_args()
    return run(**{item.name: getattr(args, item.name) for item in numbers}), args
