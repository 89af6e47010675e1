"""Triton kernels that choose the sources to merge and list the members of every slot.

All members of a slot are in one window: where a program can hold it, it lists them by itself.
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

from .request import Lists, Request
from .triton_cells import cells_in, dst_token, src_token, window_tile
from .triton_launch import blocks, jit_at_any_step, power_of_2

_NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _keys(score, i, sources):
    """Integers in the order of the scores i; beyond the last, less than any."""
    value = tl.load(score + i, i < sources, other=0.0)
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # there is a negative zero
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(i < sources, key, -0x7FFFFFFF)


@triton.jit
def _choose(score, match, flag, sources, remove, BLOCK: tl.constexpr):
    """Replaces the match of each source that is not merged by the number of its slot.

    match [B, S]: destination d of a merged source becomes -1 - d. One program looks for the score
    that as many are above as merge, by halving the range of scores again and again. Of equal ones,
    the first are merged.
    """
    if flag is not None:
        if tl.load(flag) == 0:
            return
    b = tl.program_id(0).to(tl.int64)
    score += b * sources
    match += b * sources
    at = tl.arange(0, BLOCK)
    low, high = 0x7FFFFFFF, -0x7FFFFFFF
    for i0 in range(0, sources, BLOCK):
        key = _keys(score, i0 + at, sources)
        high = tl.maximum(high, tl.max(key, axis=0))
        low = tl.minimum(low, tl.min(tl.where(i0 + at < sources, key, 0x7FFFFFFF), axis=0))
    high = tl.where(remove == sources, low, high)  # all of them merge
    # Always at least `remove` keys are `low` or above. Cosines are so small that nothing overflows.
    while low < high:
        middle = high - (high - low) // 2
        count = 0
        for i0 in range(0, sources, BLOCK):
            count += tl.sum((_keys(score, i0 + at, sources) >= middle).to(tl.int32), axis=0)
        low = tl.where(count >= remove, middle, low)
        high = tl.where(count > remove, high, tl.where(count == remove, middle, middle - 1))
    above = 0
    for i0 in range(0, sources, BLOCK):
        above += tl.sum((_keys(score, i0 + at, sources) > low).to(tl.int32), axis=0)
    equal_before, kept_before = 0, 0
    for i0 in range(0, sources, BLOCK):
        i = i0 + at
        key = _keys(score, i, sources)
        equal = (key == low).to(tl.int32)
        place = equal_before + tl.cumsum(equal, axis=0)
        merged = (key > low) | ((key == low) & (above + place <= remove))
        kept = (~merged & (i < sources)).to(tl.int32)
        number = kept_before + tl.cumsum(kept, axis=0) - 1
        dst = tl.load(match + i, i < sources, other=0)
        tl.store(match + i, tl.where(merged, -1 - dst, number), i < sources)
        equal_before += tl.sum(equal, axis=0)
        kept_before += tl.sum(kept, axis=0)


@triton.jit
def _put(slot, order, span, token, own, place, valid, size, heads):
    """Notes the slots of tokens and their places in the lists; heads begin a list of that size."""
    tl.store(slot + token, own.to(tl.int64), valid)
    tl.store(order + place, token, valid)
    tl.store(span + own * 2, place, heads)
    tl.store(span + own * 2 + 1, size, heads)


@jit_at_any_step
def _list_window(
    chosen, timestep, key, rows, slot, order, span, flag, h, w, windows, across, remove,
    sy: tl.constexpr, sx: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """slot, order [B, N] and span [B, M, 2]: the part of one window; see `MergePlan`.

    In `order`, each window has its part, whatever is merged in others: first each destination with
    what merges into it, then the other sources. Where nothing is chosen, all sources merge, and the
    window has one destination.
    """
    if flag is not None:
        if tl.load(flag) == 0:
            return
    window = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    n = h * w
    count = cells_in(h, w, sy, sx)
    sources = n - count
    kept = windows * sources - remove
    i = tl.arange(0, BLOCK_S)
    j = tl.arange(0, BLOCK_D)
    s, d = window * sources + i, window * count + j
    if chosen is None:
        number = tl.zeros([BLOCK_S], tl.int32) - 1 - window
    else:
        number = tl.load(chosen + b * windows * sources + s, i < sources, other=0)
    merged = (i < sources) & (number < 0)
    alone = (i < sources) & (number >= 0)
    goes = tl.where(merged, -1 - number - window * count, BLOCK_D)
    # Places in the lists: the others stand behind all of them.
    earlier = (goes[None, :] < goes[:, None]) | (
        (goes[None, :] == goes[:, None]) & (i[None, :] < i[:, None])
    )
    before = tl.sum(((i < sources)[None, :] & earlier).to(tl.int32), axis=1)
    place = window * n + before + tl.where(merged, goes + 1, count)
    before_dst = tl.sum((goes[:, None] < j[None, :]).to(tl.int32), axis=0)
    size_dst = 1 + tl.sum((goes[:, None] == j[None, :]).to(tl.int32), axis=0)
    place_dst = window * n + before_dst + j

    row = b // rows
    time = tl.load(timestep + row).to(tl.float32)
    src = src_token(s, time, key, h, w, across, sy, sx)
    dst = dst_token(d, time, key, h, w, across, sy, sx)
    slot += b * windows * n
    order += b * windows * n
    span += b * (windows * n - remove) * 2
    own = tl.where(merged, kept + window * count + goes, number)
    one = tl.full([BLOCK_S], 1, tl.int32)
    _put(slot, order, span, src, own, place, i < sources, one, alone)
    _put(slot, order, span, dst, kept + d, place_dst, j < count, size_dst, j < count)


@triton.jit
def _goes(chosen, i, sources):
    """The destinations of sources i, larger than any for those that are not merged."""
    number = tl.load(chosen + i, i < sources, other=0)
    return tl.where(number < 0, -1 - number, _NOWHERE)


@jit_at_any_step
def _list_members(
    chosen, timestep, key, rows, slot, order, span, flag, h, w, windows, across, remove,
    sy: tl.constexpr, sx: tl.constexpr, BLOCK: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """As `_list_window`, for some sources or destinations of an image, which stand behind the slots
    of one source each. The first programs place the sources."""
    if flag is not None:
        if tl.load(flag) == 0:
            return
    b = tl.program_id(1).to(tl.int64)
    n = windows * h * w
    count = windows * cells_in(h, w, sy, sx)
    sources = n - count
    kept = sources - remove
    chosen += b * sources
    slot += b * n
    order += b * n
    span += b * (n - remove) * 2
    row = b // rows
    time = tl.load(timestep + row).to(tl.float32)
    of_sources = tl.cdiv(sources, BLOCK)
    before = tl.zeros([BLOCK, BLOCK_J], tl.int32)
    if tl.program_id(0) < of_sources:
        s0 = tl.program_id(0) * BLOCK
        s = s0 + tl.arange(0, BLOCK)
        goes = _goes(chosen, s, sources)
        # Of those that go to the same, the first stand first.
        for j0 in range(0, s0, BLOCK_J):
            other = _goes(chosen, j0 + tl.arange(0, BLOCK_J), s0)
            before += (other[None, :] <= goes[:, None]).to(tl.int32)
        for j0 in range(s0, sources, BLOCK_J):
            other = _goes(chosen, j0 + tl.arange(0, BLOCK_J), sources)
            before += (other[None, :] < goes[:, None]).to(tl.int32)
        tied = (goes[None, :] == goes[:, None]) & (s[None, :] < s[:, None])
        earlier = tl.sum(before, axis=1) + tl.sum(tied.to(tl.int32), axis=1)
        token = src_token(s, time, key, h, w, across, sy, sx)
        merged = (s < sources) & (goes < _NOWHERE)
        alone = (s < sources) & (goes == _NOWHERE)
        number = tl.load(chosen + s, s < sources, other=0)
        own = tl.where(merged, kept + goes, number)
        place = tl.where(merged, kept + earlier + goes + 1, number)
        one = tl.full([BLOCK], 1, tl.int32)
        _put(slot, order, span, token, own, place, s < sources, one, alone)
    else:
        d = (tl.program_id(0) - of_sources) * BLOCK + tl.arange(0, BLOCK)
        members = tl.zeros([BLOCK, BLOCK_J], tl.int32)
        for j0 in range(0, sources, BLOCK_J):
            other = _goes(chosen, j0 + tl.arange(0, BLOCK_J), sources)[None, :]
            before += (other < d[:, None]).to(tl.int32)
            members += (other == d[:, None]).to(tl.int32)
        token = dst_token(d, time, key, h, w, across, sy, sx)
        place = kept + tl.sum(before, axis=1) + d
        size = 1 + tl.sum(members, axis=1)
        _put(slot, order, span, token, kept + d, place, d < count, size, d < count)


def choose_sources(
    score: Tensor,
    match: Tensor,
    request: Request,
    flag: Tensor | None,
    wrap_triton: Callable[[Any], Any],
) -> Tensor:
    """Decides which `request.remove` sources merge: those with the best scores.

    Args:
        score, match: see `triton_search.search`; the matches are written over.
        flag: on the device, zero if the plan is still fresh.

    Returns:
        For each source the number of its slot, or -1 - d if it merges into destination d, `[B, S]`.
    """
    batch, sources = score.shape
    block = min(power_of_2(sources), 8192)
    wrap_triton(_choose)[(batch,)](
        score, match, flag, sources, request.remove, BLOCK=block, num_warps=8, num_stages=1
    )
    return match


def list_slots(
    chosen: Tensor | None,
    request: Request,
    lists: Lists,
    common: dict[str, Any],
    wrap_triton: Callable[[Any], Any],
) -> None:
    """Writes the plan.

    Args:
        chosen: from `choose_sources`; None: the request is settled, and windows are small.
        lists: where to write it.
        common: arguments that all kernels of the matching take.
    """
    cells, window = request.cells, request.cells.window
    slot, order, span = lists
    common = common | {"chosen": chosen, "slot": slot, "order": order, "span": span}
    common["remove"] = request.remove
    batch = slot.shape[0]
    if window.fits_one_program:
        grid = (cells.windows, batch)
        wrap_triton(_list_window)[grid](**common, **window_tile(window))
    else:
        grid = (blocks(cells.sources, 32) + blocks(cells.count, 32), batch)
        wrap_triton(_list_members)[grid](**common, BLOCK=32, BLOCK_J=128)
