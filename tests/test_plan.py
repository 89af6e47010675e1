"""Properties of plans and of the bipartite selector, against a slow and obvious implementation."""

from functools import partial

import plan_problems
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import cells_of, destinations_of, groups_of, of_items, windows_of
from torch import Tensor

from tomesd import Settings
from tomesd.kernels import Cells, draw_key, draw_offsets
from tomesd.plan import MergePlan
from tomesd.selectors import bipartite, removable

problems = partial(plan_problems.problems, even=False)


def slow_slots(metric: Tensor, cells: Cells, remove: int, drawn: dict) -> list[set[frozenset]]:
    """The groups of tokens of each image, found with loops, as the paper describes them."""
    batches = []
    for b in range(metric.shape[0]):
        best: dict[int, tuple[float, int]] = {}
        groups: dict[int, set[int]] = {}
        destinations = destinations_of(cells, b, drawn)
        for tokens, dst in zip(windows_of(cells), destinations, strict=True):
            groups |= {d: {d} for d in dst}
            for s in set(tokens) - set(dst):
                similarity = [
                    torch.nn.functional.cosine_similarity(metric[b, s], metric[b, d], dim=0).item()
                    for d in dst
                ]
                best[s] = max(zip(similarity, dst, strict=True))
        ranked = sorted(best, key=lambda s: best[s][0], reverse=True)
        for s in ranked[:remove]:
            groups[best[s][1]].add(s)
        alone = {frozenset({s}) for s in ranked[remove:]}
        batches.append({frozenset(g) for g in groups.values()} | alone)
    return batches


def plan_of(metric: Tensor, cells: Cells, remove: int, drawn: dict) -> MergePlan:
    return bipartite(metric, cells, remove, **drawn)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_bipartite_makes_the_groups_of_the_slow_implementation(problem):
    assert groups_of(plan_of(*problem)) == slow_slots(*problem)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_every_slot_is_used_and_their_number_is_exact(problem):
    metric, _, remove, _ = problem
    plan = plan_of(*problem)
    slots = metric.shape[1] - remove
    assert plan.slot.shape == metric.shape[:2]
    assert plan.size.shape == (metric.shape[0], slots)
    for row, size in zip(plan.slot, plan.size, strict=True):
        assert row.unique().tolist() == list(range(slots))
        assert size.tolist() == row.bincount().tolist()


@given(problems())
@settings(max_examples=60, deadline=None)
def test_merge_is_the_mean_and_unmerge_gives_it_to_every_member(problem):
    plan = plan_of(*problem)
    x = torch.randn(*problem[0].shape[:2], 3, dtype=torch.float64)
    back = plan.unmerge(plan.merge(x))
    for b, groups in enumerate(groups_of(plan)):
        for group in groups:
            members = sorted(group)
            mean = x[b, members].mean(0)
            for token in members:
                torch.testing.assert_close(back[b, token], mean)


@given(problems())
@settings(max_examples=30, deadline=None)
def test_merging_what_is_merged_changes_nothing(problem):
    plan = plan_of(*problem)
    constant = torch.full((*problem[0].shape[:2], 2), 1.25)
    assert plan.merge(constant).eq(1.25).all()
    merged = plan.merge(torch.randn(*problem[0].shape[:2], 2, dtype=torch.float64))
    torch.testing.assert_close(plan.merge(plan.unmerge(merged)), merged)


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_permuting_the_batch_permutes_the_plan(problem, random):
    metric, cells, remove, drawn = problem
    order = list(range(metric.shape[0]))
    random.shuffle(order)
    permuted = of_items(drawn, order, metric.shape[0])
    plan = plan_of(metric, cells, remove, drawn)
    assert torch.equal(plan.slot[order], plan_of(metric[order], cells, remove, permuted).slot)


@given(cells_of)
def test_windows_tile_the_grid_and_are_not_smaller_than_asked_for(cells):
    assert cells.h % cells.down == cells.w % cells.across == 0
    assert cells.window.tokens * cells.windows == cells.tokens
    assert cells.removable(0.5, even=True) % cells.windows == 0


@pytest.mark.parametrize(
    ("side", "window", "ratio", "removed"),
    [
        (64, 8, 0.1, (409, 416, 64 * 6)),  # of 409.6, and of 6.4 in each window
        (64, 8, 0.25, (1024, 1024, 1024)),
        (64, 8, 0.9, (3072, 3072, 3072)),  # sources
        (64, 8, 0.0, (0, 0, 0)),
        (64, 0, 0.3, (1228, 1232, 1228)),
        (7, 8, 0.5, (24, 25, 24)),
        (7, 8, 0.01, (0, 0, 0)),
    ],
)
def test_how_many_tokens_a_ratio_removes(side, window, ratio, removed):
    cells = Cells.of(side, side, 2, 2, window)
    ways = ({}, {"multiple": 8}, {"even": True})
    assert tuple(cells.removable(ratio, **way) for way in ways) == removed


