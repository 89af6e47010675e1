"""The lists that a plan is made of, and how they are kept from one call to the next."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Clock", "Lists", "list_members", "renew"]


class Lists(NamedTuple):
    """Which tokens are in which slot; see `MergePlan`."""

    slot: Tensor
    """`[B, N]`, int64."""
    order: Tensor
    """`[B, N]`, int32."""
    span: Tensor
    """`[B, M, 2]`, int32."""


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


def renew(
    lists: Lists, clock: Clock | None, timestep: Tensor | None, make: Callable[[], Lists]
) -> None:
    """Writes what `make` finds to `lists`, unless the clock says that they are still fresh.

    Fresh lists are not made, for which the host has to know. While a CUDA graph is captured it
    cannot: there they are made in every call, and dropped.
    """
    if clock is None:
        found = make()
    else:
        assert timestep is not None
        fresh = clock.tick(timestep)
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
