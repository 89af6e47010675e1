"""Scores the images of front.py."""

import argparse

import numpy as np
import torch
from compose_scenes import compose
from torch import Tensor

from tomesd.bench.rows import Row
from tomesd.evaluation.distances import fid_estimate, kid_estimate, kid_shares
from tomesd.evaluation.estimates import Array, Estimate, mean_estimate
from tomesd.evaluation.metrics import paired_scores
from tomesd.evaluation.networks import Inception, Lpips

FEWEST_FOR_KID, FEWEST_FOR_FID = 50, 500


class Judge:
    """Compares images with the unmerged ones, and with composed scenes."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        # Stored in half precision, they are smaller to carry to a GPU.
        self.lpips = Lpips(path=args.lpips).float().to(device)
        self.inception = Inception(args.inception).float().to(device)
        self.device = device
        self.scenes: Tensor | None = None
        if args.sprites:
            parts = compose(args.sprites, args.scenes, args.pixels, device)
            self.scenes = torch.cat([self.features(part) for part in parts])
        self.unmerged: tuple[Tensor, Tensor] | None = None

    def features(self, images: Tensor) -> Tensor:
        """[N, 2048] of images [N, 3, H, W] of uint8"""
        return torch.cat([self.inception(part.to(self.device)) for part in images.split(64)])

    def scores(self, images: Tensor) -> tuple[Row, dict[str, Array]]:
        """Estimates, and what they are worked out from."""
        kept: dict[str, Array] = {}
        found: dict[str, Estimate] = {}
        features = self.features(images) if len(images) >= FEWEST_FOR_KID else None
        if self.unmerged is None:
            self.unmerged = images, features
        else:
            pairs = zip(images.split(16), self.unmerged[0][: len(images)].split(16), strict=True)
            parts = [paired_scores(one, other, self.lpips) for one, other in pairs]
            kept |= {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            found |= {name: mean_estimate(values) for name, values in kept.items()}
        if features is not None:
            kept["features"] = features.half().cpu().numpy()
            found |= self._distances(features, self.unmerged[1][: len(images)])
        return {k: v for name, one in found.items() for k, v in one.fields(name).items()}, kept

    def _distances(self, features: Tensor, unmerged: Tensor) -> dict[str, Estimate]:
        """Intervals are bootstraps over images; scenes are taken as given.

        `kid_change` is how much KID to the scenes rises over that of the unmerged images of the
        same captions and seeds: much surer than either.
        """
        is_base = features.shape == unmerged.shape and torch.equal(features, unmerged)
        found = {}
        if not is_base:
            found["kid_unmerged"] = kid_estimate(features, unmerged, paired=True)
        if self.scenes is not None:
            found["kid"] = kid_estimate(features, self.scenes)
            if not is_base:
                mine, base = (kid_shares(one, self.scenes) for one in (features, unmerged))
                found["kid_change"] = mean_estimate(mine - base)
            if len(features) >= FEWEST_FOR_FID:
                found["fid"] = fid_estimate(features, self.scenes)
        return found
