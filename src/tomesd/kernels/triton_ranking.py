"""Triton kernels that rank the sources of an image and list the members of every slot.

Comparing all with all is quadratic, but without channels: a small part of the matching. All members
of a slot are in one window: where a program can hold it, that takes one launch, otherwise two.
"""

# Kernels are Triton's language, not Python's: they have no types, and a test for None, resolved
# when the kernel is compiled, has to stand alone.
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: SIM102

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .cells import Cells
from .triton_cells import dst_token, src_token, window_tile
from .triton_launch import blocks

__all__ = ["rank_sources"]


@triton.jit
def _count(
    values, own, low, high, BLOCK: tl.constexpr, DESCENDING: tl.constexpr, TIES: tl.constexpr
):
    """How many of the values in low..high come before each of own, equal ones counting if TIES."""
    before = tl.zeros([own.shape[0], BLOCK], tl.int32)
    for j0 in range(low, high, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        other = tl.load(values + j, j < high, other=float("-inf") if DESCENDING else 0x7FFFFFFF)
        if DESCENDING:
            ahead = other[None, :] >= own[:, None] if TIES else other[None, :] > own[:, None]
        else:
            ahead = other[None, :] <= own[:, None] if TIES else other[None, :] < own[:, None]
        before += ahead.to(tl.int32)
    return tl.sum(before, axis=1)


@triton.jit
def _place(values, own, i0, n, BLOCK: tl.constexpr, DESCENDING: tl.constexpr):
    """Places of the values i0, i0 + 1, ... (own) when all n are sorted; ties stay in order."""
    size: tl.constexpr = own.shape[0]
    i = i0 + tl.arange(0, size)
    earlier = _count(values, own, 0, i0, BLOCK, DESCENDING, TIES=True)
    later = _count(values, own, i0, n, BLOCK, DESCENDING, TIES=False)
    # Equal ones among themselves: only those listed before count.
    other = tl.load(values + i, i < n, other=0)
    tied = (other[None, :] == own[:, None]) & (i[None, :] < i[:, None]) & (i < n)[None, :]
    return earlier + later + tl.sum(tied.to(tl.int32), axis=1)


@triton.jit
def _plan_window(
    score,
    match,
    offsets,
    timestep,
    key,
    rows,
    slot,
    order,
    span,
    flag,
    h,
    w,
    windows,
    across,
    columns,
    count,
    remove,
    sy: tl.constexpr,
    sx: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """slot, order [B, N] and span [B, M, 2]: the part of one window; see `MergePlan`.

    It has the same part of `order` whatever is merged in other windows. Of the slots, those that
    keep one source come first, by falling score, then those of the destinations.
    """
    if flag is not None:
        if tl.load(flag) == 0:
            return
    window = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    n = h * w
    sources = n - count
    kept = windows * sources - remove
    i = tl.arange(0, BLOCK_S)
    j = tl.arange(0, BLOCK_D)
    s, d = window * sources + i, window * count + j
    score += b * windows * sources
    own = tl.load(score + s, i < sources, other=float("-inf"))
    rank = _place(score, own, window * sources, windows * sources, BLOCK_J, DESCENDING=True)
    merged = (i < sources) & (rank < remove)
    alone = (i < sources) & (rank >= remove)
    goes = tl.load(match + b * windows * sources + s, merged, other=window * count + BLOCK_D)
    goes -= window * count
    # Merged sources stand behind their destination, by rank; those that stay, behind all lists.
    earlier = (goes[None, :] < goes[:, None]) | (
        (goes[None, :] == goes[:, None]) & (rank[None, :] < rank[:, None])
    )
    before = tl.sum((merged[None, :] & earlier).to(tl.int32), axis=1)
    others = tl.sum((alone[None, :] & (rank[None, :] < rank[:, None])).to(tl.int32), axis=1)
    lists = count + tl.sum(merged.to(tl.int32), axis=0)
    place = window * n + tl.where(merged, before + goes + 1, lists + others)
    before_dst = tl.sum((goes[:, None] < j[None, :]).to(tl.int32), axis=0)
    size_dst = 1 + tl.sum((goes[:, None] == j[None, :]).to(tl.int32), axis=0)
    place_dst = window * n + before_dst + j

    row = b // rows
    time = tl.load(timestep + row).to(tl.float32)
    src = src_token(s, offsets, time, key, row, h, w, windows, across, columns, count, sy, sx)
    dst = dst_token(d, offsets, time, key, row, h, w, windows, across, columns, count, sy, sx)
    slot += b * windows * n
    order += b * windows * n
    span += b * (windows * n - remove) * 2
    number = tl.where(merged, kept + window * count + goes, rank - remove)
    tl.store(slot + src, number.to(tl.int64), i < sources)
    tl.store(order + place, src, i < sources)
    tl.store(span + number * 2, place, alone)
    tl.store(span + number * 2 + 1, tl.full([BLOCK_S], 1, tl.int32), alone)
    tl.store(slot + dst, (kept + d).to(tl.int64), j < count)
    tl.store(order + place_dst, dst, j < count)
    tl.store(span + (kept + d) * 2, place_dst, j < count)
    tl.store(span + (kept + d) * 2 + 1, size_dst, j < count)


@triton.jit
def _rank(
    score,
    match,
    offsets,
    timestep,
    key,
    rows,
    slot,
    order,
    span,
    edge,
    edge_token,
    flag,
    h,
    w,
    windows,
    across,
    columns,
    count,
    remove,
    sy: tl.constexpr,
    sx: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Sorts the sources by similarity. Merged ones, by rank, go to `edge` and `edge_token`
    [B, remove], which say which dst each goes to; each other gets its own slot."""
    if flag is not None:
        if tl.load(flag) == 0:
            return
    b = tl.program_id(1).to(tl.int64)
    n = windows * h * w
    sources = n - windows * count
    kept = sources - remove
    score += b * sources
    s0 = tl.program_id(0) * BLOCK
    s = s0 + tl.arange(0, BLOCK)
    valid = s < sources
    own = tl.load(score + s, valid, other=0.0)
    rank = _place(score, own, s0, sources, BLOCK_J, DESCENDING=True)
    row = b // rows
    time = tl.load(timestep + row).to(tl.float32)
    token = src_token(s, offsets, time, key, row, h, w, windows, across, columns, count, sy, sx)
    dst = tl.load(match + b * sources + s, valid, other=0)
    merged = valid & (rank < remove)
    alone = valid & (rank >= remove)
    tl.store(edge + b * remove + rank, dst, merged)
    tl.store(edge_token + b * remove + rank, token, merged)
    number = tl.where(merged, kept + dst, rank - remove)
    tl.store(slot + b * n + token, number.to(tl.int64), valid)
    tl.store(order + b * n + number, token, alone)
    at = span + (b * (n - remove) + number) * 2
    tl.store(at, number, alone)
    tl.store(at + 1, tl.full([BLOCK], 1, tl.int32), alone)


@triton.jit
def _list_members(
    edge,
    edge_token,
    offsets,
    timestep,
    key,
    rows,
    slot,
    order,
    span,
    flag,
    h,
    w,
    windows,
    across,
    columns,
    count,
    remove,
    sy: tl.constexpr,
    sx: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Lists the members of each destination's slot: the destination, then what merges into it.

    The first programs place the merged tokens, the rest the destinations.
    """
    if flag is not None:
        if tl.load(flag) == 0:
            return
    b = tl.program_id(1).to(tl.int64)
    n = windows * h * w
    kept = n - windows * count - remove
    edge += b * remove
    order += b * n
    merging_programs = tl.cdiv(remove, BLOCK)
    if tl.program_id(0) < merging_programs:
        i0 = tl.program_id(0) * BLOCK
        i = i0 + tl.arange(0, BLOCK)
        dst = tl.load(edge + i, i < remove, other=0)
        token = tl.load(edge_token + b * remove + i, i < remove, other=0)
        before = _place(edge, dst, i0, remove, BLOCK_J, DESCENDING=False)
        tl.store(order + kept + before + dst + 1, token, i < remove)
    else:
        d = (tl.program_id(0) - merging_programs) * BLOCK + tl.arange(0, BLOCK)
        valid = d < windows * count
        before = _count(edge, d, 0, remove, BLOCK_J, DESCENDING=False, TIES=False)
        with_own = _count(edge, d, 0, remove, BLOCK_J, DESCENDING=False, TIES=True)
        row = b // rows
        time = tl.load(timestep + row).to(tl.float32)
        token = dst_token(d, offsets, time, key, row, h, w, windows, across, columns, count, sy, sx)
        first = kept + before + d
        tl.store(order + first, token, valid)
        tl.store(slot + b * n + token, (kept + d).to(tl.int64), valid)
        at = span + (b * (n - remove) + kept + d) * 2
        tl.store(at, first, valid)
        tl.store(at + 1, 1 + with_own - before, valid)


def rank_sources(
    score: Tensor,
    match: Tensor,
    cells: Cells,
    remove: int,
    destinations: dict[str, Any],
    plan: dict[str, Any],
    clock: Tensor | None,
    wrap_triton: Callable[[Any], Any],
) -> None:
    """Writes the plan that merges the `remove` sources with the best scores.

    Args:
        score, match: see `triton_search.search`.
        destinations: which tokens are, as arguments of kernels.
        plan: where to write slot, order and span.
    """
    batch, window = score.shape[0], cells.window
    common = {**destinations, **plan, "flag": clock, "remove": remove, "BLOCK_J": 128}
    scored = {"score": score, "match": match}
    if window.fits_one_program:
        wrap_triton(_plan_window)[(cells.windows, batch)](**scored, **common, **window_tile(window))
        return
    common["edge"] = match.new_empty(batch, remove)
    common["edge_token"] = match.new_empty(batch, remove)
    wrap_triton(_rank)[(blocks(cells.sources, 32), batch)](**scored, **common, BLOCK=32)
    programs = blocks(remove, 32) + blocks(cells.count, 32)
    wrap_triton(_list_members)[(programs, batch)](**common, BLOCK=32)
