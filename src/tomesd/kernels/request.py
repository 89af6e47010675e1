"""What a selector is asked for, the lists that it writes, and operators of PyTorch that do so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cells import Cells, Draw


class Lists(NamedTuple):
    """Which tokens are in which slot; see `MergePlan`."""

    slot: Tensor
    """`[B, N]`, int64."""
    order: Tensor
    """`[B, N]`, int32."""
    span: Tensor
    """`[B, M, 2]`, int32."""

    @classmethod
    def empty(cls, batch: int, tokens: int, slots: int, device: torch.device) -> "Lists":
        """Lists to be filled in."""
        return cls(
            torch.empty(batch, tokens, dtype=torch.int64, device=device),
            torch.empty(batch, tokens, dtype=torch.int32, device=device),
            torch.empty(batch, slots, 2, dtype=torch.int32, device=device),
        )


def list_members(slot: Tensor, slots: int, tokens: Tensor | None = None) -> Lists:
    """The tokens of each slot.

    Args:
        slot: slot of each token, `[B, N]`.
        slots: how many there are.
        tokens: all tokens, `[B, N]`, in the order in which a slot lists its own; the first one is
            its representative. None: by number.
    """
    if tokens is None:
        order = slot.argsort(dim=1, stable=True)
    else:
        order = tokens.gather(1, slot.gather(1, tokens).argsort(dim=1, stable=True))
    size = torch.zeros(slot.shape[0], slots, dtype=torch.int64, device=slot.device)
    size.scatter_add_(1, slot, torch.ones_like(slot))
    first = size.cumsum(1) - size
    return Lists(slot, order.int(), torch.stack([first, size], dim=2).int())


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


@dataclass(frozen=True)
class Request:
    """The plan that is wanted."""

    cells: Cells
    remove: int
    """Tokens to remove: at most `cells.sources`."""
    draw: Draw
    """The destinations. No default: PyTorch 2.11 compiles nothing that has a dataclass for one."""
    clock: Clock | None = None
    """Of a plan that is kept: it stays as it is while it is fresh."""

    @property
    def settled(self) -> bool:
        """Whether there is nothing to compare: all sources go to the one destination they have."""
        return self.remove == self.cells.sources and self.cells.window.count == 1

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


WRITTEN = ("slot", "order", "span", "clock")
"""Arguments that these operators write to."""


def flatten(metric: Tensor, request: Request, lists: Lists) -> tuple[Any, ...]:
    """The arguments of an operator."""
    state = None if request.clock is None else request.clock.state
    return (metric.detach(), request.draw.timestep, *lists, state, request.numbers)


def opaque_operator(
    name: str, write: Callable[[Tensor, Request, Lists, bool], None]
) -> Callable[[Tensor, Request, Lists, bool], None]:
    """`write` as an operator `tomesd::name`, which compilers take in as it is.

    Args:
        write: takes the metric, what is wanted, the lists to write to, and whether to use the
            Triton kernels.
    """

    def run(
        metric: Tensor,
        timestep: Tensor | None,
        slot: Tensor,
        order: Tensor,
        span: Tensor,
        clock: Tensor | None,
        numbers: Sequence[int],
        triton: bool,
    ) -> None:
        request = Request.of_numbers(numbers, timestep, clock)
        write(metric, request, Lists(slot, order, span), triton)

    operator = torch.library.custom_op(f"tomesd::{name}", run, mutates_args=WRITTEN)
    operator.register_fake(lambda *_, **__: None)
    return lambda metric, request, lists, triton: operator(*flatten(metric, request, lists), triton)
