"""How the ratio changes while an image is made: from the timestep, and nothing that is counted."""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .settings import Settings

# Every ratio makes another number of tokens, and so other shapes to allocate and compile for.
_TWENTIETH = 20


@dataclass(frozen=True)
class Shift:
    """How the steps of a rectified flow gather at high noise.

    A flow whose noise levels are shifted by s has the level `s u / (1 + (s - 1) u)` when a share u
    of its steps is still to come. (Esser et al., Scaling Rectified Flow Transformers, 2024.)
    """

    factor: float = 3.0
    """s. That of Stable Diffusion 3, unless the scheduler has another."""
    growth: Callable[[int], float] | None = None
    """Where s grows with the image: log s, by the number of tokens."""

    def steps_left(self, level: float, tokens: int) -> float:
        """The share of the steps that is still to come at a noise level, 0 to 1."""
        factor = self.factor if self.growth is None else math.exp(self.growth(tokens))
        return level / (factor - (factor - 1) * level)


@dataclass(frozen=True)
class LinearQuadratic:
    """How Mochi's steps gather: half of them take a little of the noise away, evenly, and the other
    half the rest, ever faster."""

    little: float = 0.025

    def steps_left(self, level: float, tokens: int) -> float:
        """As that of `Shift`, for an even number of steps."""
        gone = 1 - level
        if gone <= self.little:
            return 1 - gone / (2 * self.little)
        # A parabola that goes on with the same slope.
        a = 8 * (0.5 - self.little)
        b, c = 2 * self.little - a, a / 4 - gone
        return 1 - (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)


@dataclass(frozen=True)
class Timeline:
    """How the times that a model is given run from noise to image."""

    noise: float | None = 999.0
    """The time of pure noise. None: nobody knows."""
    image: float = 0.0
    """The time of the finished image."""
    shares: tuple[float, ...] | None = None
    """Share of the noise in the latent's variance at each whole timestep, where known."""
    prediction: str = ""
    """What the scheduler takes from the model, if it says that."""
    flow: bool = False
    """Whether the latent goes straight from noise to image, as in rectified flow."""
    shift: Shift | LinearQuadratic = Shift()
    """Of a flow."""

    def check(self, settings: Settings) -> None:
        """Refuses settings that need to know more."""
        if settings.changes and self.noise is None:
            raise ValueError(
                "schedule, start, end, tau, reuse, coarse, and presets that set them: need "
                "timesteps that count down to 0, and the model's scheduler gives others"
            )
        if settings.tau is not None and self.shares is None and not self.flow:
            raise ValueError(
                f"tau={settings.tau!r}: needs a scheduler that knows its noise (alphas_cumprod); "
                "give the pipeline instead of the model in it, or use start"
            )
        known = self.shares is not None and self.prediction in ("epsilon", "v_prediction")
        if settings.coarse and not self.flow and not known:
            raise ValueError(
                f"coarse={settings.coarse!r}: needs a scheduler that knows its noise "
                "(alphas_cumprod) and takes 'epsilon' or 'v_prediction'; give the pipeline instead "
                "of the model in it"
            )

    def progress(self, time: float, tokens: int) -> float:
        """How far the image is, 0 (noise) to 1 (image): the share of the steps that is done.

        Args:
            tokens: of the image.
        """
        level = self._level(time)
        return 1 - (self.shift.steps_left(level, tokens) if self.flow else level)

    def _level(self, time: float) -> float:
        """The noise level, 1 (noise) to 0 (image)."""
        assert self.noise is not None
        return 1 - min(1.0, max(0.0, (self.noise - time) / (self.noise - self.image)))

    def level(self, timestep: Tensor) -> Tensor:
        """The noise level at timesteps, 1 (noise) to 0 (image)."""
        assert self.noise is not None
        return (timestep - self.image) / (self.noise - self.image)

    def time(self, level: Tensor) -> Tensor:
        """The timesteps at noise levels."""
        assert self.noise is not None
        return self.image + level * (self.noise - self.image)

    def share(self, timestep: Tensor) -> Tensor:
        """Share of the noise in the latent's variance at timesteps, also between whole ones."""
        shares = torch.tensor(self.shares, device=timestep.device)
        low = timestep.floor().long().clamp(0, len(shares) - 2)
        return torch.lerp(shares[low], shares[low + 1], timestep.float() - low)

    def time_of_share(self, share: Tensor) -> Tensor:
        """The timesteps at which the noise has this share, also between whole ones."""
        shares = torch.tensor(self.shares, device=share.device)
        high = torch.searchsorted(shares, share.contiguous()).clamp(1, len(shares) - 1)
        low, width = shares[high - 1], shares[high] - shares[high - 1]
        return (high - 1 + (share - low) / width).clamp(min=0)

    def noise_share(self, time: float) -> float:
        """Share of the noise in the latent's variance."""
        if self.shares is not None:
            return self.shares[min(len(self.shares) - 1, max(0, round(time)))]
        level = self._level(time)
        return level**2 / (level**2 + (1 - level) ** 2)

    @property
    def rises(self) -> bool:
        """Whether times rise from noise to image."""
        return self.image > (self.noise or 0.0)

    def noisiest(self, timestep: Tensor) -> Tensor:
        """Timesteps `[]`, `[T]` or `[T, n]` as `[]` or `[T]`.

        Where tokens have times of their own, the noisiest counts: others are given, not made.
        """
        if timestep.ndim < 2:
            return timestep
        times = timestep.flatten(1)
        return times.amin(dim=1) if self.rises else times.amax(dim=1)

    def falling(self, timestep: Tensor) -> Tensor:
        """The noisiest of timesteps, as `[]` or `[T]` that fall from noise to image."""
        timestep = self.noisiest(timestep)
        return self.image - timestep if self.rises else timestep


def ratio_at(time: float, settings: Settings, timeline: Timeline, tokens: int = 1) -> float | None:
    """The ratio at a timestep, for an image of so many tokens.

    Returns:
        0 if nothing merges then; None if it is as the settings say.
    """
    progress = timeline.progress(time, tokens)
    if not settings.may_merge(progress):
        return 0.0
    if settings.tau is not None and timeline.noise_share(time) >= settings.tau:
        return 0.0
    schedule = settings.schedule
    if schedule is None:
        return None
    if isinstance(schedule, str):
        assert settings.ratio_end is not None
        way = progress if schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
        ratio = settings.ratio + way * (settings.ratio_end - settings.ratio)
        return round(ratio * _TWENTIETH) / _TWENTIETH
    if not callable(schedule):
        return stage_at(progress, settings)[1]
    ratio = schedule(progress)
    if not isinstance(ratio, numbers.Real) or not 0 <= ratio <= 1:
        raise ValueError(f"schedule({progress:g}) = {ratio!r}: must be a number between 0 and 1")
    return float(ratio)


def stage_at(progress: float, settings: Settings) -> tuple[str, float]:
    """The selector and the ratio that a list says; without one, those of the settings."""
    stages = settings.stages
    if not stages:
        return settings.selector, settings.ratio
    return stages[min(len(stages) - 1, int(progress * len(stages)))]
