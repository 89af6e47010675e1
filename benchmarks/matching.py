"""How the cost of matching grows with the tokens: time and memory of making one plan.

Nothing is merged with it. Tokens are random, `[2, N, 320]`, as at the finest level of SD 1.5.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rows import timed
from torch import Tensor

from tomesd.bench import Effort, load_original
from tomesd.bench.measure import attempt, free_memory, take_turns, time_calls
from tomesd.bench.modes import Graph
from tomesd.bench.rows import Row
from tomesd.generation.memory import MemoryProbe
from tomesd.kernels import Cells
from tomesd.selectors import bipartite

__all__ = ["measure", "rows"]

SIDES = (32, 48, 64, 96, 128, 192, 256)
BATCH, CHANNELS, RATIO = 2, 320, 0.5


class Matching:
    """Makes a plan again and again; destinations are the top left tokens of 2x2 cells."""

    def __init__(self, make: Callable[[Tensor, Any], Any], x: Tensor, size: Any):
        self.run = partial(make, x, size)

    def advance(self) -> None:
        """Nothing changes between two plans."""


def ours(x: Tensor, side: int, *, backend: str, window: int) -> Any:
    cells = Cells.of(side, side, 2, 2, window)
    return bipartite(x, cells, cells.removable(RATIO), backend=backend)


def original(x: Tensor, side: int, *, folder: str) -> Any:
    matching = load_original(folder).merge.bipartite_soft_matching_random2d
    return matching(x, side, side, 2, 2, int(side * side * RATIO), no_rand=True)


def makers(folder: str | None, device: torch.device) -> dict[str, Callable[[Tensor, int], Any]]:
    """By label."""
    found: dict[str, Callable[[Tensor, int], Any]] = {}
    if device.type == "cuda":
        found["triton"] = partial(ours, backend="triton", window=8)
        found["triton, one window"] = partial(ours, backend="triton", window=0)
    found["reference"] = partial(ours, backend="reference", window=8)
    if folder is not None:
        found["original"] = partial(original, folder=folder)
    return found


@torch.no_grad()
def rows(folder: str | None, device: torch.device, sides: tuple[int, ...] = SIDES) -> Iterator[Row]:
    """One row for each size and library: replayed as a CUDA graph where there is a GPU."""
    mode, dtype = ("graph", torch.float16) if device.type == "cuda" else ("eager", torch.float32)
    for side in sides:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(BATCH, side * side, CHANNELS, generator=generator).to(device, dtype)
        for label, result in measure(side, x, makers(folder, device)).items():
            yield {
                "section": "matching",
                "setting": f"{side}x{side} tokens",
                "model": "random tokens",
                "what": "plan",
                "height": side,
                "width": side,
                "images": 1,
                "batch": BATCH,
                "tokens": side * side,
                "channels": CHANNELS,
                "dtype": str(dtype).removeprefix("torch."),
                "attention": "none",
                "mode": mode,
                "variant": "original" if label == "original" else "tomesd",
                "label": label,
                "settings": {"ratio": RATIO},
                **result,
            }


def measure(size: Any, x: Tensor, found: dict[str, Callable[..., Any]]) -> dict[str, Row]:
    """By label, what a row says of the result; `size`: of the grid, as the functions take it."""
    results: dict[str, Row] = {}
    timers: dict[str, Callable[[int], float]] = {}
    for label, make in found.items():
        outcome = attempt(partial(prepare, Matching(make, x, size), x.device), x.device)
        if isinstance(outcome, str):
            results[label] = {"seconds": None, "error": outcome}
        else:
            call, peak = outcome
            timers[label] = partial(time_calls, call, device=x.device)
            results[label] = {"peak_mib": peak, "error": None}
    effort = Effort(seconds=0.5, min_repeats=3, sample_seconds=0.02)
    for label, timing in take_turns(timers, effort).items():
        results[label] |= timed(timing)
    timers.clear()
    free_memory(x.device)
    return results


def prepare(matching: Matching, device: torch.device) -> tuple[Callable[[], Any], float]:
    """The call to be timed, and its peak memory in MiB."""
    matching.run()
    peak = MemoryProbe(device).peak_mib(matching.run)
    return (Graph(matching, device) if device.type == "cuda" else matching.run), peak
