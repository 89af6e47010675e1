"""The numbers of a result as words, for the terminal and the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .metrics import PSNR_CAP, Estimate
from .results import Result
from .variants import Variant

__all__ = ["QUALITY", "SETS", "Column", "labels_of", "methods_of", "present"]


@dataclass(frozen=True)
class Column:
    """A metric in a table."""

    key: str
    title: str
    words: Callable[[float], str]
    better: str
    """Which way is better: "less" or "more"."""
    meaning: str
    identical: float | None = None
    """Its value for images that are the unmerged ones."""
    scale: float = 1.0
    """What the title says that values are multiplied by."""

    def of(self, result: Result) -> Estimate | None:
        return result.metrics.get(self.key)

    @property
    def arrow(self) -> str:
        return "↓" if self.better == "less" else "↑"

    def value(self, result: Result) -> str:
        estimate = self.of(result)
        return "-" if estimate is None else self.words(estimate.value)

    def interval(self, result: Result) -> str:
        """ "low to high", or nothing."""
        estimate = self.of(result)
        if estimate is None or estimate.low is None or estimate.high is None:
            return ""
        return f"{self.words(estimate.low)} to {self.words(estimate.high)}"

    def with_margin(self, result: Result) -> str:
        """ "value ±margin", for where there is little room."""
        estimate = self.of(result)
        if estimate is None or estimate.low is None or estimate.high is None:
            return self.value(result)
        if estimate.low == estimate.high:
            return self.value(result)
        return f"{self.value(result)} ±{self.words((estimate.high - estimate.low) / 2)}"


def _thousandth(value: float) -> str:
    return f"{1000 * value:.2f}"


def _psnr(value: float) -> str:
    return "identical" if value >= PSNR_CAP else f"{value:.1f}"


_SET = "to the unmerged images, as a set"
_PAIR = "of each image to the unmerged one of the same seed, mean"

QUALITY = (
    Column("fid", "FID", "{:.2f}".format, "less", "to the reference images"),
    Column("kid", "KID x1000", _thousandth, "less", "to the reference images", scale=1000),
    Column("fid_unmerged", "FID to unmerged", "{:.2f}".format, "less", _SET, identical=0),
    Column(
        "kid_unmerged", "KID to unmerged x1000", _thousandth, "less", _SET, identical=0, scale=1000
    ),
    Column("lpips", "LPIPS", "{:.4f}".format, "less", _PAIR, identical=0),
    Column("psnr", "PSNR (dB)", _psnr, "more", _PAIR),
    Column("ssim", "SSIM", "{:.3f}".format, "more", _PAIR, identical=1),
    Column("clip", "CLIP score", "{:.2f}".format, "more", "of each image to its prompt, mean"),
)


SETS = ("fid", "kid", "fid_unmerged", "kid_unmerged")
"""Keys of those that compare sets."""


def present(results: Sequence[Result]) -> list[Column]:
    """The columns that have anything in them."""
    return [c for c in QUALITY if any(c.of(result) is not None for result in results)]


def methods_of(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Merged results by what they have in common but for the ratio, in order of the ratio."""
    merged = [result for result in results if result.variant.kind != "unmerged"]
    methods: dict[str, list[Result]] = {}
    for result in sorted(merged, key=lambda result: result.variant.ratio or 0):
        methods.setdefault(_method(result.variant, merged), []).append(result)
    return methods


def labels_of(results: Sequence[Result]) -> dict[str, str]:
    """Variant names to words for people."""
    labels = {result.variant.name: "unmerged" for result in results}
    methods = methods_of(results)
    for method, rows in methods.items():
        for result in rows:
            ratio = f"{result.variant.percent} %"
            labels[result.variant.name] = ratio if len(methods) == 1 else f"{ratio}, {method}"
    return labels


def _method(variant: Variant, merged: Sequence[Result]) -> str:
    alike = [r.variant.settings for r in merged if r.variant.kind == variant.kind]
    varied = [
        f"{name} {value}"
        for name, value in variant.settings.items()
        if name != "ratio" and any(settings.get(name) != value for settings in alike)
    ]
    if varied and len({result.variant.kind for result in merged}) == 1:
        return ", ".join(varied)
    return ", ".join(["tomesd 0.1.3" if variant.kind == "original" else "tomesd", *varied])
