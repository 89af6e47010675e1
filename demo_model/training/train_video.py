"""Train a transformer on clips; resumes from its checkpoint.

    python train_video.py --sprites sprites.npz --pipeline pipeline --out run_video

Single frames come first, then clips with a share of single frames, within a time budget.
A file `run_video/start.safetensors` (as `run_video/transformer.safetensors` is written) is
continued from. `--warm-only 16` only compiles the steps of 16 frames: run it beside the first
phase, and the compiler's cache is full when this program needs it.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from diffusers import WanTransformer3DModel
from torch import Tensor

import models
import video
from config import DOWNSAMPLING, VideoRun, parse
from flow import Text
from sample_video import write_clips
from trainer import Trainer, start


class VideoTrainer(Trainer):
    """Clips and single frames of one size, drawn by Wan."""

    size_name = "frames"
    kept = (*Trainer.kept, "move", "pan")

    def __init__(self, run: VideoRun, args: Namespace) -> None:
        transformer = video.transformer()
        blocks = transformer.blocks
        super().__init__(run, args, transformer, blocks, blocks[run.layout_block])
        self.composer = video.ClipComposer(args.sprites, args.device)

    def pick(self, progress: float, rng: random.Random) -> int:
        still = progress < self.run.image_share or rng.random() < self.run.mixed_rate
        return 1 if still else self.run.frames

    def batch_size(self, size: int) -> int:
        return self.run.image_batch if size == 1 else self.run.video_batch

    def scenes(self) -> Iterator[dict[str, Tensor]]:
        rng = np.random.default_rng(self.step)
        return (video.with_motion(scenes, rng) for scenes in super().scenes())

    def encode(self, scenes: dict[str, Tensor], size: int) -> Tensor:
        """Latents [B, frames, 4, h, w]."""
        clips = self.composer.clips(scenes, self.run.latent * DOWNSAMPLING, size)
        return models.encode(self.vae, clips.flatten(0, 1)).unflatten(0, (-1, size))

    def arrange(self, latents: Tensor) -> Tensor:
        return latents.transpose(1, 2)

    def predict(self, noisy: Tensor, level: Tensor, text: Text) -> Tensor:
        return video.predict(self.model.transformer, noisy, level, text)

    def layout(self, scenes: dict[str, Tensor], latents: Tensor) -> tuple[Tensor, Tensor]:
        frames, grid = latents.shape[1], latents.shape[-1] // 2
        kind, spot = self.composer.layout(video.moments(scenes, frames), grid)
        return kind.unflatten(0, (-1, frames)), spot.unflatten(0, (-1, frames))

    def write_sheets(self, transformer: WanTransformer3DModel, folder: Path) -> None:
        run, parts = self.run, (transformer, self.vae, self.text, self.tokenizer)
        path = folder / f"{self.step:06d}.jpg"
        write_clips(*parts, run.latent, run.frames, run.sheet_images, path)


if __name__ == "__main__":
    run, args = parse(VideoRun, sprites="sprites.npz", pipeline="pipeline folder", out="run folder")
    start(VideoTrainer, run, args)
