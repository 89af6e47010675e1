"""Problems for selectors, and slow and obvious ways to look at plans."""

from collections.abc import Iterable

import torch
from hypothesis import strategies as st
from torch import Tensor

from tomesd.kernels import Cells, draw_offsets
from tomesd.plan import MergePlan

sides, strides = st.integers(1, 12), st.integers(1, 5)
cells_of = st.builds(Cells.of, sides, sides, strides, strides, st.integers(0, 6))

Problem = tuple[Tensor, Cells, int, dict]


@st.composite
def problems(draw: st.DrawFn, even: bool = True, dtype: torch.dtype = torch.float64) -> Problem:
    """A metric, cells with something to remove, how much, and what the draw depends on.

    Args:
        even: as much from each window.
    """
    cells = draw(cells_of.filter(lambda c: c.sources > 0))
    batch = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    metric = torch.randn(batch, cells.tokens, 5, generator=generator, dtype=dtype)
    step = cells.windows if even else 1
    remove = draw(st.integers(1, cells.sources // step)) * step
    times = draw(st.sampled_from([torch.tensor(500), torch.rand(batch, generator=generator)]))
    key = draw(st.sampled_from([-1, 77, 2**30]))
    return metric, cells, remove, draw(st.sampled_from([{}, {"timestep": times, "key": key}]))


def of_items(drawn: dict, items: Iterable[int], batch: int) -> dict:
    """What the draw depends on where a batch is made of these items of another."""
    times = drawn.get("timestep")
    if times is None or times.numel() != batch or times.ndim == 0:
        return drawn
    return {**drawn, "timestep": times[list(items)]}


def windows_of(cells: Cells) -> list[list[int]]:
    """The tokens of each window."""
    one = cells.window
    corners = [divmod(number, cells.across) for number in range(cells.windows)]
    return [
        [(top * one.h + y) * cells.w + left * one.w + x for y in range(one.h) for x in range(one.w)]
        for top, left in corners
    ]


def destinations_of(cells: Cells, item: int, drawn: dict) -> list[list[int]]:
    """The token of each cell that was drawn, or its top left one, by window."""
    offsets = [0] * cells.count
    if drawn.get("key", -1) >= 0:
        times = drawn["timestep"].reshape(-1)
        time = times[item % len(times)].reshape(1)
        offsets = draw_offsets(cells.count, cells.choices, drawn["key"], time)[0].tolist()
    one, found = cells.window, []
    for window, tokens in enumerate(windows_of(cells)):
        found.append([])
        for cell, offset in enumerate(offsets[window * one.count : (window + 1) * one.count]):
            (row, column), (y, x) = divmod(cell, one.w // one.sx), divmod(offset, one.sx)
            found[-1].append(tokens[(row * one.sy + y) * one.w + column * one.sx + x])
    return found


def groups_of(plan: MergePlan) -> list[set[frozenset[int]]]:
    """The tokens of each item that are in a slot together."""
    batches = []
    for row in plan.slot.tolist():
        members: dict[int, set[int]] = {}
        for token, slot in enumerate(row):
            members.setdefault(slot, set()).add(token)
        batches.append({frozenset(group) for group in members.values()})
    return batches


def listed_of(plan: MergePlan) -> list[list[list[int]]]:
    """The tokens listed for each slot of each item."""
    return [
        [order[first : first + size] for first, size in spans]
        for order, spans in zip(plan.order.tolist(), plan.span.tolist(), strict=True)
    ]


def assert_valid(plan: MergePlan, batch: int, n: int, slots: int) -> None:
    """Every token is in one slot, every slot lists its tokens, and the kernels can read it."""
    assert plan.slot.shape == plan.order.shape == (batch, n)
    assert plan.span.shape == (batch, slots, 2)
    assert (plan.slot.dtype, plan.order.dtype) == (torch.int64, torch.int32)
    assert plan.span.dtype == torch.int32
    assert all(part.is_contiguous() for part in plan.lists)
    for slot, order, listed in zip(
        plan.slot.tolist(), plan.order.tolist(), listed_of(plan), strict=True
    ):
        assert sorted(order) == list(range(n))
        for m, tokens in enumerate(listed):
            assert tokens and sorted(tokens) == [token for token, s in enumerate(slot) if s == m]


def assert_same_plan(one: MergePlan, other: MergePlan) -> None:
    """Lists may stand anywhere, and have any order behind the representative."""
    assert torch.equal(one.slot, other.slot)
    assert torch.equal(one.kept, other.kept)
    for plan in (one, other):
        assert_valid(plan, *plan.slot.shape, plan.span.shape[1])
