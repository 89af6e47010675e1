"""The same images with and without merging, side by side, with what they cost."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, count, product
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageChops, ImageDraw, ImageFont
from torch import nn

import tomesd

from ..kernels import Cells
from ..machine import synchronize
from ..selectors import removable
from ..settings import Settings
from .loading import denoiser
from .maps import MergeMap, draw_map, map_at, map_title, sample_with_maps, three_steps
from .progress import OnProgress, silent
from .sampling import Sample, merging, sample

_TURNS = 7
"""How many times to take the time of a step."""
_AMPLIFY = 4
"""How much the picture of differences is brightened."""


@dataclass(frozen=True)
class RatioSummary:
    """One ratio: what a step takes, and means over the prompts."""

    ratio: float
    step_seconds: float
    """Of one call of the denoising model: the median of a few, for which the ratios take turns.
    Where steps differ (`reuse`, `coarse`), the mean over whole images."""
    peak_mib: float | None
    """None on a CPU."""
    tokens: int
    """Tokens that the merged layers work on."""
    psnr: float | None
    """Against the unmerged images, in dB. None for those themselves, and for identical ones."""
    ssim: float | None


@dataclass(frozen=True)
class ImageComparison:
    prompts: tuple[str, ...]
    ratios: tuple[float, ...]
    titles: tuple[str, ...]
    """What each ratio is called."""
    images: tuple[tuple[Image.Image, ...], ...]
    """One row per prompt, one image per ratio."""
    rows: tuple[RatioSummary, ...]
    maps: tuple[MergeMap, ...]
    """An early, a middle and a late step of the first prompt, at the ratio next to one half."""
    map_titles: tuple[str, ...]

    def grid(self, difference: float = 0.5) -> Image.Image:
        """All images, and the difference between the unmerged ones and those at one ratio."""
        column = self.ratios.index(difference, 1)
        titles = [*self.titles, f"|unmerged - {self.titles[column]}| x{_AMPLIFY}"]
        rows = [[*images, _difference(images[0], images[column])] for images in self.images]
        return label_grid(rows, titles, list(self.prompts))

    def overlay(self) -> Image.Image:
        """What was merged at the steps that were recorded, on the finished picture."""
        ratio = _middle(self.ratios[1:])
        image = self.images[0][self.ratios.index(ratio, 1)]
        pictures = [image, *(draw_map(map, image) for map in self.maps)]
        titles = [self.titles[self.ratios.index(ratio, 1)], *self.map_titles]
        side = max(picture.width for picture in pictures)
        pictures = [p.resize((side, side * p.height // p.width)) for p in pictures]
        return label_grid([pictures], titles, [self.prompts[0]])


def compare(
    pipe: Any,
    prompts: Sequence[str],
    ratios: Sequence[float] = (0.25, 0.5, 0.75),
    settings: Settings | None = None,
    *,
    steps: int = 30,
    on_progress: OnProgress = silent,
    **options: Any,
) -> ImageComparison:
    """Makes each prompt's image unmerged and at every ratio, from the same seed.

    Args:
        settings: everything but the ratio, of what is not unmerged.
        options: as in `sample`.
    """
    settings = settings or Settings()
    each = [Settings(ratio=0.0), *(replace(settings, ratio=ratio) for ratio in ratios)]
    ratios = (0.0, *ratios)
    total = len(prompts) * len(ratios) * steps + len(ratios) * (1 + _TURNS)
    titles = tuple(_title(place, merge) for place, merge in enumerate(each))
    with_maps = ratios.index(_middle(ratios[1:]), 1)
    made: list[Sample] = []
    with _call_of_step(denoiser(pipe), steps // 3) as step:
        for prompt, (title, merge) in product(prompts, zip(titles, each, strict=True)):

            def on_step(done: int, words: str = f"{title}: {prompt}") -> None:
                on_progress(words, len(made) * steps + done, total)

            given = {"steps": steps, "on_step": on_step, **options}
            if len(made) == with_maps:
                one, by_step = sample_with_maps(pipe, prompt, merge, **given)
            else:
                one = sample(pipe, prompt, merge, **given)
            made.append(one)
    by_ratio = [made[place :: len(ratios)] for place in range(len(ratios))]
    if settings.reuse is None and not settings.coarse:
        seconds = _take_turns(pipe, each, step, on_progress, total)
    else:  # steps differ, so that one of them tells nothing
        seconds = [statistics.mean(one.seconds for one in found) / steps for found in by_ratio]
    rows = _summaries(pipe, settings, ratios, by_ratio, seconds)
    images = tuple(zip(*([one.image for one in found] for found in by_ratio), strict=True))
    shown = three_steps(len(by_step)) if any(step.maps for step in by_step) else ()
    maps = tuple(map_at(by_step, step) for step in shown)
    map_titles = tuple(map_title(map, step) for map, step in zip(maps, shown, strict=True))
    return ImageComparison(tuple(prompts), ratios, titles, images, rows, maps, map_titles)


@contextmanager
def _call_of_step(model: nn.Module, number: int) -> Iterator[list[Any]]:
    """Keeps the arguments of the call of this number, or of the last one if there are fewer."""
    kept: list[Any] = []
    calls = count()

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        if next(calls) <= number:
            kept[:] = [args, kwargs]

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield kept
    finally:
        handle.remove()


@torch.no_grad()
def _take_turns(
    pipe: Any,
    each: Sequence[Settings],
    call: Sequence[Any],
    on_progress: OnProgress,
    total: int,
) -> list[float]:
    """Seconds of one call of the model with each of the settings, the median of a few.

    They take turns, so that what else the machine does meets all of them.

    Args:
        call: its arguments, and those by name.
    """
    model, (args, kwargs) = denoiser(pipe), call
    seconds: list[list[float]] = [[] for _ in each]
    for turn, place in product(range(1 + _TURNS), range(len(each))):
        on_progress("taking times", total - (_TURNS + 1 - turn) * len(each) + place, total)
        with merging(pipe, each[place]):
            synchronize(model.device)
            start = time.perf_counter()
            model(*args, **kwargs)
            synchronize(model.device)
            seconds[place].append(time.perf_counter() - start)
    return [statistics.median(found[1:]) for found in seconds]  # the first was the warm-up


def _summaries(
    pipe: Any,
    settings: Settings,
    ratios: Sequence[float],
    samples: Sequence[Sequence[Sample]],
    seconds: Sequence[float],
) -> tuple[RatioSummary, ...]:
    """Of samples by ratio, the unmerged ones first."""
    width, height = samples[0][0].image.size
    h, w = tomesd.describe(pipe, height, width).parts[0].levels[0].grid
    cells = Cells.of(h, w, settings.sy, settings.sx, settings.search)
    return tuple(
        _summary(ratio, step, made, samples[0], h * w - removable(settings, cells, ratio))
        for ratio, step, made in zip(ratios, seconds, samples, strict=True)
    )


def _title(number: int, settings: Settings) -> str:
    """Of a column; the first one is unmerged."""
    if number == 0:
        return "unmerged"
    named = ["ratio"] if settings.ratio > 0 else []
    named += [name for name in ("coarse", "reuse") if getattr(settings, name)]
    return ", ".join(f"{name} {getattr(settings, name):g}" for name in named or ["ratio"])


def _middle(ratios: Sequence[float]) -> float:
    return min(ratios, key=lambda ratio: abs(ratio - 0.5))


def _summary(
    ratio: float, seconds: float, made: Sequence[Sample], base: Sequence[Sample], tokens: int
) -> RatioSummary:
    from torchmetrics.functional.image import (  # slow to import
        peak_signal_noise_ratio,
        structural_similarity_index_measure,
    )

    pairs = [
        (_tensor(one.image), _tensor(other.image)) for one, other in zip(made, base, strict=True)
    ]
    psnr = ssim = None
    if any(not torch.equal(one, other) for one, other in pairs):
        psnr, ssim = (
            float(np.mean([metric(*pair, data_range=1.0) for pair in pairs]))
            for metric in (peak_signal_noise_ratio, structural_similarity_index_measure)
        )
    return RatioSummary(
        ratio,
        step_seconds=seconds,
        # All need the same; what is recorded of one comes on top.
        peak_mib=min((one.peak_mib for one in made if one.peak_mib is not None), default=None),
        tokens=tokens,
        psnr=psnr,
        ssim=ssim,
    )


def _tensor(image: Image.Image) -> torch.Tensor:
    """`[1, 3, H, W]` in 0 to 1."""
    pixels = torch.from_numpy(np.array(image.convert("RGB")))
    return pixels.permute(2, 0, 1)[None].float() / 255


def _difference(one: Image.Image, other: Image.Image) -> Image.Image:
    difference = ImageChops.difference(one.convert("RGB"), other.convert("RGB"))
    return difference.point(lambda value: min(255, value * _AMPLIFY))


def label_grid(
    rows: Sequence[Sequence[Image.Image]], titles: Sequence[str], captions: Sequence[str]
) -> Image.Image:
    """Pictures of one size in a grid, with a title over each column and a caption over each row."""
    width, height = rows[0][0].size
    gap, title, caption = 8, 26, 24
    font, small = ImageFont.load_default(16), ImageFont.load_default(14)
    # A title may be wider than the pictures below it, which keep their size.
    columns = [max(width, math.ceil(font.getlength(words))) + gap for words in titles]
    *lefts, right = accumulate(columns, initial=gap)
    canvas = Image.new("RGB", (right, title + len(rows) * (caption + height + gap)), "white")
    draw = ImageDraw.Draw(canvas)
    for left, words in zip(lefts, titles, strict=True):
        draw.text((left, 5), words, fill="black", font=font)
    for y, (row, words) in enumerate(zip(rows, captions, strict=True)):
        top = title + y * (caption + height + gap)
        draw.text((gap, top + 3), words, fill="#555555", font=small)
        for left, picture in zip(lefts, row, strict=True):
            canvas.paste(picture.convert("RGB"), (left, top + caption))
    return canvas
