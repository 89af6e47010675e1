"""Train the transformer on the shipped autoencoder and text encoder; resumes from its checkpoint.

    python train_transformer.py --sprites sprites.npz --pipeline pipeline --out run

128 px come first, then 256 px, then 512 px with a share of 256 px, within a time budget.
A file `run/start.safetensors` (as `run/transformer.safetensors` is written) is continued from.
`--warm-only 64` only compiles the steps of 64 x 64 latents: run it beside the first phase, and
the compiler's cache is full when this program needs it.
"""

from __future__ import annotations

import random
from argparse import Namespace
from pathlib import Path

from diffusers import FluxTransformer2DModel
from torch import Tensor

import models
from config import DOWNSAMPLING, TRANSFORMER, TransformerRun, parse
from flow import Text, initialise, pack, predict
from sample_transformer import write_sheet
from scenes import Composer
from trainer import Trainer, start


class ImageTrainer(Trainer):
    """Pictures of three sizes, drawn by Flux."""

    size_name = "side"

    def __init__(
        self,
        run: TransformerRun,
        args: Namespace,
        transformer: FluxTransformer2DModel | None = None,
    ) -> None:
        """Without a transformer, a new one."""
        if transformer is None:
            transformer = FluxTransformer2DModel(**TRANSFORMER)
            initialise(transformer)
        single = transformer.single_transformer_blocks
        blocks = (*transformer.transformer_blocks, *single)
        super().__init__(run, args, transformer, blocks, single[run.layout_block])
        self.composer = Composer(args.sprites, args.device)

    def pick(self, progress: float, rng: random.Random) -> int:
        run = self.run
        if progress < run.small_share:
            return run.small_latent
        if progress < run.small_share + run.middle_share or rng.random() < run.mixed_rate:
            return run.middle_latent
        return run.full_latent

    def batch_size(self, size: int) -> int:
        run = self.run
        sizes = {
            run.small_latent: run.small_batch,
            run.middle_latent: run.middle_batch,
            run.full_latent: run.full_batch,
        }
        return sizes[size]

    def encode(self, scenes: dict[str, Tensor], size: int) -> Tensor:
        return models.encode(self.vae, self.composer(scenes, size * DOWNSAMPLING))

    def arrange(self, latents: Tensor) -> Tensor:
        return pack(latents)

    def predict(self, noisy: Tensor, level: Tensor, text: Text) -> Tensor:
        return predict(self.model.transformer, noisy, level, text)

    def layout(self, scenes: dict[str, Tensor], latents: Tensor) -> tuple[Tensor, Tensor]:
        return self.composer.layout(scenes, latents.shape[-1] // 2)

    def write_sheets(self, transformer: FluxTransformer2DModel, folder: Path) -> None:
        run = self.run
        for side in (run.middle_latent, run.full_latent):
            path = folder / f"{self.step:06d}_{side * DOWNSAMPLING}px.jpg"
            parts = (transformer, self.vae, self.text, self.tokenizer)
            write_sheet(*parts, side, run.sheet_images, path)


if __name__ == "__main__":
    run, args = parse(
        TransformerRun, sprites="sprites.npz", pipeline="pipeline folder", out="run folder"
    )
    start(ImageTrainer, run, args)
