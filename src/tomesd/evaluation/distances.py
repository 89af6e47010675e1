"""Distances of two sets of images, from the features that a network sees in them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .estimates import Array, Estimate, mean_estimate

FID_RESAMPLES = 50
_NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True)
class _Gaussian:
    """A normal distribution with the covariance `factor @ factor.T`."""

    mean: Tensor
    """`[d]`"""
    factor: Tensor
    """`[d, k]`: from fewer samples than dimensions, k is as small as their number."""
    trace: Tensor

    @classmethod
    def of(cls, features: Tensor, counts: Tensor | None = None) -> "_Gaussian":
        """Fitted to `[n, d]` samples, the i-th of them taken `counts[i]` times."""
        if counts is None:
            counts = torch.ones(len(features), device=features.device)
        counts = counts.to(features)
        n = counts.sum()
        mean = counts @ features / n
        rows = (features - mean) * (counts / (n - 1)).sqrt()[:, None]
        factor = rows.T
        if factor.shape[1] > factor.shape[0]:
            values, vectors = torch.linalg.eigh(factor @ factor.T)
            factor = vectors * values.clamp(min=0).sqrt()
        return cls(mean, factor, rows.square().sum())


def _frechet(a: _Gaussian, b: _Gaussian) -> float:
    """Distance of two normal distributions (Heusel et al. 2017, equation 6).

    The trace of the root of the product of the covariances is the sum of the singular values of
    `a.factor.T @ b.factor`, so no root of a `[d, d]` matrix is needed.
    """
    cross = a.factor.T @ b.factor
    gram = cross @ cross.T if cross.shape[0] < cross.shape[1] else cross.T @ cross
    roots = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().sum()
    return float((a.mean - b.mean).square().sum() + a.trace + b.trace - 2 * roots)


def fid(features: Tensor, reference: Tensor) -> float:
    """Fréchet Inception distance of `[n, d]` features to `[m, d]` of a reference."""
    return _frechet(_Gaussian.of(features.double()), _Gaussian.of(reference.double()))


def fid_estimate(
    features: Tensor, reference: Tensor, *, paired: bool = False, resamples: int = FID_RESAMPLES
) -> Estimate:
    """FID, plus and minus 1.96 bootstrap deviations.

    The images are drawn again with replacement; the reference stays, or with `paired`, goes along.
    FID grows as images get fewer, and repeated images are fewer images: the draws as such are
    shifted, so only their spread is used. The interval does not cover that shift: compare FIDs of
    equal numbers of images only.
    """
    features, reference = features.double(), reference.double()
    n = len(features)
    fixed = _Gaussian.of(reference)
    value = _frechet(_Gaussian.of(features), fixed)
    if n < 3 or resamples < 2:
        return Estimate(value)
    generator = np.random.default_rng(0)
    draws = []
    for _ in range(resamples):
        counts = np.bincount(generator.integers(n, size=n), minlength=n)
        chosen = torch.from_numpy(np.flatnonzero(counts)).to(features.device)
        weights = torch.from_numpy(counts[counts > 0]).to(features.device)
        drawn = _Gaussian.of(features[chosen], weights)
        other = _Gaussian.of(reference[chosen], weights) if paired else fixed
        draws.append(_frechet(drawn, other))
    margin = _NORMAL_QUANTILE * float(np.std(draws, ddof=1))
    return Estimate(value, value - margin, value + margin)


def kid_estimate(features: Tensor, reference: Tensor, *, paired: bool = False) -> Estimate:
    """Kernel Inception distance (Binkowski et al. 2018) of `[n, d]` features to `[m, d]` others.

    Over all images at once, which is what random subsets of them estimate. The interval is a
    bootstrap over what each image adds. Unless `paired`, the reference is taken as given.
    """
    return mean_estimate(kid_shares(features, reference, paired=paired))


def kid_shares(features: Tensor, reference: Tensor, *, paired: bool = False) -> Array:
    """What each image adds to KID, `[n]`: KID is their mean, up to terms of order 1/n.

    With `paired`, row i of both comes from one seed, and the two are never compared with each
    other: that would make merged images look closer to the unmerged ones than those are to
    themselves. Identical sets are then exactly 0 apart.
    """
    from torchmetrics.image.kid import poly_kernel

    x, y = features.double(), reference.double()
    n, m = len(x), len(y)
    if n < 2 or m < 2:
        raise ValueError(f"KID needs at least two images on both sides, not {n} and {m}")
    within_x = _others(poly_kernel(x, x))
    within_y = _others(poly_kernel(y, y))
    across = poly_kernel(x, y)
    if paired:
        to_y, to_x = _others(across), _others(across.T)
        mean = within_x.mean() + within_y.mean() - to_y.mean() - to_x.mean()
        shares = 2 * (within_x + within_y - to_y - to_x) - mean
    else:
        to_y = across.mean(dim=1)
        shares = 2 * (within_x - to_y) + within_y.mean() - within_x.mean()
    return shares.cpu().numpy()


def _others(kernel: Tensor) -> Tensor:
    """The mean of each row of `[n, n]`, without the diagonal."""
    return (kernel.sum(dim=1) - kernel.diagonal()) / (len(kernel) - 1)
