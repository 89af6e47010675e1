"""How long a plan is used."""

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from zoo_diffusers import HOSTS, call, make_sd_pipeline

import tomesd
from tomesd import kernels
from tomesd.patch import patch_of

SD1, SDXL = HOSTS["sd1"], HOSTS["sdxl"]


@pytest.fixture
def matchings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Grids that are matched, in the order in which it happens."""
    made: list[tuple[int, int]] = []
    original = kernels.reference.match_tokens

    def record(metric: Any, request: kernels.Request, lists: Any) -> None:
        before = lists.slot.clone()
        original(metric, request, lists)
        if request.clock is None or request.clock.state[0] == 1:
            made.append((request.cells.h, request.cells.w))
        else:
            assert torch.equal(lists.slot, before)

    monkeypatch.setattr(kernels.reference, "match_tokens", record)
    yield made


def blocks_by_grid(model: Any) -> dict[int, int]:
    """Blocks at each level of a described model, by the side of its grid."""
    (part,) = tomesd.describe(model, 128, 128).parts
    return {level.grid[0]: level.blocks for level in part.levels}


def run(model: Any, timestep: float = 500, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return SD1.run(model, timestep=timestep, **options)


def test_a_plan_per_block_per_level_or_for_some_steps(matchings: list) -> None:
    model = SD1.build()
    blocks = blocks_by_grid(model)
    tomesd.apply_patch(model, 0.5, 2, share="block")
    run(model)
    assert {grid: matchings.count((grid, grid)) for grid in (16, 8)} == {
        16: blocks[16],
        8: blocks[8],
    }
    assert blocks[16] > 1
    matchings.clear()
    tomesd.apply_patch(model, 0.5, 2, share="level")
    for _ in range(2):
        run(model)
    assert matchings == [(16, 16), (8, 8)] * 2
    matchings.clear()
    tomesd.apply_patch(model, 0.5, 2, share="steps", refresh=3)
    for time in (900, 800, 700, 600, 500):
        run(model, time)
    assert matchings == [(16, 16), (8, 8)] * 2


@pytest.mark.parametrize("selector", ["kmeans", "bipartite"])
def test_every_selector_keeps_its_plans(selector: str) -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5, share="steps", refresh=2, selector=selector)
    plans: list[torch.Tensor] = []
    patch_of(model).observer = lambda scope, block, plan: plans.append(plan.slot.clone())
    kept = []
    for time in (900, 800, 700, 950):
        plans.clear()
        run(model, time)
        kept.append(plans[0])
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[1], kept[2]) and not torch.equal(kept[2], kept[3])


def test_a_new_image_or_another_shape_starts_anew(matchings: list) -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5, share="steps", refresh=100)
    for time in (900, 500, 100, 900, 500):
        run(model, time)
    assert len(matchings) == 2
    run(model, 400, height=24)
    assert len(matchings) == 3
    run(model, 300, batch=4)
    assert len(matchings) == 4
    run(model, 300)  # back to the first shape: its own plan is still there
    assert len(matchings) == 4


def test_the_first_image_of_a_kept_plan_is_that_of_a_plan_per_level() -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5, share="level")
    level = [run(model, time) for time in (900, 800)]
    tomesd.apply_patch(model, 0.5, share="steps", refresh=2)
    steps = [run(model, time) for time in (900, 800)]
    assert torch.equal(level[0], steps[0])
    assert not torch.equal(level[1], steps[1])
    tomesd.apply_patch(model, 0.5, share="steps", refresh=1)
    assert all(torch.equal(run(model, t), want) for t, want in zip((900, 800), level, strict=True))


def test_copies_keep_plans_of_their_own(matchings: list) -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5, share="steps", refresh=100)
    run(model, 900)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in copies:
        assert patch_of(other) is not patch_of(model)
        run(other, 800)
    assert len(matchings) == 3
    run(model, 800)
    assert len(matchings) == 3


def test_threads_keep_plans_of_their_own() -> None:
    """Two images made in turns on two threads are those made one after the other."""
    model = tomesd.apply_patch(SD1.build(), 0.5, share="steps", refresh=100)
    times = (900, 700, 500, 300)
    alone = {}
    for seed in (0, 1):
        alone[seed] = [run(model, time, seed=seed) for time in times]
    turn = threading.Barrier(2)
    together: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def work(seed: int) -> None:
        for time in times:
            turn.wait(60)
            together[seed].append(run(model, time, seed=seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, images in alone.items():
        assert all(torch.equal(a, b) for a, b in zip(images, together[seed], strict=True))
    assert not torch.equal(alone[0][-1], alone[1][-1])


def test_nothing_is_kept_where_a_backward_pass_may_need_it() -> None:
    model = tomesd.apply_patch(SD1.build().requires_grad_(), 0.5, share="steps", refresh=100)
    outputs = [call(model, SD1.inputs(16, 16, 2, 0, time)) for time in (900, 800)]
    for output in reversed(outputs):  # the second call must not have spoilt the first
        output.sum().backward()


def test_describe_keeps_nothing(matchings: list) -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5, share="steps")
    tomesd.describe(model, 128, 128)
    assert not vars(patch_of(model).kept.local)
    run(model)
    assert len(matchings) == 1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_kept_plans_serve_with_and_without_inference_mode(mode: Any) -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5, share="steps", refresh=100)
    with torch.inference_mode():
        first = SD1.run(model, timestep=900)
    with mode():
        second = SD1.run(model, timestep=800)
    assert first.isfinite().all() and second.isfinite().all()


@pytest.mark.parametrize("share", ["level", "steps"])
def test_compiled_models_share_plans(share: str) -> None:
    torch._dynamo.reset()
    times = (900, 800, 700, 950, 940)
    model = tomesd.apply_patch(SD1.build(), 0.5, share=share, refresh=2)
    eager = [run(model, time) for time in times]
    run(model, 1)  # so that the next is a new image
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for time, want in zip(times, eager, strict=True):
        torch.testing.assert_close(run(compiled, time), want, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_whole_pipeline_with_kept_plans(matchings: list) -> None:
    pipe = make_sd_pipeline()
    pipe.set_progress_bar_config(disable=True)
    tomesd.apply_patch(pipe, 0.5, share="steps", refresh=4)
    images = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        options = {"height": 64, "width": 64, "num_inference_steps": 6, "output_type": "np"}
        images.append(pipe("a fox", generator=generator, **options).images)
    assert (images[0] == images[1]).all()
    assert len(matchings) % 2 == 0 and 0 < len(matchings) <= 2 * 2 * 7 / 4 + 2


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({"ratio": 0.5}, 8),
        ({"ratio": 0.6}, 64),
        ({"ratio": 0.6, "sx": 4, "sy": 4}, 8),
        ({"ratio": 0.4, "sy": 1}, 64),
        ({"ratio": 0.75, "window": 4}, 4),
        ({"ratio": 0.25, "window": 0}, 0),
    ],
)
def test_the_window_follows_the_ratio_unless_it_is_given(options: dict, window: int) -> None:
    assert tomesd.Settings(**options).search == window


def test_the_kernels_merge_a_whole_model_as_the_reference_does() -> None:
    outputs = []
    for backend in ("triton", "reference"):
        model = tomesd.apply_patch(SD1.build(), 0.5, merge_mlp=True, backend=backend)
        outputs.append(run(model))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    assert not torch.equal(outputs[0], run(SD1.build()))


def test_a_window_keeps_groups_together() -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5, window=4)
    plans: list[Any] = []
    patch_of(model).observer = lambda scope, block, plan: plans.append(plan)
    run(model)
    rows = torch.arange(16)
    window = (rows[:, None] // 4 * 4 + rows // 4).flatten()
    for plan in plans:
        for slots in plan.slot:
            owners = [set(window[slots == s].tolist()) for s in slots.unique()]
            assert all(len(owner) == 1 for owner in owners)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"window": -1}, r"window=-1: must be None or an int of at least 0"),
        ({"window": "8"}, r"window='8': must be None or an int"),
        ({"share": "all"}, r"share='all': must be None or one of 'block', 'level', 'steps'"),
        ({"refresh": 0}, r"refresh=0: must be an int of at least 1"),
        ({"refresh": 2.5}, r"refresh=2.5: must be an int"),
        ({"when": True}, r"when=True: must be one of 'if_faster', 'always'"),
        ({"backend": "cuda"}, r"backend='cuda': must be one of 'auto', 'triton', 'reference'"),
    ],
)
def test_bad_options_are_named(option: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        tomesd.apply_patch(SD1.build(), 0.5, **option)


def test_a_backend_that_cannot_serve_raises_when_the_model_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    model = tomesd.apply_patch(SD1.build(), 0.5, backend="triton")
    with pytest.raises(RuntimeError, match=r'backend="triton" cannot be used here: .* on cpu'):
        run(model)
