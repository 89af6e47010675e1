"""The k-means and the grid selector, against slow and obvious implementations and pictures."""

import copy
import itertools
from collections.abc import Callable
from typing import get_args
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import (
    assert_valid,
    destinations_of,
    groups_of,
    of_items,
    problems,
    windows_of,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tomesd
from tomesd import kernels, selectors
from tomesd.kernels import Cells, Draw, Request, draw_key, list_members, reference
from tomesd.plan import MergePlan
from tomesd.selectors import SELECTORS, KMeans, cluster, grid, kmeans

CPU = torch.device("cpu")

Selector = Callable[..., MergePlan]
both = pytest.mark.parametrize("selector", [kmeans, grid], ids=["kmeans", "grid"])


@both
@given(problem=problems())
@settings(max_examples=60, deadline=None)
def test_every_slot_is_used_their_number_is_exact_and_lists_agree(selector, problem):
    metric, cells, remove, drawn = problem
    plan = selector(metric, cells, remove, **drawn)
    assert_valid(plan, *metric.shape[:2], cells.tokens - remove)


@both
@given(problem=problems(), random=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_plans_are_reproducible_and_do_not_depend_on_the_batch(selector, problem, random):
    metric, cells, remove, drawn = problem
    plan = selector(metric, cells, remove, **drawn)
    assert torch.equal(selector(metric.clone(), cells, remove, **drawn).slot, plan.slot)
    pick = random.sample(range(metric.shape[0]), random.randint(1, metric.shape[0]))
    drawn = of_items(drawn, pick, metric.shape[0])
    assert torch.equal(selector(metric[pick], cells, remove, **drawn).slot, plan.slot[pick])


# To the compiler, k-means is one operation; of the grid, it sees everything.
@pytest.mark.parametrize(
    ("selector", "cells", "compiler"),
    [
        (kmeans, Cells(8, 12, 2, 2, 2, 3), "aot_eager"),
        (kmeans, Cells(7, 9, 3, 2), "aot_eager"),
        (grid, Cells(8, 12, 2, 2, 2, 3), "aot_eager"),
        (grid, Cells(7, 9, 3, 2), "inductor"),
    ],
)
def test_compiles_into_one_graph_with_the_same_result(
    selector: Selector, cells: Cells, compiler: str
) -> None:
    metric = torch.randn(2, cells.tokens, 6, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, cells.tokens, 3, generator=torch.Generator().manual_seed(1))
    remove = cells.removable(0.5)

    def merge(metric: Tensor, x: Tensor, timestep: Tensor) -> tuple[Tensor, ...]:
        plan = selector(metric, cells, remove, timestep=timestep, key=5)
        return plan.slot, plan.order, plan.span, plan.unmerge(plan.merge(x))

    compiled = torch.compile(merge, fullgraph=True, backend=compiler)
    for time in (3, 4):
        expected = merge(metric, x, torch.tensor(time))
        for got, want in zip(compiled(metric, x, torch.tensor(time)), expected, strict=True):
            torch.testing.assert_close(got, want)


@both
def test_gradients_pass_through_the_merge_and_not_through_the_choice(selector) -> None:
    cells = Cells(4, 4, 2, 2)
    x = torch.randn(1, 16, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plan = selector(x, cells, 8)
    assert not plan.slot.requires_grad
    plan.merge(x)[0, 0].sum().backward()
    assert x.grad is not None
    assert x.grad[0].ne(0).any(1).tolist() == plan.slot[0].eq(0).tolist()


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_triton_backend_makes_the_same_plan(selector, dtype: torch.dtype) -> None:
    cells = Cells(8, 8, 2, 2, 2, 2)
    # Sums of few bits are exact in every order.
    metric = torch.randint(-1, 2, (2, 64, 4), generator=torch.Generator().manual_seed(3)).to(dtype)
    plans = [selector(metric, cells, 32, backend=name) for name in ("reference", "triton")]
    assert [plan.triton for plan in plans] == [False, True]
    assert torch.equal(plans[0].slot, plans[1].slot)
    x = torch.randn(2, 64, 4).to(dtype)
    torch.testing.assert_close(plans[0].merge(x), plans[1].merge(x))


# k-means


def lattice(row: int, column: int) -> float:
    """When a place has its turn among those that are spread evenly."""
    plastic = 1.3247179572447460
    return (row / plastic + column / plastic**2) % 1


def slow_kmeans(unit: np.ndarray, seeds: list[int], iterations: int) -> list[int]:
    """Cluster of each token of unit [n, C]; the centre of a cluster is the mean's direction."""
    centres = [unit[seed] for seed in seeds]
    labels = [0] * len(unit)
    for _ in range(iterations):
        for n, token in enumerate(unit):
            if n in seeds:
                labels[n] = seeds.index(n)
            else:
                labels[n] = int(np.argmax([token @ centre for centre in centres]))
        for m in range(len(seeds)):
            mean = np.mean([unit[n] for n in range(len(unit)) if labels[n] == m], axis=0)
            centres[m] = mean / np.linalg.norm(mean)
    return labels


def slow_groups(metric: Tensor, cells: Cells, remove: int, drawn: dict) -> list[set]:
    """The clusters of each image as sets of token numbers, window by window."""
    batches = []
    for b, image in enumerate(metric.numpy()):
        groups = set()
        destinations = destinations_of(cells, b, drawn)
        for tokens, seeds in zip(windows_of(cells), destinations, strict=True):
            rest = [token for token in tokens if token not in seeds]
            rest.sort(key=lambda token: lattice(*divmod(token, cells.w)))
            seeds += rest[: len(tokens) - remove // cells.windows - len(seeds)]
            unit = image[tokens] / np.linalg.norm(image[tokens], axis=1, keepdims=True)
            labels = slow_kmeans(unit, [tokens.index(seed) for seed in seeds], KMeans.rounds)
            for m in range(len(seeds)):
                groups.add(frozenset(tokens[n] for n in range(len(tokens)) if labels[n] == m))
        batches.append(groups)
    return batches


@given(problems())
@settings(max_examples=60, deadline=None)
def test_kmeans_makes_the_clusters_of_the_slow_implementation(problem):
    metric, cells, remove, drawn = problem
    plan = kmeans(metric, cells, remove, **drawn)
    assert groups_of(plan) == slow_groups(*problem)


@given(problems())
@settings(max_examples=30, deadline=None)
def test_clusters_stay_inside_their_windows(problem):
    metric, cells, remove, drawn = problem
    y, x = np.divmod(np.arange(cells.tokens), cells.w)
    one = cells.window
    window = (y // one.h) * cells.across + x // one.w
    per_window = (cells.tokens - remove) // cells.windows
    for slot in kmeans(metric, cells, remove, **drawn).slot.numpy():
        assert np.array_equal(slot // per_window, window)


def unit_tokens(batch: int, n: int, channels: int, seed: int) -> Tensor:
    x = torch.randn(batch, n, channels, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(x.double(), dim=-1)


def cohesion(tokens: Tensor, label: Tensor, clusters: int) -> Tensor:
    """Sum of the cosines of all tokens to the centres of their clusters, `[B]`."""
    mean = reference.slot_mean(tokens, list_members(label, clusters))
    centres = torch.nn.functional.normalize(mean, dim=-1)
    return (tokens * reference.slot_gather(centres, label)).sum((1, 2))


@pytest.mark.parametrize("seed", range(5))
def test_more_iterations_give_tighter_clusters(seed: int) -> None:
    tokens = unit_tokens(3, 200, 6, seed)
    found = [cohesion(tokens, cluster(tokens, 20, i), 20) for i in range(1, 9)]
    for before, after in itertools.pairwise(found):
        assert (after >= before - 1e-9).all()
    assert (found[2] > found[0] + 1).all()  # and not because nothing happens


def test_a_picture_of_flat_cells_loses_nothing() -> None:
    """Copies end in one cluster: with each cell of one colour, merging is without loss."""
    colours = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    pick = torch.randint(5, (2, 4, 6), generator=torch.Generator().manual_seed(2))
    x = colours[pick].repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2)
    for cells in (Cells(8, 12, 2, 2), Cells(8, 12, 2, 2, 2, 3)):
        for remove in (cells.windows, cells.removable(0.5), cells.sources):
            plan = kmeans(x, cells, remove, timestep=torch.tensor(9), key=draw_key(0, 1))
            torch.testing.assert_close(plan.unmerge(plan.merge(x)), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_unusable_tokens_get_a_slot_and_spoil_no_cluster(bad: float, dtype: torch.dtype) -> None:
    cells = Cells(8, 8, 2, 2)
    metric = 3e4 * torch.nn.functional.normalize(torch.randn(1, 64, 6), dim=-1).to(dtype)
    metric[0, [0, 5, 17]] = bad  # the first is a seed, the others are not
    plan = kmeans(metric, cells, 32)
    assert plan.size.min() >= 1 and plan.size.sum() == 64
    # They pull no centre anywhere: with zeros in their place the clusters are the same.
    clean = copy.deepcopy(metric)
    clean[0, [0, 5, 17]] = 0
    assert torch.equal(plan.slot, kmeans(clean, cells, 32).slot)


def test_the_draw_follows_timestep_and_key_alone() -> None:
    cells = Cells(8, 8, 2, 2)
    metric = torch.randn(1, 64, 4, generator=torch.Generator().manual_seed(0))

    def slots(time: float, key: int) -> Tensor:
        return kmeans(metric, cells, 48, timestep=torch.tensor(time), key=key).slot

    state = torch.get_rng_state()
    assert torch.equal(slots(1.0, 3), slots(1, 3))
    assert not torch.equal(slots(1, 3), slots(2, 3))
    assert not torch.equal(slots(1, 3), slots(1, 4))
    assert torch.equal(slots(1, -1), slots(2, -1))
    assert torch.equal(torch.get_rng_state(), state)


def test_kmeans_never_holds_the_scores_of_all_tokens() -> None:
    """Those of this grid would be 16 MiB; its tokens are 1 MiB, and so is a tile."""
    cells = Cells(64, 64, 2, 2)
    metric = torch.randn(1, cells.tokens, 64)
    with torch.profiler.profile(profile_memory=True) as profile:
        kmeans(metric, cells, cells.removable(0.5))
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 2**18 < largest < 2**22


# grid


def picture(cells: Cells, remove: int) -> str:
    """The grid with a letter for each slot of several tokens and a dot for tokens on their own."""
    plan = grid(torch.empty(1, cells.tokens, 0), cells, remove)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    names = [next(letters) if size > 1 else "." for size in plan.size[0].tolist()]
    rows = plan.slot.view(cells.h, cells.w).tolist()
    return "\n".join("".join(names[slot] for slot in row) for row in rows)


ALL = """
aabbcc.
aabbcc.
ddeeff.
ddeeff.
.......
"""
WIDE = """
aaabbb
cccddd
"""
ONE_AND_A_PART = """
aa..bb
aa..b.
......
......
"""
TWO_THIRDS = """
aabbcc
aabbcc
ddee..
d.ee..
"""
EDGES_TOO = """
aabbb
aabbb
ccddd
ccddd
ccddd
"""


@pytest.mark.parametrize(
    ("cells", "remove", "drawing"),
    [
        (Cells(5, 7, 2, 2), 18, ALL),
        (Cells(2, 6, 1, 3), 8, WIDE),
        (Cells(4, 6, 2, 2), 5, ONE_AND_A_PART),
        (Cells(4, 6, 2, 2), 14, TWO_THIRDS),
        (Cells(5, 5, 2, 2), 21, EDGES_TOO),
    ],
)
def test_the_grid_is_what_the_picture_shows(cells: Cells, remove: int, drawing: str) -> None:
    assert picture(cells, remove) == drawing.strip()


@given(problems())
@settings(max_examples=60, deadline=None)
def test_grid_merges_whole_cells_but_one_and_ignores_all_else(problem):
    metric, cells, remove, drawn = problem
    whole = Cells(cells.h, cells.w, cells.sy, cells.sx)
    full = whole.count * (whole.choices - 1)
    plan = grid(metric, cells, remove, **drawn)
    if remove <= whole.sources:
        assert torch.equal(plan.slot, grid(torch.zeros_like(metric), whole, remove).slot)
    if remove <= full:
        sizes = plan.size[0].tolist()
        assert set(sizes) <= {1, whole.choices, 1 + remove % max(1, whole.choices - 1)}
        assert sizes.count(whole.choices) == remove // (whole.choices - 1)
        y, x = np.divmod(np.arange(cells.tokens), cells.w)
        cell = (y // cells.sy) * cells.w + x // cells.sx
        for group in groups_of(plan)[0]:
            assert len({cell[n] for n in group}) == 1


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5, 0.6])
def test_grid_spreads_the_merged_cells_evenly(ratio: float) -> None:
    """No part of a quarter of each side has many more or fewer of them than its share."""
    cells = Cells(64, 64, 2, 2)
    remove = cells.removable(ratio)
    plan = grid(torch.empty(1, cells.tokens, 0), cells, remove)
    gone = (plan.size[0][plan.slot[0]] > 1).view(64, 64)[::2, ::2].double()
    share = remove / 3 / cells.count
    found = torch.nn.functional.avg_pool2d(gone[None], 8)
    assert (found - share).abs().max() < 0.08


def test_a_grid_plan_is_made_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on nothing else; not by who compiles or captures, though, nor for shapes alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    cells, x = Cells(8, 8, 2, 2), torch.randn(2, 64, 3)
    with torch.inference_mode():
        first = grid(torch.randn(2, 64, 7), cells, 20)
    again = grid(x, cells, 20, timestep=torch.tensor(5), key=1)
    assert again.slot is first.slot and again.span is first.span
    x.requires_grad_()
    again.unmerge(again.merge(x)).sum().backward()  # nothing of it belongs to inference mode
    for other in (grid(x[:1], cells, 20), grid(x, cells, 21), grid(x, Cells(8, 8, 2, 4), 20)):
        assert other.slot is not first.slot
    with FakeTensorMode() as mode:
        fake = grid(mode.from_tensor(x), cells, 22)
    assert grid(x, cells, 22).slot.tolist() and type(fake.slot) is not Tensor


def test_known_grids_are_few() -> None:
    for remove in range(1, 40):
        grid(torch.empty(1, 64, 0), Cells(8, 8, 2, 2), remove)
    info = selectors._known_grid.cache_info()
    assert info.currsize == info.maxsize == 16


# What the rest of the library has to know about them.


def test_settings_name_all_selectors() -> None:
    assert get_args(tomesd.allowed.Selector) == tuple(SELECTORS)
    assert all(selector.name == name for name, selector in SELECTORS.items())


@given(problem=problems())
@settings(max_examples=20, deadline=None)
def test_fixed_plans_are_those_that_depend_on_shapes_alone(problem):
    metric, cells, remove, _ = problem
    other = torch.randn_like(metric)
    for selector in SELECTORS.values():
        plans = [selector(x, cells, remove) for x in (metric, other)]
        assert all(plan.shared == selector.fixed for plan in plans)
        if selector.fixed:
            assert torch.equal(plans[0].slot, plans[1].slot)
            written = MergePlan.empty(*metric.shape[:2], cells.tokens - remove, CPU, False)
            selector.write(written, metric, Request(cells, remove, Draw()))
            assert torch.equal(written.slot, plans[0].slot) and written.shared


def test_selectors_that_can_protect_merge_tokens_without_a_direction_last() -> None:
    metric = torch.randn(2, 64, 6, generator=torch.Generator().manual_seed(0))
    metric[:, ::5] = 0
    for selector in SELECTORS.values():
        plan = selector(metric, Cells(8, 8, 2, 2), 32)
        size = plan.size.gather(1, plan.slot)[:, ::5]
        destinations = set(range(0, 64, 2)) - {y * 8 + x for y in range(1, 8, 2) for x in range(8)}
        sources = [k for k, token in enumerate(range(0, 64, 5)) if token not in destinations]
        assert bool(size[:, sources].eq(1).all()) == (selector.name == "bipartite")


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.7])
def test_the_tokens_to_remove_suit_the_selector(ratio: float) -> None:
    cells = Cells(12, 12, 2, 2, 3, 3)
    for selector in SELECTORS.values():
        remove = cells.removable(ratio, even=selector.even_windows)
        plan = selector(torch.randn(1, 144, 5), cells, remove)
        assert plan.size.shape[1] == 144 - remove
        assert not selector.even_windows or remove % cells.windows == 0


@pytest.mark.parametrize("window", [0, 4])
def test_comparisons_are_those_that_are_made(window: int) -> None:
    """As many as the multiplications of matrices have results."""
    cells, channels = Cells.of(8, 12, 2, 2, window), 5
    remove = 8 * cells.windows
    for selector in SELECTORS.values():
        with (
            FlopCounterMode(display=False) as counter,
            mock.patch.object(kernels, "_match_tokens", lambda *a: reference.match_tokens(*a[:-1])),
            mock.patch.object(selectors, "_write_clusters", selectors._cluster_tokens),
        ):
            selector(torch.randn(2, 96, channels), cells, remove)
        made = counter.get_total_flops() // (2 * 2 * channels)
        assert selector.comparisons(cells, remove) == made
