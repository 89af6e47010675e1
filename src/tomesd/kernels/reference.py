"""Plain PyTorch versions of the operations merging is made of: the definition of right."""

from typing import Any

import torch
from torch import Tensor

from .cells import Cells
from .draw import draw_offsets

__all__ = [
    "best_match",
    "best_pairs",
    "keep_for_backward",
    "match_tokens",
    "members",
    "slot_gather",
    "slot_mean",
    "slot_mean_backward",
    "slot_restore",
]


def match_tokens(
    metric: Tensor,
    timestep: Tensor | None,
    offsets: Tensor | None,
    slot: Tensor,
    order: Tensor,
    span: Tensor,
    clock: Tensor | None,
    cells: Cells,
    remove: int,
    key: int,
    refresh: int,
) -> None:
    """See `kernels.match_tokens`."""
    if clock is not None and _plan_is_fresh(clock, timestep, refresh):
        return
    offsets = _offsets(metric, timestep, offsets, cells, key)
    src, dst, score, match = best_pairs(metric, cells, offsets)
    best = score.argsort(dim=1, descending=True, stable=True)[:, :remove]
    merged = torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True)
    # Sources that stay come first, then the destinations, both in order.
    kept = cells.sources - remove
    slot.scatter_(1, src, torch.where(merged, kept + match, (~merged).cumsum(1) - 1))
    slot.scatter_(1, dst, torch.arange(kept, kept + cells.count, device=dst.device).expand_as(dst))
    lists = members(slot, kept + cells.count, torch.cat([dst, src], dim=1))
    for out, found in zip((order, span), lists, strict=True):
        out.copy_(found)


def best_pairs(
    metric: Tensor, cells: Cells, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The most similar destination of every source, in its window.

    Args:
        offsets: which token of each cell is its dst, `[1 or B, cells.count]`.

    Returns:
        The tokens that are sources `[B, S]` and destinations `[B, D]`, window by window, and for
        each source its similarity to the best destination, and which that is, `[B, S]`.
    """
    batch, _, channels = metric.shape
    src, dst = (index.expand(batch, -1, -1) for index in cells.split(offsets))
    windows, each = cells.windows, cells.tokens // cells.windows
    direction = _direction(metric)
    # Each window is searched as an image of its own, [B * W, ...].
    rows, columns = (
        slot_gather(direction, index.flatten(1)).view(batch * windows, -1, channels)
        for index in (src, dst)
    )
    # A tile of scores as large as the tokens themselves: below what the layer needs anyway.
    tile = max(1, each * channels // columns.shape[1])
    score, match = (found.view(batch, windows, -1) for found in best_match(rows, columns, tile))
    match = match + torch.arange(windows, device=match.device)[:, None] * dst.shape[2]
    return src.flatten(1), dst.flatten(1), score.flatten(1), match.flatten(1)


def _plan_is_fresh(clock: Tensor, timestep: Tensor | None, refresh: int) -> bool:
    """Moves the clock to `timestep`; whether the plan it belongs to is kept.

    It is while the time falls and the plan has served fewer than `refresh` calls. Time that stands
    still or rises is a new image.
    """
    assert timestep is not None
    time = timestep.reshape(-1).to(clock)
    kept = bool((time < clock[2:]).all() & (clock[1] < refresh))
    clock[0] = not kept
    clock[1] = clock[1] + 1 if kept else 1
    clock[2:] = time
    return kept


def _offsets(
    metric: Tensor, timestep: Tensor | None, offsets: Tensor | None, cells: Cells, key: int
) -> Tensor:
    """Which token of each cell is its dst, `[1 or B, cells.count]`."""
    if offsets is not None:
        return offsets
    if key < 0:
        return torch.zeros(1, cells.count, dtype=torch.int64, device=metric.device)
    if timestep is None:
        timestep = torch.zeros(1, device=metric.device)
    drawn = draw_offsets(cells.count, cells.choices, key, timestep.reshape(-1))
    images, batch = drawn.shape[0], metric.shape[0]
    if batch % images:
        return drawn[:1]  # a part of a batch: in sampling, all have the same timestep
    # One timestep per image; a video model folds its frames into the batch.
    return drawn.repeat_interleave(batch // images, dim=0) if images > 1 else drawn


def _direction(metric: Tensor) -> Tensor:
    """Unit vectors `[B, N, C]`; of zero, infinite and NaN tokens, zero, which matches nothing."""
    dtype = metric.dtype
    if dtype in (torch.float16, torch.bfloat16):
        metric = metric.float()  # the squares of large tokens overflow half precision
    norm = metric.norm(dim=-1, keepdim=True)
    usable = (norm > 0) & torch.isfinite(norm)
    return torch.where(usable, metric / norm, 0.0).to(dtype)


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


def members(slot: Tensor, slots: int, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The tokens of each slot.

    Args:
        slot: slot of each token, `[B, N]`.
        tokens: all tokens, `[B, N]`, in the order in which a slot lists its own; the first one is
            its representative. None: by number.

    Returns:
        order and span of a `MergePlan`.
    """
    if tokens is None:
        order = slot.argsort(dim=1, stable=True)
    else:
        order = tokens.gather(1, slot.gather(1, tokens).argsort(dim=1, stable=True))
    size = torch.zeros(slot.shape[0], slots, dtype=torch.int64, device=slot.device)
    size.scatter_add_(1, slot, torch.ones_like(slot))
    first = size.cumsum(1) - size
    return order.int(), torch.stack([first, size], dim=2).int()


def slot_mean(x: Tensor, slot: Tensor, order: Tensor, span: Tensor) -> Tensor:
    """Mean of the tokens in each slot: `[B, N, C]` to `[B, M, C]`, in the dtype of `x`."""
    # A slot may hold thousands of tokens: half precision could overflow, and would drop bits.
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    total = wide.new_zeros(x.shape[0], span.shape[1], x.shape[2])
    total = total.scatter_add(1, slot.unsqueeze(-1).expand(-1, -1, x.shape[2]), wide)
    size = span[..., 1]
    return (total / size.unsqueeze(-1).to(total.dtype)).to(x.dtype)


def slot_gather(y: Tensor, slot: Tensor) -> Tensor:
    """Each token's slot row: `[B, M, C]` and `[B, N]` to `[B, N, C]`."""
    return y.gather(1, slot.unsqueeze(-1).expand(-1, -1, y.shape[2]))


def slot_restore(x: Tensor, y: Tensor, merged: Tensor, slot: Tensor) -> Tensor:
    """`x` `[B, N, C]` plus what each token's slot gained from `merged` to `y`, both `[B, M, C]`."""
    return x + slot_gather(y - merged, slot)


def keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Setup of `slot_mean_backward`, for operators with the arguments of `slot_mean`."""
    _, slot, _, span = inputs
    ctx.save_for_backward(slot, span)


def slot_mean_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """A token of a slot with k tokens gets 1 / k of its gradient."""
    slot, span = ctx.saved_tensors
    size = span[..., 1]
    return slot_gather(grad / size.unsqueeze(-1).to(grad.dtype), slot), None, None, None
