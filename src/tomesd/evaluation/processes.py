"""One process or many: who does what, and when all have done it."""

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


class Processes:
    """The processes that `accelerate launch` or `torchrun` started, or the only one.

    Args:
        device: as for `load_pipeline`. "cpu" keeps all of them on the CPU.
    """

    def __init__(self, device: str = "auto") -> None:
        self._state: Any = None
        self.count, self.rank = 1, 0
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            cpu = device == "cpu" or not torch.cuda.is_available()
            # One process may have much less to do than the others, and wait.
            self._state = PartialState(cpu=cpu, timeout=timedelta(days=1))
            self.count, self.rank = self._state.num_processes, self._state.process_index
        self.is_main = self.rank == 0

    def device(self, device: str) -> str:
        """Each process its own GPU, where "auto" leaves the choice."""
        return str(self._state.device) if self._state is not None and device == "auto" else device

    def from_main(self, value: _T) -> _T:
        """The main process's value, in all of them."""
        if self._state is None:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def wait(self) -> None:
        if self._state is not None:
            self._state.wait_for_everyone()

    def close(self) -> None:
        if self._state is not None:
            self._state.destroy_process_group()
