"""What tests of patched diffusion transformers share: options, models, what their blocks get."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from diffusers.pipelines.mochi.pipeline_mochi import linear_quadratic_schedule
from torch import Tensor, nn
from zoo_dit import DITS, ROWS, Dit, largest_time

import tomesd
from tomesd.schedule import Timeline

# The zoo's models are far too small to gain anything, its times are those of late steps, and what
# one call is matched by is to be seen from that call alone.
ALWAYS: dict[str, Any] = {"when": "always", "end": 1.0, "metric": "input"}
SUPPORTED = {
    name: dit for name, dit in DITS.items() if dit.kind in ROWS and not ROWS[dit.kind].reason
}
BlockCall = tuple[str, dict[str, Any]]


def patched_model(dit: Dit, ratio: float = 0.5, **options: Any) -> Any:
    return tomesd.apply_patch(dit.build(), ratio, **{**ALWAYS, **options})


def _lists(model: nn.Module) -> Any:
    kind = next(cls.__name__ for cls in type(model).__mro__ if cls.__name__ in ROWS)
    return ROWS[kind].lists


def block_lists(model: nn.Module) -> list[str]:
    return [part.path for part in _lists(model)]


def input_name(model: nn.Module) -> str:
    return _lists(model)[0].input


def tokens_of(model: nn.Module, given: dict[str, Any]) -> Tensor:
    """What a block got, [B, N, C]."""
    tokens = given[input_name(model)]
    return tokens.transpose(0, 1) if "ErnieImage" in type(model).__name__ else tokens


@contextlib.contextmanager
def block_calls(model: nn.Module) -> Iterator[list[BlockCall]]:
    """Notes every call of a block's own forward, below anything that tomesd does: its name, and
    its arguments by name."""
    blocks = {
        id(block): f"{path}.{number}"
        for path in block_lists(model)
        for number, block in enumerate(getattr(model, path))
    }
    paths = block_lists(model)
    classes = {_forward_owner(block) for path in paths for block in getattr(model, path)}
    calls: list[BlockCall] = []

    def noting(forward: Any) -> Any:
        names = inspect.signature(forward)

        @functools.wraps(forward)
        def note(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(self) in blocks:
                given = dict(names.bind(self, *args, **kwargs).arguments)
                given.update(given.pop("kwargs", {}))
                del given["self"]
                calls.append((blocks[id(self)], given))
            return forward(self, *args, **kwargs)

        return note

    before = {cls: cls.forward for cls in classes}
    for cls, forward in before.items():
        cls.forward = noting(forward)
    try:
        yield calls
    finally:
        for cls, forward in before.items():
            cls.forward = forward


def _forward_owner(block: nn.Module) -> Any:
    """The class of diffusers that has the block's forward."""
    return next(
        cls
        for cls in type(block).__mro__
        if "forward" in vars(cls) and not hasattr(cls, "_tomesd_base")
    )


def tokens_seen(model: nn.Module, calls: list[BlockCall]) -> dict[str, set[int]]:
    """How many tokens each block got, by its name."""
    seen: dict[str, set[int]] = {}
    for name, given in calls:
        seen.setdefault(name, set()).add(tokens_of(model, given).shape[1])
    return seen


def assert_rounding(actual: Tensor, expected: Tensor, tolerance: float = 5e-5) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert (actual - expected).abs().max() < tolerance * expected.std()


def assert_differs(actual: Tensor, other: Tensor) -> None:
    assert actual.shape == other.shape and actual.isfinite().all()
    assert (actual - other).std() > 0.01 * other.std()


def texts_swapped(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of guidance: both items have the first one's picture and time, and own texts."""
    words = ("text", "encoder", "cap_feats", "pooled", "txt", "attention_mask", "input_ids")

    def same(name: str, value: Any) -> Any:
        if any(word in name for word in words) or not isinstance(value, Tensor):
            return [value[0], value[0]] if name == "x" else value
        return value[:1].repeat(2, *[1] * (value.ndim - 1)) if value.shape[0] == 2 else value

    return {name: same(name, value) for name, value in inputs.items()}


def at_noise(dit: Dit, inputs: dict[str, Any], noise: float) -> dict[str, Any]:
    """The inputs at a time at which the share `noise` of the way from noise is still to go."""
    timeline = ROWS[dit.kind].timeline
    name = next(name for name in ("timestep", "timesteps", "t") if name in inputs)
    time = largest_time(dit.kind) * (
        1 - noise if isinstance(timeline, Timeline) and timeline.rises else noise
    )
    given = inputs[name] > 0  # frames that are given keep their time, 0
    return inputs | {name: torch.where(given, torch.full_like(inputs[name], time), 0)}


def at_steps_left(dit: Dit, inputs: dict[str, Any], share: float) -> dict[str, Any]:
    """The inputs at a time at which a share of the steps is left, for a shift of 3."""
    if dit.kind.startswith("Mochi"):
        levels = [*linear_quadratic_schedule(1000, 0.025), 0.0]
        return at_noise(dit, inputs, levels[round(1000 * (1 - share))])
    flow = ROWS[dit.kind].flow
    return at_noise(dit, inputs, 3 * share / (1 + 2 * share) if flow else share)
