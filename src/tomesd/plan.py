"""MergePlan: an assignment of tokens to slots, with the operations it defines."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from . import kernels

__all__ = ["MergePlan"]


@dataclass
class MergePlan:
    """Puts each of N tokens into one of M < N slots.

    Which slot is data, but how many slots there are is not: M depends on the settings and the grid
    alone, so that shapes are static and a plan can be compiled or captured into a CUDA graph.
    """

    slot: Tensor
    """Slot of each token, `[B, N]`, int64 in `[0, M)`. Every slot has at least one token."""

    order: Tensor
    """The tokens, those of a slot beside each other, `[B, N]`, int32."""

    span: Tensor
    """Where each slot's tokens begin in `order`, and how many they are, `[B, M, 2]`, int32."""

    triton: bool = False
    """Whether the Triton kernels do the work."""

    @classmethod
    def empty(
        cls, batch: int, n: int, slots: int, device: torch.device, triton: bool
    ) -> "MergePlan":
        """A plan to be filled in."""
        return cls(
            torch.empty(batch, n, dtype=torch.int64, device=device),
            torch.empty(batch, n, dtype=torch.int32, device=device),
            torch.empty(batch, slots, 2, dtype=torch.int32, device=device),
            triton,
        )

    @property
    def size(self) -> Tensor:
        """Tokens in each slot, `[B, M]`."""
        return self.span[..., 1]

    def fits(self, x: Tensor) -> bool:
        """Whether `x` holds the tokens `[B, N, ...]` that this plan was made for."""
        return x.ndim == 3 and x.shape[:2] == self.slot.shape

    def merge(self, x: Tensor) -> Tensor:
        """Mean of each slot's tokens: `[B, N, C]` to `[B, M, C]`."""
        return kernels.slot_mean(x, self.slot, self.order, self.span, self.triton)

    @property
    def unmerge(self) -> Callable[[Tensor], Tensor]:
        """Gives every token what its slot got: `[B, M, C]` to `[B, N, C]`.

        A function that does not hold on to what only merging needs.
        """
        return partial(kernels.slot_gather, slot=self.slot, triton=self.triton)

    def restore(self, x: Tensor, y: Tensor, merged: Tensor) -> Tensor:
        """Adds to every token what its slot gained: `x + unmerge(y - merged)`, in one pass.

        With `merged = merge(x)` and `y` what a layer with a residual of its own makes of it, tokens
        keep what tells them apart from the others of their slot.

        Args:
            x: tokens before merging, `[B, N, C]`.
            y: slots after the layer, `[B, M, C]`.
            merged: slots before it, `[B, M, C]`.
        """
        return kernels.slot_restore(x, y, merged, self.slot, self.triton)
