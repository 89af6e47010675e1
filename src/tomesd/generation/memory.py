"""Peak memory of a stretch of code."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class MemoryProbe:
    """Peak memory beyond what was in use when the probe was made.

    Make it before the model is patched: what a patch keeps between calls then counts too. It is
    what the GPU's allocator has handed out. On a CPU it is None: what a process holds depends on
    what the C library keeps for later, and differs from run to run by more than merging saves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._before = torch.cuda.memory_allocated(device)

    def peak_mib(self, call: Callable[[], Any]) -> float | None:
        """The call should be warm: tuning and loading kernels takes memory of its own, once."""
        with self.watch() as peak:
            call()
        return peak[0]

    @contextmanager
    def watch(self) -> Iterator[list[float | None]]:
        """Yields a list whose one element is the peak in MiB when the block has ended."""
        peak: list[float | None] = [None]
        if self._device.type != "cuda":
            yield peak
            return
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield peak
        torch.cuda.synchronize(self._device)
        peak[0] = (torch.cuda.max_memory_allocated(self._device) - self._before) / 2**20
