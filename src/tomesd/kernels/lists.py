"""The lists that a plan is made of."""

from typing import NamedTuple

import torch
from torch import Tensor


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
