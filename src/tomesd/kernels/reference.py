"""Plain PyTorch versions of the operations merging is made of: the definition of right."""

from typing import Any

import torch
from torch import Tensor

from .cells import Cells
from .request import Lists, Request, list_members


def match_tokens(metric: Tensor, request: Request, lists: Lists) -> None:
    """See `kernels.match_tokens`."""
    cells, remove = request.cells, request.remove

    def make() -> Lists:
        offsets = request.draw.offsets(cells, metric.shape[0], metric.device)
        src, dst, score, match = best_pairs(metric, cells, offsets)
        best = score.argsort(dim=1, descending=True, stable=True)[:, :remove]
        merged = torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True)
        kept = cells.sources - remove
        # Sources that stay come first, then the destinations, both in order.
        of_src = torch.where(merged, kept + match, (~merged).cumsum(1) - 1)
        return pair_lists(src, dst, of_src, kept)

    request.fill(lists, make)


def pair_lists(src: Tensor, dst: Tensor, of_src: Tensor, kept: int) -> Lists:
    """The lists of a plan in which every destination has a slot.

    Args:
        src, dst: tokens, `[B, S]` and `[B, D]`.
        of_src: slots of the sources, `[B, S]`: below `kept` if they stay alone.
        kept: sources that stay alone; the slots of the destinations follow theirs.
    """
    slots = kept + dst.shape[1]
    of_dst = torch.arange(kept, slots, device=dst.device).expand_as(dst)
    tokens = torch.cat([dst, src], dim=1)
    slot = torch.empty_like(tokens).scatter_(1, tokens, torch.cat([of_dst, of_src], dim=1))
    return list_members(slot, slots, tokens)


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
    unit = direction(metric)
    # Each window is searched as an image of its own, [B * W, ...].
    rows, columns = (
        slot_gather(unit, index.flatten(1)).view(batch * windows, -1, channels)
        for index in (src, dst)
    )
    # A tile of scores as large as the tokens themselves: below what the layer needs anyway.
    tile = max(1, each * channels // columns.shape[1])
    score, match = (found.view(batch, windows, -1) for found in best_match(rows, columns, tile))
    match = match + torch.arange(windows, device=match.device)[:, None] * dst.shape[2]
    return src.flatten(1), dst.flatten(1), score.flatten(1), match.flatten(1)


def direction(metric: Tensor) -> Tensor:
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


def slot_mean(x: Tensor, lists: Lists) -> Tensor:
    """Mean of the tokens in each slot: `[B, N, C]` to `[B, M, C]`, in the dtype of `x`."""
    # A slot may hold thousands of tokens: half precision could overflow, and would drop bits.
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    size = lists.span[..., 1]
    total = wide.new_zeros(*size.shape, x.shape[2])
    total = total.scatter_add(1, lists.slot.unsqueeze(-1).expand(-1, -1, x.shape[2]), wide)
    return (total / size.unsqueeze(-1).to(total.dtype)).to(x.dtype)


def slot_gather(y: Tensor, slot: Tensor) -> Tensor:
    """Each token's slot row: `[B, M, C]` and `[B, N]` to `[B, N, C]`."""
    return y.gather(1, slot.unsqueeze(-1).expand(-1, -1, y.shape[2]))


def slot_restore(x: Tensor, y: Tensor, merged: Tensor, slot: Tensor) -> Tensor:
    """`x` `[B, N, C]` plus what each token's slot gained from `merged` to `y`, both `[B, M, C]`."""
    return x + slot_gather(y - merged, slot)


def keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Setup of `slot_mean_backward`, for operators that take x, slot, order and span."""
    _, slot, _, span = inputs
    ctx.save_for_backward(slot, span)


def slot_mean_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """A token of a slot with k tokens gets 1 / k of its gradient."""
    slot, span = ctx.saved_tensors
    size = span[..., 1]
    return slot_gather(grad / size.unsqueeze(-1).to(grad.dtype), slot), None, None, None
