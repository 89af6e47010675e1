"""How the cost of matching grows with the tokens: time and memory of making one plan.

Nothing is merged with it. Tokens are random, `[2, N, 320]`, as at the finest level of SD 1.5.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tomesd import Settings
from tomesd.bench import Effort, load_original
from tomesd.bench.measure import MemoryProbe, attempt, free_memory, take_turns, time_calls
from tomesd.bench.modes import Graph
from tomesd.bench.rows import Row
from tomesd.planning import make_plan, shared_plan
from tomesd.policy import Call, Frame
from tomesd.shared import Patch

SIDES = (32, 48, 64, 96, 128, 192, 256)
BATCH, CHANNELS = 2, 320
SETTINGS = Settings(ratio=0.5, max_downsample=1, when="always", use_rand=False)


class Matching:
    """Makes a plan again and again."""

    def __init__(self, make: Callable[[], Any]):
        self.run = make

    def advance(self) -> None:
        """Nothing changes between two plans."""


def ours(settings: Settings, side: int, x: Tensor) -> Any:
    call = Call((side, side), torch.zeros((), device=x.device))
    frame = Frame(Patch(settings, True, shared_plan), call, settings).at_grid((side, side), 1)
    return make_plan(frame, x, frame.remove)


def original(folder: str, side: int, x: Tensor) -> Any:
    matching = load_original(folder).merge.bipartite_soft_matching_random2d
    remove = int(side * side * SETTINGS.ratio)
    return matching(x, side, side, SETTINGS.sx, SETTINGS.sy, remove, no_rand=True)


def makers(folder: str | None, device: torch.device) -> dict[str, Callable]:
    """By label: a function of side and tokens that makes a plan."""
    found = {"reference": partial(ours, replace(SETTINGS, backend="reference"))}
    if device.type == "cuda":
        whole = replace(SETTINGS, backend="triton", window=0)
        found = {
            "triton": partial(ours, replace(whole, window=None)),
            "triton, one window": partial(ours, whole),
            **found,
        }
    if folder is not None:
        found["original"] = partial(original, folder)
    return found


@torch.no_grad()
def rows(folder: str | None, device: torch.device, sides: tuple[int, ...] = SIDES) -> Iterator[Row]:
    """One row for each size, library and mode."""
    for side in sides:
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(BATCH, side * side, CHANNELS, generator=generator).to(device, dtype)
        for mode in ("graph", "eager") if device.type == "cuda" else ("eager",):
            results = _measure(side, x, mode, makers(folder, device))
            for label, result in results.items():
                yield _row(side, x, mode, label, result)


def _measure(side: int, x: Tensor, mode: str, found: dict[str, Callable]) -> dict[str, Row]:
    """By label, what a row says of the result."""
    results: dict[str, Row] = {}
    ready: dict[str, tuple[Callable, float]] = {}
    for label, make in found.items():
        outcome = attempt(partial(_prepare, Matching(partial(make, side, x)), x, mode), x.device)
        if isinstance(outcome, str):
            results[label] = {"seconds": None, "error": outcome}
        else:
            ready[label] = outcome
    timers = {label: partial(time_calls, ready[label][0], device=x.device) for label in ready}
    effort = Effort(seconds=0.5, min_repeats=3, sample_seconds=0.02)
    for label, timing in take_turns(timers, effort).items():
        results[label] = {
            "seconds": timing.median,
            "spread": timing.spread,
            "repeats": len(timing.seconds),
            "calls": timing.calls,
            "peak_mib": ready[label][1],
            "error": None,
        }
    ready.clear()
    timers.clear()
    free_memory(x.device)
    return {label: results[label] for label in found}


def _prepare(matching: Matching, x: Tensor, mode: str) -> tuple[Callable, float]:
    """The call to be timed, and its peak memory in MiB."""
    matching.run()
    peak = MemoryProbe(x.device).peak_mib(matching.run)
    return (Graph(matching, x.device) if mode == "graph" else matching.run), peak


def _row(side: int, x: Tensor, mode: str, label: str, result: Row) -> Row:
    return {
        "section": "matching",
        "setting": f"{side}x{side} tokens",
        "model": "random tokens",
        "what": "plan",
        "steps": None,
        "height": side,
        "width": side,
        "images": 1,
        "batch": x.shape[0],
        "tokens": side * side,
        "channels": x.shape[2],
        "dtype": str(x.dtype).removeprefix("torch."),
        "attention": "none",
        "mode": mode,
        "variant": "original" if label == "original" else "tomesd",
        "label": label,
        "settings": asdict(SETTINGS),
        **result,
    }
