"""Score samples of held-out captions against scenes composed from the same captions.

    python evaluate.py samples --sprites sprites.npz --classifier run/classifier.safetensors \
        --inception default_1.pt --out results

`samples` holds one folder per set, of any picture size (see `sample_held_out.py`). Writes
`evaluation.json`: reconstruction PSNR of the shipped autoencoder; per set caption agreement as
the classifier sees it, KID, and FID where there are enough pictures, both against composed
scenes of other held-out captions. Composed scenes of the same captions and size, as many as
there are samples, are judged too: what they get is the best that samples could get.
`--inception` is described in `distances.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torchmetrics
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor

import tomesd_demo_model
from data import describe
from distances import FEW_FOR_FID, FEW_FOR_KID, Inception, distances
from judge import Judge, agreement, load_judge, targets
from scenes import Composer
from tokenizer import WordTokenizer
from tomesd_demo_model.captions import sample_scenes

SEED = 11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samples", type=Path)
    for name in ("sprites", "classifier", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--inception", type=Path, help="without it: no KID and no FID")
    parser.add_argument(
        "--reference", type=int, default=500, help="at most so many scenes for KID and FID"
    )
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    world = HeldOut(args.sprites, args.device)
    judge = load_judge(args.classifier, args.device)
    inception = Inception(args.inception, args.device) if args.inception else None
    reference = Reference(world, inception, args.reference) if inception else None
    report: dict[str, dict] = {
        "evaluated_on": {
            "device": args.device,
            "torch": torch.__version__,
            "torchmetrics": torchmetrics.__version__,
        },
        "autoencoder": reconstruction(world),
    }
    for folder in sorted(p for p in args.samples.iterdir() if p.is_dir()):
        pictures = load_folder(folder)
        if len(pictures):
            report[folder.name] = score(pictures, world, judge, reference)
            about = folder / "about.json"
            if about.is_file():
                report[folder.name]["sampled_with"] = json.loads(about.read_text())
            print(folder.name, report[folder.name], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")


def score(
    pictures: Tensor, world: HeldOut, judge: Judge, reference: Reference | None
) -> dict[str, object]:
    """Every score of samples [B, 3, s, s] and of as many composed scenes."""
    count, side = len(pictures), pictures.shape[-1]
    labels, composed = world.labels(slice(count)), world.pictures(slice(count), side)
    samples, ceiling = (
        agreement(judge.see(part.to(world.device), 32), labels) for part in (pictures, composed)
    )
    if reference and count >= FEW_FOR_KID:
        samples |= reference.distances(pictures)
    # KID of composed scenes is zero but for chance; their FID is not.
    if reference and count >= FEW_FOR_FID:
        ceiling |= reference.distances(composed)
    return {"pictures": count, "pixels": side, "samples": samples, "composed_scenes": ceiling}


class HeldOut:
    """Composed scenes of the held-out captions, in the order of the shipped list."""

    def __init__(self, sprites: Path, device: str) -> None:
        self.scenes = sample_scenes(len(tomesd_demo_model.held_out_captions()))
        self.composer = Composer(sprites, device)
        self.tokenizer = WordTokenizer(tomesd_demo_model.path() / "tokenizer")
        self.device = device

    def described(self, chosen: slice) -> dict[str, Tensor]:
        return describe(self.scenes[chosen], self.tokenizer, SEED)

    def labels(self, chosen: slice) -> dict[str, Tensor]:
        return targets(self.described(chosen), self.device)

    def pictures(self, chosen: slice, side: int) -> Tensor:
        """[B, 3, side, side] in [-1, 1], the same whatever was composed before."""
        self.composer.generator.manual_seed(SEED)
        return self.composer(self.described(chosen), side, chunk=16).cpu()


def load_folder(folder: Path, limit: int | None = None) -> Tensor:
    """The pictures 0000, 0001, ... up to the first gap, [B, 3, s, s] in [-1, 1]."""
    found: list[np.ndarray] = []
    while limit is None or len(found) < limit:
        paths = (folder / f"{len(found):04d}{suffix}" for suffix in (".png", ".webp"))
        path = next((path for path in paths if path.exists()), None)
        if path is None:
            break
        found.append(np.asarray(Image.open(path).convert("RGB")))
    if not found:
        return torch.empty(0)
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).float().div(127.5).sub(1)


class Reference:
    """Features of composed scenes, per picture size, to measure distances from.

    Their captions are the last of the held-out list, those of the samples the first: pictures
    of the same captions would be closer than independent ones, and KID would fall below zero.
    """

    def __init__(self, world: HeldOut, inception: Inception, most: int) -> None:
        self.world, self.inception, self.most = world, inception, most
        self._features: dict[tuple[int, int], Tensor] = {}

    def distances(self, pictures: Tensor) -> dict[str, float]:
        """KID and FID of pictures [B, 3, s, s], which have the first B captions."""
        # More than twice as many would cost time and hardly add precision.
        count, side = min(self.most, 2 * len(pictures)), pictures.shape[-1]
        if len(pictures) + count > len(self.world.scenes):
            raise SystemExit(f"--reference {count}: too few captions are left for so many")
        if (side, count) not in self._features:
            scenes = self.world.pictures(slice(-count, None), side)
            self._features[side, count] = self.inception(scenes)
        found = distances(self._features[side, count], self.inception(pictures))
        return found | {"reference_scenes": count}


@torch.no_grad()
def reconstruction(world: HeldOut, count: int = 32) -> dict[str, float]:
    """PSNR of the shipped autoencoder: its half-precision weights, computed in float32."""
    vae = AutoencoderKL.from_pretrained(tomesd_demo_model.path() / "vae").eval().to(world.device)
    values: dict[str, float] = {"pictures": count}
    for side in (128, 256, 384):
        pictures = world.pictures(slice(count), side).to(world.device)
        restored = torch.cat([vae(part).sample.clamp(-1, 1) for part in pictures.split(4)])
        error = (restored - pictures).square().mean(dim=(1, 2, 3))
        values[f"psnr_{side}px"] = round((10 * torch.log10(4 / error)).mean().item(), 2)
    return values


if __name__ == "__main__":
    main()
