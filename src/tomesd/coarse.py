"""A step on a coarser image: what averaging does to noise. Tensors only.

Pixels of noise differ from each other, and neighbouring pixels of an image hardly do. So the mean
of 2 x 2 pixels of a noisy latent is an image of half the size with half the noise, and while there
is much noise, it tells a model nearly all that the whole latent does.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

SIDE = 2
"""Of the squares of latent pixels that become one."""


def flow_level(level: Tensor) -> Tensor:
    """The noise level of a rectified flow after averaging, from the one before.

    A latent is `(1 - t) image + t noise`, so its mean is `(1 - t) image + t/SIDE noise`. Divided by
    the sum of the two shares, it is on the flow again.
    """
    return level / SIDE / _shares(level)


def _shares(level: Tensor) -> Tensor:
    return 1 - level + level / SIDE


@dataclass(frozen=True)
class FlowStep:
    """A step of a rectified flow, whose model predicts the noise less the image."""

    latent: Tensor
    """`[..., H, W]`."""
    level: Tensor
    """Share of the noise in it, 0 to 1, of a shape that goes with the latent's."""

    @property
    def small(self) -> Tensor:
        """The latent at half the height and width, on the flow at `flow_level(level)`."""
        return average(self.latent) / _shares(self.level)

    def velocity(self, small: Tensor) -> Tensor:
        """The prediction `[..., H, W]`, from that for the small latent."""
        image = self.small - flow_level(self.level) * small.float()
        return (self.latent.float() - enlarge(image)) / self.level


def variance_share(share: Tensor) -> Tensor:
    """The noise's share of the variance after averaging, from the one before.

    A latent is `a image + s noise` with `a^2 + s^2 = 1`, so its mean is `a image + s/SIDE noise`.
    """
    noise = share / SIDE**2
    return noise / (1 - share + noise)


@dataclass(frozen=True)
class VarianceStep:
    """A step of a model that predicts the noise, or `a noise - s image`."""

    latent: Tensor
    """`[..., H, W]`."""
    share: Tensor
    """Of the noise in the variance, of a shape that goes with the latent's."""
    predicts_noise: bool

    @property
    def small(self) -> Tensor:
        """The latent at half the height and width, with `variance_share(share)`."""
        return average(self.latent) / (1 - self.share + self.share / SIDE**2).sqrt()

    def prediction(self, small: Tensor) -> Tensor:
        """The prediction `[..., H, W]`, from that for the small latent."""
        share = variance_share(self.share)
        a, s = (1 - share).sqrt(), share.sqrt()
        if self.predicts_noise:
            image = enlarge((self.small - s * small.float()) / a)
        else:
            image = enlarge(a * self.small - s * small.float())
        a, s = (1 - self.share).sqrt(), self.share.sqrt()
        noise = (self.latent.float() - a * image) / s
        return noise if self.predicts_noise else a * noise - s * image


def average(latent: Tensor) -> Tensor:
    """The means of squares of pixels, `[..., H, W]` to `[..., H / 2, W / 2]`, in float32.

    Frames of a video are never averaged: their noise differs, but so do they.
    """
    *more, h, w = latent.shape
    squares = latent.float().reshape(*more, h // SIDE, SIDE, w // SIDE, SIDE)
    return squares.mean(dim=(-3, -1))


def enlarge(latent: Tensor) -> Tensor:
    """`[..., H, W]` at twice its height and width."""
    *more, h, w = latent.shape
    flat = F.interpolate(latent.reshape(1, -1, h, w), scale_factor=SIDE, mode="bilinear")
    return flat.reshape(*more, SIDE * h, SIDE * w)


def unpack(tokens: Tensor, grid: tuple[int, int, int], side: int) -> Tensor:
    """Tokens `[B, F * h * w, C * side * side]` as a latent `[B, C, F, h * side, w * side]`."""
    frames, h, w = grid
    patches = tokens.reshape(tokens.shape[0], frames, h, w, -1, side, side)
    return patches.permute(0, 4, 1, 2, 5, 3, 6).reshape(
        tokens.shape[0], -1, frames, h * side, w * side
    )


def pack(latent: Tensor, side: int) -> Tensor:
    """Undoes `unpack`."""
    batch, channels, frames, h, w = latent.shape
    patches = latent.reshape(batch, channels, frames, h // side, side, w // side, side)
    return patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)
