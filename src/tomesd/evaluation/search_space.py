"""What `tomesd tune` tries: the options, their values, and what to begin with."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tomesd

from ..allowed import DOWNSAMPLES
from ..generation import Sampling
from ..hosts import find_models
from ..presets import MERGING_PRESETS, PRESETS

Options = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """An option that is searched."""

    name: str
    values: tuple[Any, ...]
    ordered: bool = False
    """Whether neighbouring values do about the same."""
    only_if: Callable[[Options], bool] = lambda options: True
    """Whether it does anything, given the options before it."""

    def place_of(self, value: Any) -> int:
        """Of the value, or of the one next to it."""
        if value in self.values:
            return self.values.index(value)
        numbers = [v for v in self.values if self.ordered and v is not None and value is not None]
        if not numbers:
            return 0
        return self.values.index(min(numbers, key=lambda number: abs(number - value)))


def _own_layers(options: Options) -> bool:
    """Whether layers merge each on its own, which is the default."""
    return options["target"] in (None, "attn")


def search_space(levels: Sequence[int], fixed: Iterable[str] = ()) -> list[Choice]:
    """The options that are tried, but for those that stay as they are.

    Args:
        levels: downsampling of the levels of a UNet, finest first; none for a transformer.
    """
    space = _unet_space(levels) if levels else _TRANSFORMER_SPACE
    left_out = set(fixed)
    return [c for c in space if c.name not in left_out and len(c.values) > 1]


_PERCENTS = tuple(percent / 100 for percent in range(10, 76, 5))
_RATIO = Choice("ratio", (0.0, *_PERCENTS), ordered=True)
_SCHEDULE = (
    Choice("schedule", (None, "linear")),
    Choice(
        "ratio_end",
        (0.0, 0.05, *_PERCENTS),
        ordered=True,
        only_if=lambda o: o["schedule"] in ("linear", "cosine"),
    ),
)


def _how(*metrics: str) -> tuple[Choice, ...]:
    """How tokens are matched, and for how long."""
    return (
        Choice("selector", ("bipartite", "kmeans", "grid")),
        Choice("metric", metrics, only_if=lambda o: o["selector"] != "grid"),
        Choice("window", (None, 0, 4, 8, 16), only_if=lambda o: o["selector"] == "bipartite"),
        Choice("share", ("block", "level", "steps")),
        Choice("refresh", (2, 4, 8), ordered=True, only_if=lambda o: o["share"] == "steps"),
    )


def _left_out(*starts: float) -> tuple[Choice, ...]:
    """Coarse steps, and steps that leave out a part of the model."""

    def reuses(options: Options) -> bool:
        return options.get("reuse") is not None

    return (
        Choice("coarse", (None, 0.15, 0.25, 0.35, 0.5)),
        Choice("reuse", (None, 2, 3, 4)),
        Choice("reuse_start", starts, ordered=True, only_if=reuses),
        Choice("reuse_end", (None, 4, 8, 12), only_if=reuses),
    )


def _unet_space(levels: Sequence[int]) -> tuple[Choice, ...]:
    return (
        _RATIO,
        Choice("target", ("attn", "kv", "block", "stack")),
        Choice("merge_crossattn", (False, True), only_if=_own_layers),
        Choice("merge_mlp", (False, True), only_if=_own_layers),
        Choice("max_downsample", (None, *levels[1:]), ordered=True),
        *_how("input", "keys", "mean", "previous"),
        Choice(
            "proportional", (False, True), only_if=lambda o: o["target"] in (None, "attn", "kv")
        ),
        *_SCHEDULE,
        Choice("start", (0.0, 0.1, 0.2, 0.3, 0.4), ordered=True),
        Choice("end", (1.0, 0.9, 0.8, 0.7, 0.6), ordered=True),
        *_left_out(0.0, 0.25, 0.3, 0.5),
    )


_TRANSFORMER_SPACE = (
    _RATIO,
    Choice("target", ("stack", "block")),
    Choice("depth", (None, (0.0, 1.0), (0.0, 0.5), (0.25, 0.75), (0.25, 1.0), (0.5, 1.0))),
    *_how("clean", "input", "mean", "previous"),
    *_SCHEDULE,
    Choice("start", (0.0, 0.1, 0.2), ordered=True),
    Choice("end", (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0), ordered=True),
    *_left_out(0.15, 0.2, 0.25, 0.35, 0.5),
)


def levels_of(pipe: Any, sampling: Sampling) -> list[int]:
    """Downsampling of the levels of a UNet with blocks, finest first; none of a transformer."""
    if all(part.row is not None for part in find_models(pipe)):
        return []
    try:
        parts = tomesd.describe(pipe, sampling.height, sampling.width).parts
    except tomesd.UnsupportedModelError:  # of which inputs are not known
        return list(DOWNSAMPLES)
    found = {level.downsample for part in parts for level in part.levels}
    return sorted(found & set(DOWNSAMPLES))


def refused_options(pipe: Any) -> set[str]:
    """Options of the search that mean nothing on one of its models."""
    found = find_models(pipe)
    can = {"coarse": [part.can_be_coarse for part in found]}
    can["reuse"] = can["reuse_start"] = can["reuse_end"] = [part.can_reuse for part in found]
    return {name for name, answers in can.items() if not all(answers)}


def first_options(
    fixed: Options, start: Options | None = None, transformer: bool = False
) -> list[Options]:
    """Known good ones, to begin with: where to start from, defaults, presets."""
    presets = [*PRESETS["transformer"].values()]
    if not transformer:
        presets = [*PRESETS["unet"].values(), *MERGING_PRESETS.values()]
    known: list[Options] = [*([] if start is None else [start]), {}, *presets]
    known += [{"ratio": ratio} for ratio in (0.25, 0.75, 0.4, 0.6)]
    return [{**options, **fixed} for options in known]
