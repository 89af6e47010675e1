"""Seconds and memory of a call."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..generation.loading import first_line
from ..machine import synchronize
from .calls import Call
from .rows import OUT_OF_MEMORY, Row

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Effort:
    """How long to measure a setting."""

    seconds: float = 5.0
    """For all contenders together, once they are warm."""
    min_repeats: int = 5
    max_repeats: int = 100
    precision: float = 0.002
    """Stop early when all medians are known this well, as a share of themselves."""
    sample_seconds: float = 0.1
    """One repeat takes at least this long: as many calls as that needs."""

    def least(self, contenders: int, seconds: float) -> float:
        """Seconds that so many contenders take at least, if a call of each takes `seconds`."""
        preparing = 3  # to warm up, for the memory, and to see how many calls make a repeat
        timing = max(self.seconds, contenders * self.min_repeats * seconds)
        return contenders * preparing * seconds + timing


@dataclass
class Timing:
    """Repeated measurements of one call."""

    calls: int = 1
    """Calls per repeat."""
    seconds: list[float] = field(default_factory=list)
    """Per call, of each repeat."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance between the quartiles."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low

    @property
    def uncertainty(self) -> float:
        """Standard error of the median, as a share of it; of normal noise, from the quartiles."""
        if len(self.seconds) < 2:
            return math.inf
        return 0.93 * self.spread / math.sqrt(len(self.seconds)) / self.median

    def row(self) -> Row:
        """The fields of a row that tell how long a call takes."""
        repeats = len(self.seconds)
        return {
            **{"seconds": self.median, "spread": self.spread},
            **{"repeats": repeats, "calls": self.calls},
        }


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected: with a large model in memory, that takes as long as some calls."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
def time_calls(call: Call, calls: int, device: torch.device) -> float:
    """Seconds per call, of `calls` calls in a row: on the GPU's own clock where there is one."""
    if device.type != "cuda":
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        return (time.perf_counter() - start) / calls
    if calls > 1:
        call()  # the clock starts with the GPU at work, as it is in the middle of an image
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / calls


@_no_collection()
def time_launches(call: Call, device: torch.device) -> float | None:
    """Seconds that the host takes to start what a GPU does in a call; None without a GPU.

    Where that is about what the call takes, the GPU waits for the host.
    """
    if device.type != "cuda":
        return None
    seconds: list[float] = []
    begin = time.perf_counter()
    while len(seconds) < 5 and time.perf_counter() - begin < 5:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    torch.cuda.synchronize(device)
    return statistics.median(seconds)


def take_turns(
    timers: Mapping[_Key, Callable[[int], float]],
    effort: Effort,
    *,
    periods: Mapping[_Key, int] | None = None,
    on_repeat: Callable[[float], None] = lambda share: None,
) -> dict[_Key, Timing]:
    """Measures all contenders of a setting in turn, round after round.

    What changes on the machine meanwhile (clocks, heat, other processes) then meets all of them.

    Args:
        timers: for each contender, a function that makes so many calls and returns the seconds of
            one.
        periods: calls that only make sense together: their number is never split.
        on_repeat: told the share that is done, as far as can be said, 0 to 1.
    """
    timings: dict[_Key, Timing] = {}
    for name, timer in timers.items():
        period = (periods or {}).get(name, 1)
        calls = 1
        if effort.max_repeats > 1:  # one repeat is for calls that take long
            calls = max(1, math.ceil(effort.sample_seconds / max(timer(1), 1e-9)))
        timings[name] = Timing(calls=math.ceil(calls / period) * period)
    start = time.perf_counter()
    for repeat in range(1, effort.max_repeats + 1):
        for name, timer in timers.items():
            timings[name].seconds.append(timer(timings[name].calls))
            spent = (time.perf_counter() - start) / max(effort.seconds, 1e-9)
            on_repeat(min(1.0, spent, repeat / effort.min_repeats))
        if repeat < effort.min_repeats:
            continue
        known = all(timing.uncertainty < effort.precision for timing in timings.values())
        if known or time.perf_counter() - start > effort.seconds:
            break
    return timings


def is_finite(output: Any) -> bool:
    """Whether what a model returned, or the first part of it, is a number everywhere."""
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return bool(output.isfinite().all())


def free_memory(device: torch.device) -> None:
    """Gives back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def attempt(work: Callable[[], Any], device: torch.device) -> Any:
    """What `work` returns, or why it failed: "OOM", or the error in one line.

    A contender that cannot run is a result too, and the others go on.
    """
    try:
        return work()
    except Exception as error:
        words = f"{type(error).__name__}: {first_line(error)}"[:200]
        reason = OUT_OF_MEMORY if _is_out_of_memory(error) else words
    # Only here has the exception let go of the tensors in its frames.
    free_memory(device)
    return reason


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = str(error).lower()  # the CPU's allocator, cuBLAS and cuDNN raise others
    return isinstance(error, RuntimeError) and (
        "out of memory" in words or "can't allocate memory" in words or "alloc_failed" in words
    )
