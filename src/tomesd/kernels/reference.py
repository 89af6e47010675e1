"""Plain PyTorch versions of the three operations merging is made of: the definition of right."""

import torch
from torch import Tensor

__all__ = ["best_match", "slot_gather", "slot_mean", "slot_size"]


def best_match(src: Tensor, dst: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Most similar `dst` row of every `src` row, by dot product.

    Works on `tile` rows of `src` at a time, so that the whole score matrix never exists.

    Args:
        src: `[B, S, C]`.
        dst: `[B, D, C]`.

    Returns:
        Score `[B, S]` and index into `dst` `[B, S]` of the best match.
    """
    scores, indices = [], []
    columns = dst.transpose(-1, -2)
    for rows in torch.split(src, tile, dim=1):
        score, index = (rows @ columns).max(dim=-1)
        scores.append(score)
        indices.append(index)
    return torch.cat(scores, dim=1), torch.cat(indices, dim=1)


def slot_size(slot: Tensor, slots: int) -> Tensor:
    """Number of tokens in each slot: `[B, N]` slot numbers to `[B, M]` float32 counts."""
    ones = torch.ones_like(slot, dtype=torch.float32)
    return ones.new_zeros(slot.shape[0], slots).scatter_add(1, slot, ones)


def slot_mean(x: Tensor, slot: Tensor, size: Tensor) -> Tensor:
    """Mean of the tokens in each slot.

    Args:
        x: tokens, `[B, N, C]`.
        slot: slot of each token, `[B, N]`.
        size: tokens per slot, `[B, M]`.

    Returns:
        `[B, M, C]`, in the dtype of `x`.
    """
    # A slot may hold thousands of tokens: half precision could overflow, and would drop bits.
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    total = wide.new_zeros(x.shape[0], size.shape[1], x.shape[2])
    total = total.scatter_add(1, slot.unsqueeze(-1).expand(-1, -1, x.shape[2]), wide)
    return (total / size.unsqueeze(-1).to(total.dtype)).to(x.dtype)


def slot_gather(y: Tensor, slot: Tensor) -> Tensor:
    """Each token's slot row: `[B, M, C]` and `[B, N]` to `[B, N, C]`."""
    return y.gather(1, slot.unsqueeze(-1).expand(-1, -1, y.shape[2]))
