"""Train text encoder and UNet together, within a time budget; resumes from its checkpoint.

    python train_diffusion.py --sprites sprites.npz --tokenizer pipeline/tokenizer --out run

`run/autoencoder.safetensors` must be there. Half-size latents come first, then full size, then
full size with a share of other sizes. `--warm-only 1` (or 2: the other sizes)
only compiles the steps: run it while the autoencoder trains, and the compiler's cache is full
when this program needs it.
"""

from __future__ import annotations

import copy
import json
import random
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler
from torch import Tensor

import checkpoint
import models
from config import DOWNSAMPLING, TRAIN_STEPS, DiffusionRun, parse
from data import LatentPool, scene_batches
from optimizer import MovingAverage, Optimizers, rate_at
from sampling import SCHEDULER, sample, save_sheet
from scenes import Composer
from tokenizer import WordTokenizer
from tomesd_demo_model.captions import sample_captions


class Trainer:
    """Everything one step needs, and what a checkpoint must hold."""

    def __init__(self, run: DiffusionRun, tokenizer: WordTokenizer, args: Namespace) -> None:
        self.run, self.args, self.device = run, args, args.device
        self.kind = torch.device(args.device).type
        self.model = models.Denoiser(tokenizer).to(self.device, memory_format=torch.channels_last)
        unet = self.model.unet
        self.unet = torch.compile(unet, dynamic=False) if args.compile else unet
        self.optimizers = Optimizers(
            self.model, run.learning_rate, run.adam_factor, run.weight_decay
        )
        self.average = MovingAverage(self.model, run.ema_decay)
        signal = DDIMScheduler(**SCHEDULER).alphas_cumprod.to(self.device)
        self.alpha, self.sigma = signal.sqrt(), (1 - signal).sqrt()
        self.empty = torch.tensor(tokenizer(""), device=self.device)
        self.step, self.elapsed, self.images = 0, 0.0, 0

    def timesteps(self, batch: int) -> Tensor:
        """Mostly logit-normal, where layout and objects are decided; the rest uniform."""
        normal = torch.randn(batch, device=self.device) + self.run.timestep_mean
        uniform = torch.rand(batch, device=self.device)
        chosen = torch.rand(batch, device=self.device) < self.run.uniform_timesteps
        share = torch.where(chosen, uniform, normal.sigmoid())
        return (share * TRAIN_STEPS).long().clamp(0, TRAIN_STEPS - 1)

    def backward(self, latents: Tensor, tokens: Tensor) -> Tensor:
        """Loss of one batch of latents [B, 4, h, w], tokens [B, T]; leaves its gradients."""
        clean = latents.float()
        noise = torch.randn_like(clean)
        t = self.timesteps(len(clean))
        alpha, sigma = (v[t].view(-1, 1, 1, 1) for v in (self.alpha, self.sigma))
        target = alpha * noise - sigma * clean
        noisy = (alpha * clean + sigma * noise).contiguous(memory_format=torch.channels_last)
        dropped = torch.rand(len(clean), 1, device=self.device) < self.run.caption_dropout
        tokens = torch.where(dropped, self.empty, tokens)
        with torch.autocast(self.kind, torch.bfloat16):
            context = self.model.text(input_ids=tokens).last_hidden_state
            v = self.unet(noisy, t, context, return_dict=False)[0]
        loss = F.mse_loss(v.float(), target)
        loss.backward()
        return loss.detach()

    def update(self, progress: float) -> Tensor:
        rate = rate_at(progress, self.step, self.run.warmup_steps, self.run.decay_share)
        norm = self.optimizers.step(rate)
        self.average.update(self.model, self.step)
        self.step += 1
        return norm

    def averaged(self) -> models.Denoiser:
        model = copy.deepcopy(self.model).eval()
        model.load_state_dict(self.average.weights, strict=False)
        return model

    def save(self, folder: Path) -> None:
        counters = {k: getattr(self, k) for k in ("step", "elapsed", "images")}
        checkpoint.save(folder, self.model, self.average, self.optimizers, counters)

    def load(self, folder: Path) -> None:
        counters = checkpoint.load(folder, self.model, self.average, self.optimizers)
        if counters:
            self.step, self.images = int(counters["step"]), int(counters["images"])
            self.elapsed = counters["elapsed"]
            print(f"resumed at step {self.step}", flush=True)


def batch_size(run: DiffusionRun, side: int, progress: float) -> int:
    if side == run.full_latent:
        return run.full_batch
    return run.half_batch if progress < run.half_share else run.mixed[side]


