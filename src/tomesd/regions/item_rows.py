"""Rows per token, such as RoPE tables, for hosts whose code adds the batch axis itself."""

from typing import Any

import torch
from torch import Tensor


class ItemRows:
    """Rows `[N]` or `[N, C]` that differ between batch items, in place of a tensor of that shape.

    Flux, Qwen-Image, HunyuanVideo and others keep one table of positions for the whole batch and
    add the batch axis where they apply it. After merging, each item has positions of its own. So
    this object answers the few operations those hosts use (`rows[None, :, None]`,
    `rows.unsqueeze(1)`, `rows.view(1, N, 1, C)`) with a tensor that has B items instead of one.
    """

    def __init__(self, rows: Tensor):
        self.rows = rows
        """`[B, N]` or `[B, N, C]`."""

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape[1:]

    @property
    def ndim(self) -> int:
        return self.rows.ndim - 1

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def __getitem__(self, index: Any) -> Any:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if first is None:
            return self.rows[(slice(None), *rest)]
        return ItemRows(self.rows[(slice(None), first, *rest)])

    def unsqueeze(self, dim: int) -> Tensor:
        """The axis in front becomes the batch. Behind the tokens, it is for attention heads: the
        batch is then in front of the tokens, where it broadcasts against queries and keys."""
        return self.rows if dim == 0 else self.rows.unsqueeze(dim + 1)

    def view(self, *shape: int) -> Tensor:
        if shape[0] != 1:
            raise ValueError(f"rows of a batch, viewed as {shape}: the first size must be 1")
        return self.rows.reshape(self.rows.shape[0], *shape[1:])

    def to(self, *args: Any, **kwargs: Any) -> "ItemRows":
        return ItemRows(self.rows.to(*args, **kwargs))