@pytest.mark.parametrize(
    ("side", "options", "removed"),
    [
        (64, {}, 416),  # 3,680 are left
        (64, {"window": 0}, 409),  # as the paper
        (16, {}, 25),  # seven more would be many
        (64, {"selector": "kmeans"}, 64 * 6),
    ],
)
def test_a_multiple_of_8_is_left_of_many(side, options, removed):
    chosen = Settings(ratio=0.1, **options)
    cells = Cells.of(side, side, 2, 2, chosen.search)
    assert removable(chosen, cells, 0.1) == removed


@pytest.mark.parametrize(
    ("side", "window", "found"), [(64, 8, 8), (52, 8, 13), (37, 8, 37), (6, 8, 6), (64, 0, 64)]
)
def test_the_window_is_the_next_that_divides_the_grid(side, window, found):
    assert Cells.of(side, side, 2, 2, window).window.h == found


@given(cells_of, st.data())
@settings(max_examples=60, deadline=None)
def test_each_cell_has_one_destination_and_the_rest_are_sources(cells, data):
    offsets = torch.tensor(
        [data.draw(st.lists(st.integers(0, cells.choices - 1), min_size=1, max_size=1))]
        * cells.count
    ).reshape(1, -1)
    src, dst = (index.flatten(1) for index in cells.split(offsets))
    assert sorted(src[0].tolist() + dst[0].tolist()) == list(range(cells.h * cells.w))
    where = {divmod(d, cells.w) for d in dst[0].tolist()}
    cell_numbers = {(y // cells.sy, x // cells.sx) for y, x in where}
    assert len(cell_numbers) == len(where) == cells.count
    assert src.shape[1] == cells.sources


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_zero_huge_infinite_and_nan_tokens_make_a_valid_plan(dtype):
    metric = torch.randn(2, 36, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    metric[0, :5] = 0
    metric[0, 7] = torch.finfo(dtype).max
    metric[1, 3] = float("nan")
    metric[1, 9] = float("inf")
    plan = bipartite(metric, Cells.of(6, 6, 2, 2), 18)
    assert (plan.size >= 1).all()
    # The odd tokens are the worst matches, so with half the tokens left they stay alone.
    assert plan.size[1, plan.slot[1, 3]] == plan.size[1, plan.slot[1, 9]] == 1
    large = torch.full((2, 36, 8), 40000.0, dtype=dtype)
    assert plan.merge(large).isfinite().all()  # a sum in half precision would overflow


def test_only_the_needed_scores_are_ever_held(monkeypatch):
    """The largest tensor of the matching is no larger than the tokens it works on."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage().nbytes() // tensor.element_size()
                    self.elements = max(self.elements, storage)
            return out

    h = w = 64
    metric = torch.randn(2, h * w, 32)
    with Largest() as largest:
        bipartite(metric, Cells.of(h, w, 2, 2), h * w // 2)
    assert metric.numel() <= largest.elements  # the instrument sees the normalised tokens
    assert largest.elements <= metric.numel()


class TestDraw:
    def draw(self, timestep, cells=4096, choices=4, seed=0, level=1):
        return draw_offsets(
            cells, choices, draw_key(seed, level), torch.tensor(timestep).reshape(-1)
        )

    @pytest.mark.parametrize("choices", [1, 2, 3, 4, 16])
    def test_draws_are_uniform(self, choices):
        draws = [self.draw(t, choices=choices)[0] for t in range(0, 1000, 50)]
        counts = torch.cat(draws).bincount(minlength=choices)
        expected = 20 * 4096 / choices
        chi2 = ((counts - expected) ** 2 / expected).sum()
        # Mean choices - 1, variance twice that: six standard deviations.
        assert chi2 <= choices - 1 + 6 * (2 * (choices - 1)) ** 0.5

    @pytest.mark.parametrize(
        "other",
        [{"timestep": 501}, {"timestep": 500.5}, {"seed": 1}, {"seed": 2**40}, {"level": 2}],
    )
    def test_each_key_draws_independently(self, other):
        """Two draws agree as often as chance has it: a quarter of the cells, plus or minus."""
        one = self.draw(500)
        two = self.draw(**{"timestep": 500, **other})
        assert abs((one == two).float().mean() - 0.25) < 6 * (0.25 * 0.75 / 4096) ** 0.5

    def test_neighbouring_cells_are_independent(self):
        draws = self.draw(500)[0]
        for step in (1, 2, 64):
            equal = (draws[step:] == draws[:-step]).float().mean()
            assert abs(equal - 0.25) < 0.05

    def test_the_same_time_is_the_same_draw_whatever_its_type(self):
        expected = self.draw(500)
        for dtype in (torch.int32, torch.float32, torch.float64, torch.float16):
            timestep = torch.tensor([500], dtype=dtype)
            assert torch.equal(draw_offsets(4096, 4, draw_key(0, 1), timestep), expected)

    def test_one_row_per_timestep(self):
        rows = self.draw([500, 20, 500])
        assert torch.equal(rows[0], rows[2])
        assert torch.equal(rows[1:2], self.draw(20))