def pick_side(run: DiffusionRun, progress: float, rng: random.Random) -> int:
    if progress < run.half_share:
        return run.half_latent
    if progress > 1 - run.mixed_share and rng.random() < run.mixed_rate:
        return rng.choice(list(run.mixed))
    return run.full_latent


def warm_up(trainer: Trainer, sizes: dict[int, int]) -> None:
    """One step at every size, on noise: fills the compiler's cache on disk."""
    for side, batch in sizes.items():
        start = time.time()
        latents = torch.randn(batch, 4, side, side, device=trainer.device).half()
        trainer.backward(latents, trainer.empty.expand(batch, -1).contiguous())
        print(f"compiled {side} x {side} in {time.time() - start:.0f} s", flush=True)


def main() -> None:
    run, args = parse(
        DiffusionRun, sprites="sprites.npz", tokenizer="tokenizer folder", out="run folder"
    )
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 16
    torch.manual_seed(0)
    tokenizer = WordTokenizer(args.tokenizer)
    trainer = Trainer(run, tokenizer, args)
    if run.warm_only:
        main_sizes = {run.half_latent: run.half_batch, run.full_latent: run.full_batch}
        return warm_up(trainer, main_sizes if run.warm_only == 1 else run.mixed)
    trainer.load(args.out)
    vae = models.load_autoencoder(args.out / "autoencoder.safetensors", args.device)
    composer = Composer(args.sprites, args.device, seed=trainer.step)
    train(trainer, vae, composer, tokenizer)


def train(
    trainer: Trainer, vae: AutoencoderKL, composer: Composer, tokenizer: WordTokenizer
) -> None:
    run, args = trainer.run, trainer.args
    fresh = max(1, run.full_batch // run.replays)
    scenes = scene_batches(tokenizer, fresh, seed=trainer.step, workers=args.workers)
    pools: dict[int, LatentPool] = {}

    def pool_of(side: int) -> LatentPool:
        if side not in pools:
            pools[side] = LatentPool(
                lambda s: models.encode(vae, composer(s, side * DOWNSAMPLING)),
                scenes,
                capacity=run.pool_batches * fresh * run.replays,
            )
            for _ in range(4 * run.replays):
                pools[side].add()
        return pools[side]

    log = (args.out / "diffusion.jsonl").open("a")
    (args.out / "diffusion_config.json").write_text(json.dumps(asdict(run), indent=1) + "\n")
    rng = random.Random(trainer.step)
    start = time.time() - trainer.elapsed
    last_sheet = last_save = last_row = trainer.elapsed
    while (progress := trainer.elapsed / run.seconds) < 1:
        side = pick_side(run, progress, rng)
        if progress >= run.half_share and trainer.step % 50 == 0:
            # The pool of the half-size phase is only kept while that phase lasts.
            pools = {s: p for s, p in pools.items() if s != run.half_latent or s in run.mixed}
        batch = batch_size(run, side, progress)
        pool = pool_of(side)
        for _ in range(max(1, batch // (run.replays * fresh))):
            pool.add()
        latents, drawn = pool.draw(batch)
        loss = trainer.backward(latents, drawn["tokens"])
        norm = trainer.update(progress)
        trainer.images += batch
        trainer.elapsed = time.time() - start
        if trainer.step % 25 == 0:
            row = {"step": trainer.step, "seconds": trainer.elapsed, "images": trainer.images}
            row |= {"side": side, "loss": loss.item(), "gradient": norm.item()}
            log.write(json.dumps(row) + "\n")
            log.flush()
            if trainer.elapsed - last_row > 20:
                last_row = trainer.elapsed
                print({k: round(v, 4) for k, v in row.items()}, flush=True)
        if trainer.elapsed - last_sheet > run.sheet_every:
            last_sheet = trainer.elapsed
            write_sheet(trainer, vae, tokenizer, side)
        if trainer.elapsed - last_save > run.checkpoint_every:
            last_save = trainer.elapsed
            trainer.save(args.out)
    trainer.save(args.out)
    write_sheet(trainer, vae, tokenizer, run.full_latent)
    print(f"done: {trainer.step} steps, {trainer.images} images", flush=True)


def write_sheet(trainer: Trainer, vae: AutoencoderKL, tokenizer: WordTokenizer, side: int) -> None:
    captions = sample_captions(trainer.run.sheet_images, seed=5)
    tokens = torch.tensor([tokenizer(c) for c in captions], device=trainer.device)
    latents = sample(trainer.averaged(), tokens, trainer.empty, side=side)
    path = trainer.args.out / "sheets" / f"{trainer.step:06d}.png"
    save_sheet(models.decode(vae, latents), path, 6, captions)


if __name__ == "__main__":
    main()
