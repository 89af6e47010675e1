"""MergePlan: an assignment of tokens to slots, with the two operations it defines."""

from dataclasses import dataclass

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

    size: Tensor
    """Tokens in each slot, `[B, M]`, float32."""

    @classmethod
    def from_slots(cls, slot: Tensor, slots: int) -> "MergePlan":
        return cls(slot, kernels.slot_size(slot, slots))

    def fits(self, x: Tensor) -> bool:
        """Whether `x` holds the tokens `[B, N, ...]` that this plan was made for."""
        return x.ndim == 3 and x.shape[:2] == self.slot.shape

    def merge(self, x: Tensor) -> Tensor:
        """Mean of each slot's tokens: `[B, N, C]` to `[B, M, C]`."""
        return kernels.slot_mean(x, self.slot, self.size)

    def unmerge(self, y: Tensor) -> Tensor:
        """Gives every token what its slot got: `[B, M, C]` to `[B, N, C]`."""
        return kernels.slot_gather(y, self.slot)
