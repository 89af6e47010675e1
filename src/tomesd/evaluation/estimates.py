"""Numbers with confidence intervals."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000
_FEWEST_TIMES = 4
"""With fewer, no interval would mean much."""
TOO_FEW = "too few batches to tell how sure"


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % confidence interval; None where there is too little to tell."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Estimate":
        numbers = {name: None if v is None else float(v) for name, v in values.items()}
        return cls(**numbers)  # type: ignore[arg-type]

    def fields(self, name: str) -> dict[str, float | None]:
        """Of a row that has it under this name."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def interval(self, show: Callable[[float], str] = "{:.2f}".format) -> str:
        """ "low to high", or nothing."""
        if self.low is None or self.high is None:
            return ""
        return f"{show(self.low)} to {show(self.high)}"

    def times_faster(self) -> str:
        """A speed-up in words: with its interval, or with a word if there is none."""
        return f"{self.value:.2f}x ({self.interval() or TOO_FEW})"

    def times(self, scale: float) -> "Estimate":
        low, high = (None if end is None else scale * end for end in (self.low, self.high))
        return Estimate(scale * self.value, low, high)


def mean_estimate(values: Array) -> Estimate:
    """The mean of `[n]` values, with a bootstrap interval over them."""
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean)
    if np.ptp(values) == 0:
        return Estimate(mean, mean, mean)
    return Estimate(mean, *_bootstrap((values,), np.mean, method="BCa"))


def speedup_estimate(base: Array, merged: Array) -> Estimate:
    """How many times faster: the ratio of the medians of `[n]` times of the same batches."""

    def ratio(base: Array, merged: Array, axis: int = -1) -> Array:
        return np.median(base, axis=axis) / np.median(merged, axis=axis)

    value = float(ratio(base, merged))
    if len(base) < _FEWEST_TIMES:
        return Estimate(value)
    return Estimate(value, *_bootstrap((base, merged), ratio, method="percentile", paired=True))


def _bootstrap(
    samples: tuple[Array, ...], statistic: Callable[..., Any], **options: Any
) -> tuple[float | None, float | None]:
    from scipy.stats import bootstrap

    with warnings.catch_warnings():
        # It warns where it has no answer, and gives NaN.
        warnings.simplefilter("ignore")
        interval = bootstrap(
            samples,
            statistic,
            n_resamples=RESAMPLES,
            batch=100,
            confidence_level=CONFIDENCE,
            rng=np.random.default_rng(0),
            **options,
        ).confidence_interval
    low, high = float(interval.low), float(interval.high)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else (None, None)
