"""How the ratio changes while an image is made: from the timestep, and nothing that is counted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .settings import Settings

__all__ = ["Noise", "ratio_at"]

# Every ratio makes another number of tokens, and so other shapes to allocate and compile for.
_TWENTIETH = 20


@dataclass(frozen=True)
class Noise:
    """What the scheduler of a model says about its timesteps."""

    steps: int | None = 1000
    """Timesteps count down from below this to 0. None: they are no such count."""
    shares: tuple[float, ...] | None = None
    """Share of the noise in the latent's variance at each of them, where known."""

    def check(self, settings: Settings) -> None:
        """Refuses settings that need to know more."""
        if settings.changes and self.steps is None:
            raise ValueError(
                "schedule, start, end, tau: need timesteps that count down to 0, and the model's "
                "scheduler gives others"
            )
        if settings.tau is not None and self.shares is None:
            raise ValueError(
                f"tau={settings.tau!r}: needs a scheduler that knows its noise (alphas_cumprod); "
                "give the pipeline instead of the model in it, or use start"
            )


def ratio_at(time: float, settings: Settings, noise: Noise) -> float:
    """What the ratio is at a timestep."""
    assert noise.steps is not None
    progress = min(1.0, max(0.0, 1 - time / (noise.steps - 1)))
    if not settings.start <= progress <= settings.end:
        return 0.0
    if settings.tau is not None:
        assert noise.shares is not None
        share = noise.shares[min(len(noise.shares) - 1, max(0, round(time)))]
        if share >= settings.tau:
            return 0.0
    return _scheduled(progress, settings)


def _scheduled(progress: float, settings: Settings) -> float:
    schedule = settings.schedule
    if schedule is None:
        return settings.ratio
    if isinstance(schedule, str):
        assert settings.ratio_end is not None
        way = progress if schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
        ratio = settings.ratio + way * (settings.ratio_end - settings.ratio)
        return round(ratio * _TWENTIETH) / _TWENTIETH
    if isinstance(schedule, Sequence):
        return float(schedule[min(len(schedule) - 1, int(progress * len(schedule)))])
    ratio = float(schedule(progress))
    if not 0 <= ratio <= 1:
        raise ValueError(f"schedule({progress:g}) = {ratio!r}: must be between 0 and 1")
    return ratio
