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

# Tokens along a side of a 512 px picture: 4x downsampling, then 2x2 latents to a token.
GRID = 64
TRANSFORMER = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 14,
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "joint_attention_dim": 256,
    "pooled_projection_dim": 256,
    # Of 64 channels per head, 8 never turn; the other axes are rows and columns.
    "axes_dims_rope": (8, 28, 28),
}
# FluxPipeline shifts the noise levels by the number of tokens: 1.9 at 256 px, 3.2 at 512 px.
FLOW_SCHEDULER = {
    "num_train_timesteps": TRAIN_STEPS,
    "use_dynamic_shifting": True,
    "base_image_seq_len": 256,
    "max_image_seq_len": GRID**2,
    "base_shift": 0.5,
    "max_shift": 1.15,
}
# The transformer of the clips, `WanTransformer3DModel`: 9.9 M parameters.
VIDEO = {
    "patch_size": (1, 2, 2),
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 10,
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "ffn_dim": 768,
    "text_dim": 256,
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
class FlowRun:
    """What the runs of all transformers have.

    `*_share` are shares of the wall-clock budget `seconds`; the learning rate falls linearly
    to zero over the last `decay_share`.
    """

    seconds: float = 892.0
    # The program saves and stops so many seconds after its start; the same command goes on.
    pause_after: float = 1e9
    # Of scenes, noise and levels. A run that continues given weights wants another one.
    seed: int = 0
    learning_rate: float = 2e-3
    adam_factor: float = 0.4
    weight_decay: float = 0.01
    warmup_steps: int = 150
    decay_share: float = 0.35
    ema_decay: float = 0.998
    caption_dropout: float = 0.10
    uniform_timesteps: float = 0.20
    # Share of noise levels drawn evenly from the top quarter, where layouts are made.
    high_noise: float = 0.0
    # Weight of the layout loss at the start; it falls linearly to nothing at `layout_share`.
    layout_weight: float = 0.20
    layout_share: float = 0.70
    # Index of the block whose tokens the layout is read from: Flux's single ones, all of Wan's.
    layout_block: int = 4
    replays: int = 4
    pool_scenes: int = 8192
    scenes_at_once: int = 48
    checkpoint_every: float = 200.0
    log_every: int = 20
    sheet_images: int = 12
    # 1: cuDNN's attention instead of flash attention. A third faster on an H200, but with
    # torch 2.11 the first step of the compiled blocks ends in an illegal memory access.
    cudnn_attention: int = 0
    # Size (side of the latents, or frames) whose steps are only compiled, to fill the
    # compiler's cache.
    warm_only: int = 0


@dataclass(frozen=True)
class TransformerRun(FlowRun):
    """128 px, then 256 px, then 512 px with a share of 256 px steps."""

    small_share: float = 0.07
    middle_share: float = 0.29
    # Share of steps at 256 px once 512 px has begun: without them that size is forgotten.
    mixed_rate: float = 0.20
    small_latent: int = 32
    middle_latent: int = 64
    full_latent: int = 128
    small_batch: int = 384
    middle_batch: int = 160
    full_batch: int = 48


@dataclass(frozen=True)
class NumbersRun(TransformerRun):
    """Rounds of drawing and learning at 256 px, then at 512 px; see `train_numbers.py`."""

    seconds: float = 500.0
    seed: int = 7
    middle_share: float = 0.7
    learning_rate: float = 3e-4
    warmup_steps: int = 10
    decay_share: float = 0.3
    ema_decay: float = 0.95
    caption_dropout: float = 0.15
    high_noise: float = 0.2
    layout_weight: float = 0.0
    # Captions of a round, and pictures of each.
    captions: int = 100
    full_captions: int = 24
    tries: int = 8
    # Of captions with fewer than three objects, which seldom go wrong, the share that is drawn.
    easy_share: float = 0.2
    # How often each picture is learnt from, with fresh noise of at least the lowest level.
    uses: int = 2
    lowest_level: float = 0.4
    # How far a picture better or worse than its likes moves the prediction towards or from it.
    strength: float = 2.0
    guidance: float = 4.0
    # Of the pictures of a step.
    composed_share: float = 0.3
    # Held-out captions that are counted at the start and at the end.
    judged: int = 160


@dataclass(frozen=True)
class GuidanceRun(TransformerRun):
    """The sizes of the transformer; its targets are the guided predictions of a teacher."""

    seconds: float = 420.0
    small_share: float = 0.18
    middle_share: float = 0.35
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    high_noise: float = 0.20
    decay_share: float = 0.60
    caption_dropout: float = 0.05
    layout_weight: float = 0.0
    # Guidance is drawn evenly from here.
    guidance_low: float = 1.0
    guidance_high: float = 6.0


@dataclass(frozen=True)
class VideoRun(FlowRun):
    """Single frames, then clips with a share of single frames."""

    seconds: float = 1000.0
    high_noise: float = 0.20
    image_share: float = 0.20
    # Share of steps on single frames once clips have begun: they cost little, and show more
    # scenes in the same time.
    mixed_rate: float = 0.20
    latent: int = 32
    frames: int = 16
    image_batch: int = 384
    video_batch: int = 32
    sheet_images: int = 8


@dataclass(frozen=True)
class ClassifierRun:
    """The judge of caption agreement: sees composed scenes only, never samples."""

    seconds: float = 120.0
    batch: int = 256
    learning_rate: float = 2e-3
    # Batches of fresh scenes that it is tried on in the end.
    judged_batches: int = 8


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
