"""Train the transformer on the shipped autoencoder and text encoder; resumes from its checkpoint.

    python train_transformer.py --sprites sprites.npz --pipeline pipeline --out run

128 px come first, then 256 px, then 512 px with a share of 256 px, within a time budget.
A file `run/start.safetensors` (as `run/transformer.safetensors` is written) is continued from.
`--warm-only 64` only compiles the steps of 64 x 64 latents: run it beside the first phase, and
the compiler's cache is full when this program needs it.
"""

from __future__ import annotations

import functools
import json
import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FluxTransformer2DModel
from safetensors.torch import load_file
from torch import Tensor, nn

import checkpoint
import models
from config import DOWNSAMPLING, TransformerRun, parse
from data import LatentPool, scene_batches
from flow import FlowModel, TextEncoder, pack, predict, shifted
from optimizer import MovingAverage, Optimizers, rate_at
from sample_transformer import write_sheet
from scenes import Composer
from tokenizer import WordTokenizer

STARTED = time.time()
# Modulations, embeddings and the last layer start at zero or are no maps between features.
_NOT_MATRICES = ("norm", "embed", "probe", "transformer.proj_out")
_KEPT = ("tokens", "sprite", "visible", "place", "angle")


class Trainer:
    """Everything one step needs, and what a checkpoint must hold."""

    def __init__(self, run: TransformerRun, tokenizer: WordTokenizer, args: Namespace) -> None:
        self.run, self.args, self.device = run, args, args.device
        self.kind = torch.device(args.device).type
        self.model = FlowModel().to(self.device)
        self.text = TextEncoder(args.pipeline, args.device)
        self.composer = Composer(args.sprites, args.device)
        self.optimizers = Optimizers(
            self.model, run.learning_rate, run.adam_factor, run.weight_decay, _NOT_MATRICES
        )
        self.average = MovingAverage(self.model, run.ema_decay)
        self.hidden: Tensor | None = None
        watched = self.model.transformer.single_transformer_blocks[run.layout_block]
        watched.register_forward_hook(self._watch)
        if args.compile:
            compile_blocks(self.model.transformer)
        self.empty = torch.tensor(tokenizer(""), device=self.device)
        self.step, self.elapsed, self.images = 0, 0.0, 0

    def _watch(self, block: nn.Module, inputs: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        self.hidden = outputs[1]

    def levels(self, batch: int, tokens: int) -> Tensor:
        """Noise levels [batch]: mostly logit-normal, the rest uniform, shifted by size.

        A share of them is drawn again from the top quarter.
        """
        normal = torch.randn(batch, device=self.device).sigmoid()
        uniform = torch.rand(batch, device=self.device)
        chosen = torch.rand(batch, device=self.device) < self.run.uniform_timesteps
        level = shifted(torch.where(chosen, uniform, normal), tokens)
        high = torch.rand(batch, device=self.device) < self.run.high_noise
        return torch.where(high, 1 - uniform / 4, level)

    def backward(
        self, latents: Tensor, scenes: dict[str, Tensor], layout_weight: float
    ) -> tuple[Tensor, Tensor]:
        """Flow and layout loss of latents [B, 4, h, w]; leaves the gradients of both."""
        clean = pack(latents.float())
        noise = torch.randn_like(clean)
        level = self.levels(len(clean), clean.shape[1])
        noisy = torch.lerp(clean, noise, level.view(-1, 1, 1))
        dropped = torch.rand(len(clean), 1, device=self.device) < self.run.caption_dropout
        tokens = torch.where(dropped, self.empty, scenes["tokens"])
        with torch.autocast(self.kind, torch.bfloat16):
            v = predict(self.model.transformer, noisy, level, self.text(tokens))
        loss = F.mse_loss(v.float(), noise - clean)
        layout = self._layout_loss(scenes, latents.shape[-1] // 2) if layout_weight else 0 * loss
        (loss + layout_weight * layout).backward()
        self.hidden = None
        return loss.detach(), layout.detach()

    def _layout_loss(self, scenes: dict[str, Tensor], grid: int) -> Tensor:
        assert self.hidden is not None
        with torch.autocast(self.kind, torch.bfloat16):
            return self.model.probe(self.hidden, *self.composer.layout(scenes, grid))

    def update(self, progress: float) -> Tensor:
        rate = rate_at(progress, self.step, self.run.warmup_steps, self.run.decay_share)
        norm = self.optimizers.step(rate)
        self.average.update(self.model, self.step)
        self.step += 1
        return norm

    def averaged(self) -> dict[str, Tensor]:
        """The transformer's averaged weights under their own names."""
        part = "transformer."
        weights = self.average.weights.items()
        return {name.removeprefix(part): w for name, w in weights if name.startswith(part)}

    def save(self, folder: Path) -> None:
        counters = {k: getattr(self, k) for k in ("step", "elapsed", "images")}
        checkpoint.save(folder, self.model, self.average, self.optimizers, counters)
        models.save_tensors(self.averaged(), folder / "transformer.safetensors", torch.float16)

    def load(self, folder: Path) -> None:
        counters = checkpoint.load(folder, self.model, self.average, self.optimizers)
        if counters:
            self.step, self.images = int(counters["step"]), int(counters["images"])
            self.elapsed = counters["elapsed"]
            print(f"resumed at step {self.step}", flush=True)
        elif (folder / "start.safetensors").exists():
            self.model.transformer.load_state_dict(load_file(folder / "start.safetensors"))
            self.average = MovingAverage(self.model, self.run.ema_decay)
            print("started from given weights", flush=True)


def _run_block(
    forward: Callable[..., tuple[Tensor, Tensor]], block: nn.Module, **inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """A block whose outputs are laid out like its inputs: one compilation serves all of a kind."""
    text, image = forward(block, **inputs)
    return text.contiguous(), image.contiguous()


def compile_blocks(transformer: FluxTransformer2DModel) -> None:
    """Compile one double and one single block for each size, instead of sixteen blocks."""
    compiled = torch.compile(_run_block, dynamic=False, fullgraph=True)
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        # The hooks of a block stay outside, where they may keep what they see.
        block.forward = functools.partial(compiled, type(block).forward, block)


def configure_torch(run: TransformerRun) -> None:
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 32
    if hasattr(torch._inductor.config, "mix_order_reduction"):
        # An earlier transformer did not compile with it under torch 2.11.
        torch._inductor.config.mix_order_reduction = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(bool(run.cudnn_attention))
    torch.backends.cuda.enable_flash_sdp(not run.cudnn_attention)


def pick_side(run: TransformerRun, progress: float, rng: random.Random) -> int:
    """Side of the latents of the next step."""
    if progress < run.small_share:
        return run.small_latent
    if progress < run.small_share + run.middle_share or rng.random() < run.mixed_rate:
        return run.middle_latent
    return run.full_latent


def batch_size(run: TransformerRun, side: int) -> int:
    sizes = {
        run.small_latent: run.small_batch,
        run.middle_latent: run.middle_batch,
        run.full_latent: run.full_batch,
    }
    return sizes[side]


def warm_up(trainer: Trainer, side: int) -> None:
    """One step on noise: fills the compiler's cache on disk."""
    start, batch = time.time(), batch_size(trainer.run, side)
    latents = torch.randn(batch, 4, side, side, device=trainer.device).half()
    slots = torch.zeros(batch, 4, device=trainer.device)
    scenes = {"sprite": slots.long(), "visible": slots, "angle": slots}
    scenes["place"] = torch.ones(batch, 4, 3, device=trainer.device)
    scenes["tokens"] = trainer.empty.expand(batch, -1)
    trainer.backward(latents, scenes, trainer.run.layout_weight)
    print(f"compiled {side} x {side} in {time.time() - start:.0f} s", flush=True)


class Pools:
    """One pool of latents for each size, made when first asked for."""

    def __init__(
        self, trainer: Trainer, vae: AutoencoderKL, scenes: Iterator[dict[str, Tensor]]
    ) -> None:
        self.trainer, self.vae, self.scenes = trainer, vae, scenes
        self.pools: dict[int, LatentPool] = {}
        # Scenes still to be composed at each size, so that each is used `replays` times.
        self.owed: dict[int, float] = {}

    def draw(self, side: int, batch: int) -> tuple[Tensor, dict[str, Tensor]]:
        run = self.trainer.run
        if side not in self.pools:
            self.pools[side] = self._pool(side)
            self.owed[side] = 8.0 * batch
        self.owed[side] += batch / run.replays
        while self.owed[side] >= run.full_batch:
            self.pools[side].add()
            self.owed[side] -= run.full_batch
        return self.pools[side].draw(batch)

    def _pool(self, side: int) -> LatentPool:
        def encode(scenes: dict[str, Tensor]) -> Tensor:
            return models.encode(self.vae, self.trainer.composer(scenes, side * DOWNSAMPLING))

        return LatentPool(encode, self.scenes, self.trainer.run.pool_scenes, _KEPT)


def main() -> None:
    run, args = parse(
        TransformerRun, sprites="sprites.npz", pipeline="pipeline folder", out="run folder"
    )
    configure_torch(run)
    torch.manual_seed(0)
    tokenizer = WordTokenizer(args.pipeline / "tokenizer")
    trainer = Trainer(run, tokenizer, args)
    if run.warm_only:
        return warm_up(trainer, run.warm_only)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer.load(args.out)
    torch.manual_seed(trainer.step)
    trainer.composer.generator.manual_seed(trainer.step)
    vae = AutoencoderKL.from_pretrained(args.pipeline / "vae").to(args.device).eval()
    vae = vae.requires_grad_(False).to(memory_format=torch.channels_last)
    train(trainer, vae, tokenizer)


def train(trainer: Trainer, vae: AutoencoderKL, tokenizer: WordTokenizer) -> None:
    run, args = trainer.run, trainer.args
    scenes = scene_batches(tokenizer, run.full_batch, seed=trainer.step, workers=args.workers)
    pools = Pools(trainer, vae, scenes)
    log = (args.out / "transformer.jsonl").open("a")
    (args.out / "transformer_config.json").write_text(json.dumps(asdict(run), indent=1) + "\n")
    rng = random.Random(trainer.step)
    start = time.time() - trainer.elapsed
    last_save = last_row = trainer.elapsed
    while (progress := trainer.elapsed / run.seconds) < 1:
        if time.time() - STARTED > run.pause_after:
            break
        side = pick_side(run, progress, rng)
        batch = batch_size(run, side)
        weight = run.layout_weight * max(0.0, 1 - progress / run.layout_share)
        losses = trainer.backward(*pools.draw(side, batch), weight)
        norm = trainer.update(progress)
        trainer.images += batch
        trainer.elapsed = time.time() - start
        if trainer.step % 20 == 0:
            loss, layout = (value.item() for value in losses)
            row = {"step": trainer.step, "seconds": trainer.elapsed, "images": trainer.images}
            row |= {"side": side, "loss": loss, "layout": layout, "gradient": norm.item()}
            row = {key: round(value, 4) for key, value in row.items()}
            log.write(json.dumps(row) + "\n")
            log.flush()
            if trainer.elapsed - last_row > 15:
                last_row = trainer.elapsed
                print(row, flush=True)
        if trainer.elapsed - last_save > run.checkpoint_every:
            last_save = trainer.elapsed
            trainer.save(args.out)
    trainer.save(args.out)
    print(f"{trainer.step} steps, {trainer.images} images, {trainer.elapsed:.0f} s", flush=True)
    if run.sheet_images:
        model = FluxTransformer2DModel.from_config(trainer.model.transformer.config)
        model.load_state_dict(trainer.averaged())
        model = model.to(args.device).eval()
        for side in (run.middle_latent, run.full_latent):
            path = args.out / "sheets" / f"{trainer.step:06d}_{side * DOWNSAMPLING}px.jpg"
            write_sheet(model, vae, trainer.text, tokenizer, side, run.sheet_images, path)


if __name__ == "__main__":
    main()
