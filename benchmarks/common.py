"""What the benchmarks share: where rows go, and how a few calls are compared."""

import argparse
import os
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from tomesd.bench import Effort
from tomesd.bench.measure import Timing, attempt, take_turns, time_calls, time_launches
from tomesd.bench.modes import Graph
from tomesd.bench.rows import Row

RESULTS = Path(__file__).parent / "results"

Key = TypeVar("Key", bound=Hashable)


class Arguments(argparse.ArgumentParser):
    """The command line of a benchmark, with what several have in common."""

    def __init__(self, doc: str | None, *, device: str = "cuda") -> None:
        super().__init__(description=(doc or "").splitlines()[0])
        self.add_argument("--device", default=device)
        self.add_argument("--commit", help="of the sources, where there is no git")

    def read(self, arguments: list[str] | None) -> argparse.Namespace:
        """What was given, and as `spent` a function that returns the seconds since."""
        args, start = self.parse_args(arguments), time.monotonic()
        args.spent = lambda: time.monotonic() - start
        if args.commit:
            os.environ["TOMESD_COMMIT"] = args.commit
        return args


Ready = tuple[Callable[[], Any], Row]
"""Something warm to be timed, and what is known of it already."""


def replayed(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """A CUDA graph of a call, where there is a GPU; what it reads may be overwritten in place."""
    if device.type != "cuda":
        return call
    return Graph(SimpleNamespace(run=call, advance=lambda: None), device)


@torch.no_grad()
def compare(
    makers: Mapping[Key, Callable[[], Ready]],
    device: torch.device,
    effort: Effort | None,
) -> dict[Key, Row]:
    """Makes all ready, then lets them take turns; what fails is a result like any other.

    Args:
        effort: None to make one call of each.
    """
    rows: dict[Key, Row] = {}
    calls: dict[Key, Callable[[], Any]] = {}
    for key, make in makers.items():
        outcome = attempt(make, device)
        if isinstance(outcome, str):
            rows[key] = {"seconds": None, "error": outcome}
        else:
            calls[key], known = outcome
            rows[key] = {**known, "error": None}
    timers = {key: partial(time_calls, call, device=device) for key, call in calls.items()}

    def time_all() -> dict[Key, Row]:
        if effort is None:
            return {key: Timing(1, [timer(1)]).row() for key, timer in timers.items()}
        timings = take_turns(timers, effort)
        hosts = {key: time_launches(call, device) for key, call in calls.items()}
        return {key: {**timings[key].row(), "host_seconds": hosts[key]} for key in calls}

    found = attempt(time_all, device)
    for key in calls:
        rows[key] |= {"seconds": None, "error": found} if isinstance(found, str) else found[key]
    return rows
