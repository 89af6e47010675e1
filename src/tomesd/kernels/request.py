"""What a selector is asked for: a plan, and when to make it anew if it outlives a call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cells import Cells
from .draw import Draw
from .lists import Lists


@dataclass(frozen=True)
class Clock:
    """Tells whether lists that outlive a call are still fresh.

    They are while the time falls and they have served fewer than `refresh` calls. Time that stands
    still or rises is a new image.
    """

    state: Tensor
    """`[2 + T]`, float32: whether the lists are made anew in this call, how many calls they have
    served, and the last timesteps. Minus infinity before the first call."""
    refresh: int

    def tick(self, timestep: Tensor) -> Tensor:
        """Moves on to `timestep`, `[]` or `[T]`; whether the lists are still fresh, `[]`, bool."""
        state = self.state
        time = timestep.reshape(-1).to(state)
        fresh = (time < state[2:]).all() & (state[1] < self.refresh)
        state[0] = ~fresh
        state[1] = torch.where(fresh, state[1] + 1, 1.0)
        state[2:] = time
        return fresh


_NOTHING_DRAWN = Draw()


@dataclass(frozen=True)
class Request:
    """The plan that is wanted."""

    cells: Cells
    remove: int
    """Tokens to remove: at most `cells.sources`."""
    draw: Draw = _NOTHING_DRAWN
    """The destinations."""
    clock: Clock | None = None
    """Of a plan that is kept: it stays as it is while it is fresh."""

    @property
    def numbers(self) -> list[int]:
        """All of it but tensors: operators of PyTorch take nothing else."""
        refresh = 1 if self.clock is None else self.clock.refresh
        return [*self.cells.numbers, self.remove, self.draw.key, refresh]

    @classmethod
    def of_numbers(
        cls, numbers: Sequence[int], timestep: Tensor | None = None, clock: Tensor | None = None
    ) -> "Request":
        """The request with these `numbers`, and the tensors of its draw and its clock."""
        *sides, remove, key, refresh = numbers
        kept = None if clock is None else Clock(clock, refresh)
        return cls(Cells(*sides), remove, Draw(timestep, key), kept)

    def fill(self, lists: Lists, make: Callable[[], Lists]) -> None:
        """Writes what `make` finds to `lists`, unless the clock says that they are still fresh.

        Fresh lists are not made, for which the host has to know. While a CUDA graph is captured it
        cannot: there they are made in every call, and dropped.
        """
        if self.clock is None:
            found = make()
        else:
            assert self.draw.timestep is not None
            fresh = self.clock.tick(self.draw.timestep)
            if _is_captured(fresh):
                pairs = zip(lists, make(), strict=True)
                found = Lists(*(torch.where(fresh, old, new) for old, new in pairs))
            elif fresh:
                return
            else:
                found = make()
        for old, new in zip(lists, found, strict=True):
            old.copy_(new)


def _is_captured(x: Tensor) -> bool:
    """Whether what is done to `x` becomes part of a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
