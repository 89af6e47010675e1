"""Train the autoencoder: compiled on crops, then on whole pictures, within a time budget;
resumes from its checkpoint.

python train_autoencoder.py --sprites sprites.npz --tokenizer pipeline/tokenizer --out run
"""

from __future__ import annotations

import json
import math
import time

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor, nn

import checkpoint
import models
from config import AutoencoderRun, parse
from data import scene_batches
from optimizer import MovingAverage, Optimizers, rate_at
from scenes import Composer
from tokenizer import WordTokenizer


class Objective(nn.Module):
    """L1 on pixels and on their differences, a weak KL term, and the same on pooled latents."""

    def __init__(self, model: AutoencoderKL, run: AutoencoderRun) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and mean squared error for pictures [B, 3, s, s]."""
        posterior = self.model.encode(pictures).latent_dist
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        latents = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        restored = self.model.decode(latents).sample.float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        few = max(1, int(len(pictures) * self.run.pooled_share))
        small = self.model.decode(F.avg_pool2d(latents[:few], 2)).sample.float()
        loss = self._distance(restored, pictures) + self.run.kl_weight * kl
        loss = loss + 0.25 * self._distance(small, F.avg_pool2d(pictures[:few], 2))
        return loss, F.mse_loss(restored.detach(), pictures)

    def _distance(self, a: Tensor, b: Tensor) -> Tensor:
        error = a - b
        edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
        return error.abs().mean() + self.run.gradient_weight * edges


def main() -> None:
    run, args = parse(
        AutoencoderRun, sprites="sprites.npz", tokenizer="tokenizer folder", out="run folder"
    )
    device = args.device
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    tokenizer = WordTokenizer(args.tokenizer)
    composer = Composer(args.sprites, device)
    per_crop = (run.full_pixels // run.crop_pixels) ** 2
    scenes = scene_batches(tokenizer, run.crop_batch // per_crop, seed=1, workers=args.workers)

    model = models.autoencoder().to(device, memory_format=torch.channels_last)
    objective = Objective(model, run)
    compiled = torch.compile(objective, dynamic=False) if args.compile else objective
    optimizers = Optimizers(model, run.learning_rate)
    average = MovingAverage(model, decay=0.998)
    saved = args.out / "autoencoder"
    saved.mkdir(parents=True, exist_ok=True)
    counters = checkpoint.load(saved, model, average, optimizers) or {"step": 0, "elapsed": 0.0}
    log = (args.out / "autoencoder.jsonl").open("a")

    start, step = time.time() - counters["elapsed"], int(counters["step"])
    while (progress := (time.time() - start) / run.seconds) < 1:
        crops = progress < run.crop_share
        pictures = composer(next(scenes), run.full_pixels)
        batch = _quarters(pictures, run.crop_pixels) if crops else pictures[: run.full_batch]
        pictures = batch.contiguous(memory_format=torch.channels_last)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss, error = (compiled if crops else objective)(pictures)
        loss.backward()
        optimizers.step(rate_at(progress, step, 100, 0.5))
        average.update(model, step)
        if step % 50 == 0:
            row = {"step": step, "seconds": time.time() - start, "side": pictures.shape[-1]}
            row |= {"loss": loss.item(), "psnr": _psnr(error.item())}
            log.write(json.dumps(row) + "\n")
            log.flush()
            print(row, flush=True)
        step += 1
        if step % 500 == 0:
            done = {"step": step, "elapsed": time.time() - start}
            checkpoint.save(saved, model, average, optimizers, done)

    model.load_state_dict(average.weights, strict=False)
    model.eval()
    held = [composer(next(scenes), run.full_pixels) for _ in range(12)]
    normalise_latents(model, torch.cat(held[:8]))
    report = evaluate(model, torch.cat(held[8:]))
    report |= {"steps": step, "seconds": time.time() - start}
    (args.out / "autoencoder.json").write_text(json.dumps(report, indent=1) + "\n")
    print(report, flush=True)
    models.save_tensors(model.state_dict(), args.out / "autoencoder.safetensors")


def _quarters(pictures: Tensor, side: int) -> Tensor:
    """Cut [B, 3, S, S] into all its [side, side] tiles."""
    tiles = pictures.unfold(2, side, side).unfold(3, side, side)
    return tiles.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, side, side)


def _psnr(error: float) -> float:
    """For pictures in [-1, 1]: the range is 2."""
    return 10 * math.log10(4 / max(error, 1e-12))


@torch.no_grad()
def normalise_latents(model: AutoencoderKL, pictures: Tensor) -> None:
    """Fold the latents' mean and deviation into the two 1x1 convolutions around them.

    After this every channel has zero mean and unit variance, so `scaling_factor` is 1.
    """
    latents = models.encode(model, pictures).float()
    mean, deviation = latents.mean(dim=(0, 2, 3)), latents.std(dim=(0, 2, 3))
    into, out = model.quant_conv, model.post_quant_conv
    channels = len(mean)
    into.weight[:channels] /= deviation.view(-1, 1, 1, 1)
    into.bias[:channels] = (into.bias[:channels] - mean) / deviation
    into.bias[channels:] -= 2 * deviation.log()
    out.bias += out.weight[:, :, 0, 0] @ mean
    out.weight *= deviation.view(1, -1, 1, 1)


@torch.no_grad()
def evaluate(model: AutoencoderKL, pictures: Tensor) -> dict[str, float]:
    """Mean PSNR of whole pictures and the statistics of their latents."""
    latents = models.encode(model, pictures).float()
    error = (models.decode(model, latents) - pictures).square().mean(dim=(1, 2, 3))
    psnr = (10 * torch.log10(4 / error)).mean().item()
    return {"psnr": psnr, "latent_mean": latents.mean().item(), "latent_std": latents.std().item()}


if __name__ == "__main__":
    main()
