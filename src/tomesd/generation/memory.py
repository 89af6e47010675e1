"""Peak memory of a stretch of code."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch


class MemoryProbe:
    """Peak memory beyond what was in use when the probe was made.

    Make it before the model is patched: what a patch keeps between calls then counts too. On a GPU
    it is what the allocator has handed out; on a CPU, what the process holds.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._before = torch.cuda.memory_allocated(device)

    def peak_mib(self, call: Callable[[], Any]) -> float:
        """The call should be warm: tuning and loading kernels takes memory of its own, once."""
        with self.watch() as peak:
            call()
        return peak[0]

    @contextmanager
    def watch(self) -> Iterator[list[float]]:
        """Yields a list whose one element is the peak in MiB when the block has ended."""
        peak = [0.0]
        if self._device.type != "cuda":
            with _process_peak(peak):
                yield peak
            return
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield peak
        torch.cuda.synchronize(self._device)
        peak[0] = (torch.cuda.max_memory_allocated(self._device) - self._before) / 2**20


@contextmanager
def _process_peak(peak: list[float]) -> Iterator[None]:
    """The process's resident memory, looked at every few milliseconds."""
    # What the C library keeps for later would hide a peak; it gives it back where it can.
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    process, done = psutil.Process(), threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], (process.memory_info().rss - before) / 2**20)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
