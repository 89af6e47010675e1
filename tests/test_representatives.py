"""The token that stands for a slot, and what is picked by it, against slow and obvious versions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import destinations_of, problems
from torch import Tensor

from tomesd.kernels import Cells
from tomesd.plan import MergePlan
from tomesd.selectors import SELECTORS

BACKENDS = ("reference", "triton")  # the second in Triton's interpreter
every_selector = pytest.mark.parametrize("name", SELECTORS)


def slow_representatives(name: str, plan: MergePlan, cells: Cells, drawn: dict) -> Tensor:
    """Of each slot its only token, or its destination; the grid's is the top left of the cell.

    Of k-means, slots whose seed is no destination are left open, with -1.
    """
    kept = []
    for item, slots in enumerate(plan.slot.tolist()):
        destinations = {token for dst in destinations_of(cells, item, drawn) for token in dst}
        row = []
        for m in range(plan.span.shape[1]):
            members = [token for token, slot in enumerate(slots) if slot == m]
            chosen = [token for token in members if token in destinations and name != "grid"]
            assert len(chosen) <= 1
            row.append(chosen[0] if chosen else members[0] if name != "kmeans" else -1)
        kept.append(row)
    return torch.tensor(kept)


@every_selector
@given(problem=problems(dtype=torch.float32), backend=st.sampled_from(BACKENDS))
@settings(max_examples=60, deadline=None)
def test_a_slot_is_represented_by_its_destination(name, problem, backend):
    metric, cells, remove, drawn = problem
    plan = SELECTORS[name](metric, cells, remove, backend=backend, **drawn)
    kept = plan.kept
    assert kept.dtype == torch.int64 and kept.shape == plan.size.shape
    assert torch.equal(plan.slot.gather(1, kept), torch.arange(kept.shape[1]).expand_as(kept))
    expected = slow_representatives(name, plan, cells, drawn)
    assert torch.equal(torch.where(expected < 0, kept, expected), kept)


@every_selector
@given(problem=problems(dtype=torch.float32))
@settings(max_examples=20, deadline=None)
def test_both_backends_choose_the_same_representatives(name, problem):
    metric, cells, remove, drawn = problem
    plans = [SELECTORS[name](metric, cells, remove, backend=b, **drawn) for b in BACKENDS]
    if torch.equal(plans[0].slot, plans[1].slot):  # sums of k-means may be rounded otherwise
        assert torch.equal(plans[0].kept, plans[1].kept)
    else:
        assert name == "kmeans"


def test_the_representative_of_a_cluster_is_its_seed() -> None:
    """Not the first of its tokens: the seeds are drawn from anywhere in their cells."""
    cells, drawn = Cells(8, 8, 2, 2), {"timestep": torch.tensor(3), "key": 5}
    metric = torch.randn(2, 64, 6, generator=torch.Generator().manual_seed(0))
    for backend in BACKENDS:
        plan = SELECTORS["kmeans"](metric, cells, cells.sources, backend=backend, **drawn)
        for item in range(2):
            assert [plan.kept[item].tolist()] == destinations_of(cells, item, drawn)


def make_plan(batch: int, shared: bool = False) -> MergePlan:
    metric = torch.randn(batch, 24, 4, generator=torch.Generator().manual_seed(1))
    return SELECTORS["grid" if shared else "bipartite"](metric, Cells(4, 6, 2, 2), 10)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((3, 24), 1), ((3, 24, 5), 1), ((3, 2, 24, 5), 2), ((3, 1, 1, 24), -1), ((1, 2, 24, 5), -2)],
)
@pytest.mark.parametrize("shared", [False, True])
def test_pick_takes_the_rows_of_the_representatives(shape, dim, shared) -> None:
    plan, rows = make_plan(3, shared), torch.randn(shape)
    picked = plan.pick(rows, dim)
    full = rows.expand(3, *shape[1:])
    expected = [
        full[b].select(dim % rows.ndim - 1, plan.kept[b, m]) for b in range(3) for m in range(14)
    ]
    expected = torch.stack(expected).view(3, 14, *expected[0].shape).movedim(1, dim % rows.ndim)
    assert torch.equal(picked.expand_as(expected), expected)
    assert picked.shape[0] == (1 if shared and shape[0] == 1 else 3)


@pytest.mark.parametrize(("shape", "dim", "batched"), [((24, 5), 0, True), ((2, 24, 5), 1, False)])
def test_rows_without_a_batch_get_one_where_the_items_have_plans_of_their_own(shape, dim, batched):
    rows = torch.randn(shape)
    for plan in (make_plan(1), make_plan(3, shared=True)):
        picked = plan.pick(rows, dim, batched=batched)
        assert torch.equal(picked, rows.index_select(dim, plan.kept[0]))
    plan = make_plan(3)
    expected = torch.stack([rows.index_select(dim, kept) for kept in plan.kept])
    assert torch.equal(plan.pick(rows, dim, batched=batched), expected)


@pytest.mark.parametrize("shape", [(3, 23, 5), (2, 24, 5), (6, 24)])
def test_rows_that_do_not_lie_along_the_tokens_are_refused(shape) -> None:
    with pytest.raises(ValueError, match="do not lie along"):
        make_plan(3).pick(torch.randn(shape))


def test_pick_compiles_and_passes_gradients() -> None:
    rows = torch.randn(3, 24, 5, requires_grad=True)
    metric = torch.randn(3, 24, 4)

    def run(metric: Tensor, rows: Tensor) -> Tensor:
        return SELECTORS["bipartite"](metric, Cells(4, 6, 2, 2), 10).pick(rows)

    picked = torch.compile(run, fullgraph=True, backend="aot_eager")(metric, rows)
    assert torch.equal(picked, run(metric, rows))
    (grad,) = torch.autograd.grad(picked.sum(), rows)
    assert grad.sum() == picked.numel() and grad.max() == 1
