"""The Triton kernels against the reference, on a CPU, through Triton's interpreter.

It multiplies and rounds bfloat16 wrongly; gpu_checks.py compares on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import assert_same_plan, problems
from torch import Tensor

from tomesd import kernels
from tomesd.kernels import Cells, Clock, Draw, Request, cells, draw_key, reference
from tomesd.kernels import request as requests
from tomesd.kernels import triton_merging as fast
from tomesd.plan import MergePlan
from tomesd.selectors import KMeans, bipartite, kmeans


@contextmanager
def largest_window(sources: int) -> Iterator[None]:
    """Windows with more sources than that are matched in several launches, not in one."""
    with mock.patch.object(cells, "_MOST_SOURCES", sources):
        yield


def both(metric: Tensor, cells: Cells, remove: int, **where: object) -> list[MergePlan]:
    return [
        bipartite(metric, cells, remove, backend=backend, **where)
        for backend in ("triton", "reference")
    ]


@given(problems(even=False), st.sampled_from([128, 0]))
@settings(max_examples=40, deadline=None)
def test_plans_are_those_of_the_reference(problem, most):
    metric, cells, remove, drawn = problem
    with largest_window(most):
        assert_same_plan(*both(metric.float(), cells, remove, **drawn))


@given(problems(even=False), st.sampled_from([128, 0]), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_of_equal_similarities_the_first_merge(problem, most, kinds):
    metric, cells, remove, drawn = problem
    kind = (metric[..., 0].abs() * 100).long() % kinds
    metric = torch.nn.functional.one_hot(kind, kinds).float()  # cosines are 0 and 1, exactly
    with largest_window(most):
        assert_same_plan(*both(metric, cells, remove, **drawn))


@pytest.mark.parametrize("most", [128, 0])
@pytest.mark.parametrize("channels", [1, 64, 80, 320, 3072])
def test_any_number_of_channels(channels, most):
    metric = torch.randn(2, 48, channels, generator=torch.Generator().manual_seed(channels))
    # In few channels many tokens point the same way, and ties may be broken in any way.
    remove = 20 if channels > 1 else 1
    with largest_window(most):
        one, other = both(metric, Cells.of(8, 6, 2, 2), remove)
    if channels > 1:
        assert_same_plan(one, other)
    assert (one.size >= 1).all()


@pytest.mark.parametrize("window", [0, 8])
def test_grids_larger_than_a_tile(window):
    metric = torch.randn(2, 33 * 24, 16, generator=torch.Generator().manual_seed(0))
    time = torch.tensor([17.0])
    cells = Cells.of(33, 24, 2, 2, window)
    assert cells.windows == (9 if window else 1)
    assert_same_plan(*both(metric, cells, 450, timestep=time, key=draw_key(3, 2)))


@pytest.mark.parametrize("most", [128, 0])
@pytest.mark.parametrize("window", [0, 2, 4])
@pytest.mark.parametrize("times", [1, 2])
def test_all_sources_merge(window, times, most):
    """Where windows are cells, nothing is compared for it."""
    metric, time = torch.randn(2, 64, 16), torch.tensor([500.0, 1.0])[:times]
    cells = Cells.of(8, 8, 2, 2, window)
    with largest_window(most):
        assert_same_plan(*both(metric, cells, cells.sources, timestep=time, key=5))


def test_half_precision_matches_as_well_as_the_reference():
    """The similarity that a plan gives up is at most twice what the reference gives up in this
    precision, both against float64."""
    exact = torch.randn(2, 256, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    metric, cells = exact.half(), Cells.of(16, 16, 2, 2)
    offsets = torch.zeros(1, cells.count, dtype=torch.int64)
    src, dst = (index.flatten(1) for index in cells.split(offsets))
    unit = torch.nn.functional.normalize(metric.double(), dim=-1)
    score = unit[:, src[0]] @ unit[:, dst[0]].transpose(1, 2)
    best = score.max(dim=-1).values

    def loss(plan: MergePlan) -> float:
        merged = plan.slot[:, src[0]] - (256 - 128 - cells.count)
        chosen = score.gather(2, merged.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        total = torch.where(merged >= 0, chosen, 0).sum()
        return (best.topk(128, dim=1).values.sum() - total).item()

    one, other = both(metric, cells, 128)
    assert loss(one) <= 2 * loss(other) + 1e-9


@pytest.mark.parametrize("most", [128, 0])
@pytest.mark.parametrize("timestep", [500, 500.5, [3, 999, 3]])
def test_draws_are_those_of_the_reference(timestep, most):
    drawn = {"timestep": torch.tensor(timestep), "key": draw_key(7, 4)}
    metric = torch.randn(3, 9 * 12, 8, generator=torch.Generator().manual_seed(2))
    with largest_window(most):
        assert_same_plan(*both(metric, Cells.of(9, 12, 2, 3), 40, **drawn))


@pytest.mark.parametrize("most", [128, 0])
@pytest.mark.parametrize("step", [0, 2])
def test_draws_at_times_that_do_not_lie_side_by_side(step, most):
    """Samplers expand one time to a batch, or take every other one of a list."""
    times = torch.tensor([500.0, 400.0, 300.0, 200.0, 100.0]).as_strided((3,), (step,))
    metric = torch.randn(3, 9 * 12, 8, generator=torch.Generator().manual_seed(2))
    drawn = {"timestep": times, "key": draw_key(7, 4)}
    with largest_window(most):
        assert_same_plan(*both(metric, Cells.of(9, 12, 2, 3), 40, **drawn))


@pytest.mark.parametrize("most", [128, 0])
def test_zero_huge_infinite_and_nan_tokens_match_nothing(most):
    metric = torch.randn(2, 36, 8, generator=torch.Generator().manual_seed(0))
    metric[0, :5] = 0
    metric[0, 7] = torch.finfo(torch.float32).max
    metric[1, 3] = float("nan")
    metric[1, 9] = float("inf")
    with largest_window(most):
        one, other = both(metric, Cells.of(6, 6, 2, 2), 15)
    assert_same_plan(one, other)
    assert one.size[1, one.slot[1, 3]] == one.size[1, one.slot[1, 9]] == 1


@given(problems(even=False), st.sampled_from([torch.float32, torch.float16]))
@settings(max_examples=25, deadline=None)
def test_slot_mean_is_that_of_the_reference(problem, dtype):
    metric, cells, remove, drawn = problem
    plan = bipartite(metric, cells, remove, backend="reference", **drawn)
    x = torch.randn(*metric.shape[:2], 37).to(dtype)
    exact = reference.slot_mean(x.double(), plan.lists)
    error, allowed = (
        (mean(x, plan.lists).double() - exact).abs().max()
        for mean in (fast.slot_mean, reference.slot_mean)
    )
    assert error <= 2 * allowed + 1e-7


@given(problems(even=False), st.integers(1, 300))
@settings(max_examples=15, deadline=None)
def test_slot_gather_is_that_of_the_reference(problem, channels):
    metric, cells, remove, drawn = problem
    slot = bipartite(metric, cells, remove, backend="reference", **drawn).slot
    y = torch.randn(metric.shape[0], cells.tokens - remove, channels).half()
    assert torch.equal(fast.slot_gather(y, slot), reference.slot_gather(y, slot))


def test_gradients_of_slot_mean():
    metric = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(0))
    plan = bipartite(metric, Cells.of(4, 4, 2, 2), 8, backend="reference")
    x = torch.randn(2, 16, 5, requires_grad=True)
    weight = torch.randn(2, 8, 5)
    grads = []
    for triton in (True, False):
        mean = kernels.slot_mean(x, plan.lists, triton)
        grads += torch.autograd.grad((mean * weight).sum(), x)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("op", ["match_tokens", "slot_mean", "kmeans"])
def test_operators_are_registered_as_pytorch_wants_them(op):
    metric = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(0))
    plan = MergePlan.empty(2, 16, 8, metric.device, triton=True)
    clock, time = torch.full((3,), float("-inf")), torch.tensor([5.0])
    matching = (metric, time, *plan.lists, clock, [4, 4, 2, 2, 1, 2, 8, 3, 2], True)
    torch.ops.tomesd.match_tokens(*matching)
    arguments = (metric.requires_grad_(), *plan.lists) if op == "slot_mean" else matching
    torch.library.opcheck(getattr(torch.ops.tomesd, op).default, arguments)


class TestClock:
    """All selectors that look keep a plan while the time falls, and for so many calls."""

    @pytest.mark.parametrize("triton", [True, False])
    @pytest.mark.parametrize("selector", [bipartite, kmeans])
    @pytest.mark.parametrize(
        ("times", "made"),
        [
            ([9, 8, 7, 6, 5, 4, 3], [1, 0, 0, 1, 0, 0, 1]),
            ([9, 8, 9, 8, 7], [1, 0, 1, 0, 0]),  # a new image
            ([9, 9, 8, 8], [1, 1, 0, 1]),  # time stands still: perhaps a new image
            ([[9, 8], [8, 7], [7, 7], [6, 6]], [1, 0, 1, 0]),  # one of two images starts anew
        ],
    )
    @pytest.mark.parametrize("captured", [True, False])
    def test_keeps_and_renews(self, selector, triton, times, made, captured):
        cells, generator = Cells.of(4, 4, 2, 2), torch.Generator().manual_seed(0)
        plan = MergePlan.empty(2, 16, 8, torch.device("cpu"), triton)
        state = torch.full((2 + torch.tensor(times[0]).numel(),), float("-inf"))
        before = plan.slot.clone()
        for time, renewed in zip(times, made, strict=True):
            metric = torch.randn(2, 16, 32, generator=generator)
            request = Request(cells, 8, Draw(torch.tensor(time)), Clock(state, 3))
            with mock.patch.object(requests, "_is_captured", lambda _, captured=captured: captured):
                selector.write(plan, metric, request)
            fresh = selector(metric, cells, 8, backend="reference").slot
            assert torch.equal(plan.slot, fresh if renewed else before)
            before = plan.slot.clone()

    @pytest.mark.parametrize("selector", [bipartite, kmeans])
    def test_a_fresh_plan_is_not_made_again(self, selector):
        """But for what a CUDA graph captures: there the host cannot know."""
        plan = MergePlan.empty(2, 16, 8, torch.device("cpu"), False)
        metric, state = torch.randn(2, 16, 32), torch.full((3,), float("-inf"))
        compared = mock.Mock(wraps=reference.best_match)
        for time in (9.0, 8.0, 7.0, 9.0):
            with mock.patch.object(reference, "best_match", compared):
                draw, clock = Draw(torch.tensor(time)), Clock(state, 4)
                selector.write(plan, metric, Request(Cells.of(4, 4, 2, 2), 8, draw, clock))
        assert compared.call_count == 2 * (1 if selector is bipartite else KMeans.rounds)


def test_a_backend_that_cannot_serve_is_an_error_unless_it_is_automatic():
    metric = torch.randn(1, 16, 4, dtype=torch.float64)
    cells = Cells.of(4, 4, 2, 2)
    with pytest.raises(RuntimeError, match=r'backend="triton".*float64'):
        bipartite(metric, cells, 4, backend="triton")
    assert not bipartite(metric, cells, 4, backend="auto").triton


@given(problems(even=False), st.sampled_from([torch.float32, torch.float16]), st.integers(1, 300))
@settings(max_examples=15, deadline=None)
def test_slot_restore_adds_to_each_token_what_its_slot_gained(problem, dtype, channels):
    metric, cells, remove, drawn = problem
    plan = bipartite(metric, cells, remove, backend="reference", **drawn)
    batch, n = plan.slot.shape
    x = torch.randn(batch, n, channels).to(dtype)
    y, merged = (torch.randn(batch, n - remove, channels).to(dtype) for _ in range(2))
    exact = torch.empty(batch, n, channels, dtype=torch.float64)
    for b in range(batch):
        for token in range(n):
            m = plan.slot[b, token]
            exact[b, token] = x[b, token].double() + (y[b, m].double() - merged[b, m].double())
    errors = []
    for plan.triton in (True, False):
        restored = plan.restore(x, y, merged)
        assert restored.dtype == dtype
        errors.append((restored.double() - exact).abs().max())
    assert errors[0] <= 2 * errors[1] + 1e-7
    assert errors[1] <= 8 * torch.finfo(dtype).eps * exact.abs().max().clamp_min(1)


def test_slot_restore_of_mixed_dtypes_and_with_gradients_is_that_of_the_reference():
    metric = torch.randn(2, 16, 4, generator=torch.Generator().manual_seed(0))
    plan = bipartite(metric, Cells.of(4, 4, 2, 2), 8, backend="triton")
    x, y, merged = torch.randn(2, 16, 5), torch.randn(2, 8, 5).half(), torch.randn(2, 8, 5).half()
    assert plan.restore(x, y, merged).dtype == torch.float32
    y = y.float().requires_grad_()
    (grad,) = torch.autograd.grad(plan.restore(x, y, merged.float()).sum(), y)
    torch.testing.assert_close(grad, plan.size.unsqueeze(-1).expand_as(y).float())


def test_matching_is_launched_past_the_dispatcher_unless_something_looks_on():
    """Fake tensors go through the operator that `describe` counts."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    cells, metric = Cells.of(4, 4, 2, 2), torch.randn(2, 16, 4)
    names: list[str] = []
    with Seen():
        bipartite(metric, cells, 8, backend="triton")
    assert not any("tomesd" in name for name in names)
    with FakeTensorMode() as mode, Seen():
        bipartite(mode.from_tensor(metric), cells, 8, backend="triton")
    assert names.count("tomesd.match_tokens.default") == 1
