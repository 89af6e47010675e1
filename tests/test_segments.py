"""Plans of segments and of frames, against plans of the parts they are made of."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import assert_same_plan, assert_valid
from torch import Tensor

from tomesd.kernels import Cells, Clock, Draw, Request
from tomesd.plan import MergePlan, join
from tomesd.segments import Segment, cut_grid, plan_segments, tokens_removed
from tomesd.selectors import SELECTORS
from tomesd.state import Call

CPU = torch.device("cpu")
every_selector = pytest.mark.parametrize("name", SELECTORS)
sides = st.integers(1, 7)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, tuple[Segment, ...], dict, tuple]:
    """A metric, the segments of a video, the draw, and the numbers the segments are made from:
    grid, cell, frames of a group, window."""
    grid = (draw(st.integers(1, 6)), draw(sides), draw(sides))
    cell = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    together, window = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    segments = cut_grid(
        grid,
        *cell,
        together,
        window,
        lambda cells: draw(st.integers(0, cells.sources // cells.windows)) * cells.windows,
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    batch = draw(st.integers(1, 3))
    metric = torch.randn(batch, sum(s.tokens for s in segments), 5, generator=generator)
    timestep = draw(st.sampled_from([torch.tensor(500), torch.rand(batch, generator=generator)]))
    drawn = draw(st.sampled_from([{}, {"timestep": timestep, "key": 77}]))
    return metric, segments, drawn, (grid, cell, together, window)


def plan_tokens(selector: Any, metric: Tensor, segments: Any, **how: Any) -> Any:
    """The plan of segments by a selector."""
    return plan_segments(
        metric, segments, lambda x, cells, remove, _: selector(x, cells, remove, **how)
    )


def group_of(segments: tuple[Segment, ...]) -> list[int]:
    """The number of the group that each token belongs to."""
    sizes = [segment.cells.tokens for segment in segments for _ in range(segment.groups)]
    return [number for number, size in enumerate(sizes) for _ in range(size)]


@every_selector
@given(problem=problems(), backend=st.sampled_from(["reference", "triton"]))
@settings(max_examples=40, deadline=None)
def test_each_token_has_a_slot_of_its_own_group(name, problem, backend):
    metric, segments, drawn, _ = problem
    plan = plan_tokens(SELECTORS[name], metric, segments, backend=backend, **drawn)
    assert_valid(plan, *metric.shape[:2], metric.shape[1] - tokens_removed(segments))
    group = torch.tensor(group_of(segments))
    of_slot = torch.stack([group[row] for row in plan.kept])
    assert torch.equal(of_slot.gather(1, plan.slot), group.expand_as(plan.slot))
    for b in range(metric.shape[0]):  # and as many of each group as of its like
        left = of_slot[b].bincount().tolist()
        assert left == [s.cells.tokens - s.remove for s in segments for _ in range(s.groups)]


def slow_fold(x: Tensor, first: int, frames: int, h: int, w: int) -> tuple[Tensor, list[int]]:
    """One group as an image, `[B, h * w * frames, C]`, and its tokens."""
    tokens = [
        (first + frame) * h * w + y * w + column
        for y in range(h)
        for column in range(w)
        for frame in range(frames)
    ]
    return x[:, tokens], tokens


@every_selector
@given(problem=problems())
@settings(max_examples=40, deadline=None)
def test_a_group_is_merged_as_an_image_whose_columns_are_its_frames(name, problem):
    metric, segments, drawn, ((_, h, w), _, _, _) = problem
    plan = plan_tokens(SELECTORS[name], metric, segments, **drawn)
    frame = slots_before = 0
    for part in segments:
        remove = part.remove
        for _ in range(part.groups):
            image, tokens = slow_fold(metric, frame, part.frames, h, w)
            slots = slice(slots_before, slots_before + len(tokens) - remove)
            if remove:
                alone = SELECTORS[name](image, part.cells, remove, **drawn)
                assert torch.equal(plan.slot[:, tokens] - slots_before, alone.slot)
                assert torch.equal(plan.kept[:, slots], torch.tensor(tokens)[alone.kept])
            else:  # numbered as they come, not place by place
                assert plan.kept[0, slots].tolist() == sorted(tokens)
            frame += part.frames
            slots_before += len(tokens) - remove


@every_selector
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_frames_on_their_own_have_the_plans_of_images(name, backend) -> None:
    metric = torch.randn(2, 3 * 48, 5, generator=torch.Generator().manual_seed(0))
    segments = cut_grid((3, 6, 8), 2, 2, window=4, removable=lambda _: 24)
    drawn = {"timestep": torch.tensor(7), "key": 3}
    assert [(part.groups, part.frames) for part in segments] == [(3, 1)]
    cells = Cells.of(6, 8, 2, 2, 4)
    how = {"backend": backend, **drawn}
    plan = plan_tokens(SELECTORS[name], metric, segments, **how)
    frames = [SELECTORS[name](frame, cells, 24, **how) for frame in metric.split(48, dim=1)]
    assert_same_plan(plan, join(frames))
    assert torch.equal(plan.kept, join(frames).kept)


@every_selector
@given(problem=problems())
@settings(max_examples=25, deadline=None)
def test_an_image_has_the_plan_it_had_before_there_were_videos(name, problem):
    metric, _, drawn, ((_, h, w), cell, together, window) = problem
    segments = cut_grid((1, h, w), *cell, together, window)
    cells = Cells.of(h, w, *cell, window)
    assert segments == (Segment(h * w, cells),)
    metric, remove = metric[:, : h * w], cells.sources // cells.windows * cells.windows
    if remove == 0:
        return
    segments = (replace(segments[0], remove=remove),)
    plan = plan_tokens(SELECTORS[name], metric, segments, **drawn)
    alone = SELECTORS[name](metric, cells, remove, **drawn)
    for one, other in zip((plan.slot, plan.order), (alone.slot, alone.order), strict=True):
        assert torch.equal(one, other)


@every_selector
@given(problem=problems(), random=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_an_item_does_not_depend_on_the_others_and_plans_are_reproducible(name, problem, random):
    metric, segments, drawn, _ = problem
    plan = plan_tokens(SELECTORS[name], metric, segments, **drawn)
    item = random.randrange(metric.shape[0])
    if drawn and drawn["timestep"].numel() > 1:
        drawn = {**drawn, "timestep": drawn["timestep"][item]}
    alone = plan_tokens(SELECTORS[name], metric[item : item + 1], segments, **drawn)
    assert torch.equal(alone.slot, plan.slot[[item]])
    assert torch.equal(alone.kept, plan.kept[[item]])


def test_times_that_do_not_fit_the_batch_fit_no_better_in_groups() -> None:
    """Groups of frames are images to a selector: as many times as images would look right."""
    times = torch.tensor([1.0, 2.0, 3.0, 4.0])
    call: Any = SimpleNamespace(timestep=times)
    assert torch.equal(Call.times(call, 2), times[:1])
    call.timestep = times[:2]
    assert torch.equal(Call.times(call, 4), times[:2])


@pytest.mark.parametrize(
    ("grid", "together", "parts"),
    [
        ((1, 6, 8), 4, [(1, 1)]),
        ((4, 6, 8), 1, [(4, 1)]),
        ((4, 6, 8), 2, [(2, 2)]),
        ((5, 6, 8), 2, [(1, 1), (2, 2)]),
        ((21, 6, 8), 4, [(1, 1), (5, 4)]),
        ((3, 6, 8), 4, [(3, 1)]),
    ],
)
def test_frames_that_are_left_over_come_first(grid, together, parts) -> None:
    segments = cut_grid(grid, 2, 2, together)
    assert [(part.groups, part.frames) for part in segments] == parts
    assert sum(part.tokens for part in segments) == grid[0] * grid[1] * grid[2]


def test_windows_keep_the_frames_of_a_place_together() -> None:
    """Nine columns of two frames could also be cut in the middle of a place."""
    (part,) = cut_grid((2, 4, 9), 2, 2, 2, window=4)
    assert (part.cells.across, part.cells.w, part.cells.sx) == (1, 18, 4)


def test_joined_segments_are_merged_each_by_its_own_plan() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5 + 24 + 16 + 3, 6, generator=generator)
    text, image, reference, padding = x.split([5, 24, 16, 3], dim=1)
    plans = [
        MergePlan.identity(2, 5, CPU),
        SELECTORS["bipartite"](image, Cells(4, 6, 2, 2), 10),
        SELECTORS["kmeans"](reference, Cells(4, 4, 2, 2), 8),
        MergePlan.identity(2, 3, CPU),
    ]
    whole = join(plans)
    assert_valid(whole, 2, 48, 48 - 18)
    parts = (text, image, reference, padding)
    expected = torch.cat([plan.merge(part) for plan, part in zip(plans, parts, strict=True)], dim=1)
    for whole.triton in (False, True):
        merged = whole.merge(x)
        torch.testing.assert_close(merged, expected)
        assert torch.equal(merged[:, :5], text) and torch.equal(merged[:, -3:], padding)
        assert torch.equal(whole.unmerge(merged)[:, :5], text)
    picked = [plan.pick(part) for plan, part in zip(plans, parts, strict=True)]
    assert torch.equal(whole.pick(x), torch.cat(picked, dim=1))


def test_a_joined_plan_is_shared_if_all_its_parts_are() -> None:
    alone = MergePlan.identity(2, 5, CPU)
    metric = torch.randn(2, 16, 3)
    grid, bipartite = (
        SELECTORS[name](metric, Cells(4, 4, 2, 2), 8) for name in ("grid", "bipartite")
    )
    assert join([alone, grid]).shared and not join([alone, grid, bipartite]).shared
    assert torch.equal(join([grid]).slot, grid.slot)


def test_the_parts_of_a_joined_plan_stay_as_they_are() -> None:
    plans = [MergePlan.identity(1, 4, CPU), MergePlan.identity(1, 4, CPU)]
    join(plans)
    assert plans[1].slot.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("name", ["bipartite", "grid"])
def test_a_plan_of_frames_and_text_compiles_into_one_graph(name) -> None:
    segments = cut_grid((5, 4, 6), 2, 2, 2, removable=lambda cells: cells.tokens // 2)

    def run(x: Tensor, time: Tensor) -> Tensor:
        plan = plan_tokens(SELECTORS[name], x[:, 7:], segments, timestep=time, key=1)
        plan = join([MergePlan.identity(x.shape[0], 7, x.device), plan])
        return plan.unmerge(plan.merge(x))

    x, time = torch.randn(2, 7 + 120, 8), torch.tensor([3.0])
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(x, time)
    torch.testing.assert_close(compiled, run(x, time))


@every_selector
def test_plans_of_frames_are_kept_from_step_to_step(name) -> None:
    segments = cut_grid((5, 4, 6), 2, 2, 2, removable=lambda cells: cells.tokens // 2)
    generator = torch.Generator().manual_seed(0)
    memory: dict[tuple[int, ...], tuple[MergePlan, Clock]] = {}

    def keep(*shape: int) -> tuple[MergePlan, Clock]:
        if shape not in memory:
            clock = Clock(torch.full((3,), float("-inf")), 2)
            memory[shape] = (MergePlan.empty(*shape, CPU, False), clock)
        return memory[shape]

    selector, slots = SELECTORS[name], []
    for time in (9.0, 8.0, 7.0):
        metric = torch.randn(2, 120, 5, generator=generator)
        how = {"timestep": torch.tensor(time), "key": 3}

        def select(metric: Tensor, cells: Cells, remove: int, _: int, how: Any = how) -> MergePlan:
            if selector.fixed:
                return selector(metric, cells, remove, **how)
            plan, clock = keep(metric.shape[0], cells.tokens, cells.tokens - remove)
            draw = Draw(how["timestep"], how["key"])
            selector.write(plan, metric, Request(cells, remove, draw, clock))
            return plan

        plan = plan_segments(metric, segments, select)
        new = plan_tokens(SELECTORS[name], metric, segments, **how)
        assert_valid(plan, 2, 120, 60)
        slots.append((plan.slot.clone(), new.slot))
    kept = [torch.equal(before[0], after[0]) for before, after in itertools.pairwise(slots)]
    assert kept == ([True, True] if SELECTORS[name].fixed else [True, False])
    assert torch.equal(*slots[0]) and torch.equal(*slots[2])
    assert sorted(memory) == ([] if SELECTORS[name].fixed else [(2, 24, 12), (4, 48, 24)])


@every_selector
def test_tokens_may_lie_at_another_place_in_each_sequence(name) -> None:
    """A sequence with prompts of different lengths has the plans of its items, one by one."""

    def item_of(plan: MergePlan, k: int) -> MergePlan:
        return MergePlan(plan.slot[[k]], plan.order[[k]], plan.span[[k]])

    generator = torch.Generator().manual_seed(0)
    metric = torch.randn(3, 24, 5, generator=generator)
    plan = SELECTORS[name](metric, Cells(4, 6, 2, 2), 12)
    start, length = torch.tensor([0, 5, 7]), 31
    whole = plan.placed(start, length)
    assert_valid(whole, 3, length, length - 12)
    for k, first in enumerate(start.tolist()):
        assert_same_plan(item_of(whole, k), item_of(plan, k).placed(first, length))
