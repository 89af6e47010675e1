"""The quality metrics: each is one entry of `METRICS`.

An entry says what a metric needs, how it is worked out, and how it is shown. Scoring, tables,
figures and the report go through the entries, and know no metric by name.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .distances import fid_estimate, kid_estimate
from .estimates import Array, Estimate

PSNR_CAP = 100.0
"""In dB. Identical images have an infinite PSNR, of which no mean can be taken."""


@dataclass(frozen=True)
class Pictures:
    """A few images of one size, with what they may be compared with."""

    pixels: Tensor
    """`[B, 3, H, W]` of uint8."""
    unmerged: Tensor | None = None
    """The unmerged images of the same seeds, where a metric is measured against them."""
    prompts: Sequence[str] = ()

    def pairs(self) -> tuple[Tensor, Tensor]:
        """The images and the unmerged ones, from 0 to 1."""
        assert self.unmerged is not None
        return self.pixels.float() / 255, self.unmerged.float() / 255


@dataclass(frozen=True)
class QualityMetric:
    """A measure of quality."""

    name: str
    """In files and results."""
    title: str
    """In tables and figures, with the unit."""
    meaning: str
    """Of what, and compared with what."""
    better: Literal["less", "more"]
    format: Callable[[float], str]
    against: Literal["unmerged", "reference", "prompt"]
    """What images are compared with: the unmerged ones of the same seeds, a folder of real ones,
    or their prompts."""
    score: Callable[[Pictures, Any], Tensor | Array]
    """What is worked out from images and stored, given the network: `[B]` numbers whose mean is the
    metric; or if there is a `distance`, `[B, d]` features."""
    network: str | None = None
    """The network of `Judges` that it needs."""
    distance: Callable[..., Estimate] | None = None
    """From the features of two sets of images to the metric; told whether they are `paired`."""
    identical: float | None = None
    """Its value for images that are the unmerged ones."""
    scale: float = 1.0
    """What the title says that values are multiplied by."""

    @property
    def array(self) -> str:
        """What `score` gives is called this. Metrics with features of one network share them."""
        return self.name if self.distance is None else str(self.network)

    @property
    def of_pairs(self) -> bool:
        """Whether each image is compared with the unmerged one of its seed."""
        return self.distance is None and self.against == "unmerged"

    @property
    def arrow(self) -> str:
        return "↓" if self.better == "less" else "↑"

    @property
    def sign(self) -> int:
        """Times this, less is better."""
        return 1 if self.better == "less" else -1

    def show(self, value: float) -> str:
        return self.format(self.scale * value)

    def value(self, found: Mapping[str, Estimate]) -> str:
        return self.show(found[self.name].value) if self.name in found else "-"

    def interval(self, found: Mapping[str, Estimate]) -> str:
        """ "low to high", or nothing."""
        return found[self.name].interval(self.show) if self.name in found else ""

    def with_margin(self, found: Mapping[str, Estimate]) -> str:
        """ "value ±margin", for where there is little room."""
        estimate = found.get(self.name)
        if estimate is None or estimate.low is None or estimate.high is None:
            return self.value(found)
        if estimate.low == estimate.high:
            return self.value(found)
        return f"{self.value(found)} ±{self.show((estimate.high - estimate.low) / 2)}"


def _psnr(pictures: Pictures, network: None) -> Tensor:
    from torchmetrics.functional.image import peak_signal_noise_ratio

    options = {"data_range": 1.0, "reduction": "none", "dim": (1, 2, 3)}
    return peak_signal_noise_ratio(*pictures.pairs(), **options).clamp(max=PSNR_CAP)


def _ssim(pictures: Pictures, network: None) -> Tensor:
    from torchmetrics.functional.image import structural_similarity_index_measure

    scores = structural_similarity_index_measure(
        *pictures.pairs(), data_range=1.0, reduction="none"
    )
    return scores.reshape(-1)  # torchmetrics squeezes a batch of one


def _lpips(pictures: Pictures, network: Any) -> Tensor:
    return network(*pictures.pairs())


def _clip(pictures: Pictures, network: Any) -> Array:
    images = [Image.fromarray(p) for p in pictures.pixels.permute(0, 2, 3, 1).cpu().numpy()]
    return network(images, pictures.prompts)


def _features(pictures: Pictures, network: Any) -> Tensor:
    return network(pictures.pixels)


def _show_psnr(value: float) -> str:
    return "identical" if value >= PSNR_CAP else f"{value:.1f}"


_REAL = "to the reference images"
_SET = "to the unmerged images, as a set"
_PAIR = "of each image to the unmerged one of the same seed, mean"
_FEW = "; it grows as images get fewer, so compare equal numbers of them only"

_FID = QualityMetric(
    name="fid",
    title="FID",
    meaning=_REAL + _FEW,
    better="less",
    format="{:.2f}".format,
    against="reference",
    score=_features,
    network="inception",
    distance=fid_estimate,
)
_KID = replace(
    _FID, name="kid", title="KID x1000", meaning=_REAL, distance=kid_estimate, scale=1000
)
_UNMERGED: dict[str, Any] = {"against": "unmerged", "identical": 0}

METRICS: list[QualityMetric] = [
    _FID,
    _KID,
    replace(_FID, name="fid_unmerged", title="FID to unmerged", meaning=_SET + _FEW, **_UNMERGED),
    replace(_KID, name="kid_unmerged", title="KID to unmerged x1000", meaning=_SET, **_UNMERGED),
    QualityMetric(
        name="lpips",
        title="LPIPS",
        meaning=_PAIR,
        better="less",
        format="{:.4f}".format,
        against="unmerged",
        score=_lpips,
        network="lpips",
        identical=0,
    ),
    QualityMetric(
        name="psnr",
        title="PSNR (dB)",
        meaning=_PAIR,
        better="more",
        format=_show_psnr,
        against="unmerged",
        score=_psnr,
    ),
    QualityMetric(
        name="ssim",
        title="SSIM",
        meaning=_PAIR,
        better="more",
        format="{:.3f}".format,
        against="unmerged",
        score=_ssim,
        identical=1,
    ),
    QualityMetric(
        name="clip",
        title="CLIP score",
        meaning="of each image to its prompt, mean",
        better="more",
        format="{:.2f}".format,
        against="prompt",
        score=_clip,
        network="clip",
    ),
]
"""In the order of the columns of tables. One that is added here is measured and shown like the
others."""


def closeness(measured: Collection[str]) -> QualityMetric:
    """The first of the measured metrics that tells how far an image is from the unmerged one."""
    return next(metric for metric in METRICS if metric.of_pairs and metric.name in measured)


def paired_scores(one: Tensor, other: Tensor, lpips: Any = None) -> dict[str, Array]:
    """Scores `[B]` of each pair of two batches of pixels, `[B, 3, H, W]` of uint8.

    Args:
        lpips: an `Lpips` network on the images' device, or None to leave LPIPS out.
    """
    pictures = Pictures(one, other)
    known = (None,) if lpips is None else (None, "lpips")
    return {
        metric.name: to_array(metric.score(pictures, lpips))
        for metric in METRICS
        if metric.of_pairs and metric.network in known
    }


def to_array(scores: Tensor | Array) -> Array:
    """Numbers in double precision; features as they are."""
    if not isinstance(scores, Tensor):
        return scores
    return (scores.double() if scores.ndim == 1 else scores).cpu().numpy()


def to_pixels(images: Sequence[Image.Image], device: torch.device) -> Tensor:
    """`[B, 3, H, W]` of uint8."""
    pixels = torch.stack([torch.from_numpy(np.array(image)) for image in images])
    return pixels.permute(0, 3, 1, 2).to(device)
