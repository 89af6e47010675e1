"""How long a plan is used, and where merging is left out because it does not pay."""

import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo_ldm
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch._dynamo.testing import CompileCounterWithBackend
from zoo_diffusers import HOSTS, call, make_sd_pipeline

import tomesd
from tomesd import kernels, policy
from tomesd.cost import Device, find_launcher, merging_pays
from tomesd.kernels import Cells
from tomesd.patch import patch_of

SD1, SDXL = HOSTS["sd1"], HOSTS["sdxl"]


@pytest.fixture
def matchings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Grids that are matched, in the order in which it happens."""
    made: list[tuple[int, int]] = []
    original = kernels.reference.match_tokens

    def record(metric: Any, cells: Any, remove: int, lists: Any, draw: Any, clock: Any) -> None:
        before = lists.slot.clone()
        original(metric, cells, remove, lists, draw, clock)
        if clock is None or clock.state[0] == 1:
            made.append((cells.h, cells.w))
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


class TestBreakEven:
    SLOW_LAUNCH = Device(operations=1e9, bytes=1e7, launch=100.0)

    def pays(self, device: Device, side: int, remove: float = 0.5, **more: Any) -> bool:
        cells = Cells.of(side, side, 2, 2)
        options = {"batch": 2, "channels": 320, "uses": 1, "item_size": 2} | more
        options = {"target": "attn", "blocks": 1, "model_blocks": 16} | options
        removes = {options.pop("kinds", ("attn",)): cells.removable(remove)}
        return merging_pays(device, cells=cells, removes=removes, **options)

    def test_what_takes_shorter_than_a_launch_does_not_pay(self) -> None:
        assert not self.pays(self.SLOW_LAUNCH, 16)
        assert self.pays(self.SLOW_LAUNCH, 256)

    def test_more_of_everything_that_is_saved_pays_sooner(self) -> None:
        def smallest(**more: Any) -> int:
            return next(
                side for side in range(8, 600, 4) if self.pays(self.SLOW_LAUNCH, side, **more)
            )

        plain = smallest()
        everything = ("attn", "crossattn", "mlp")
        assert smallest(batch=16) < plain
        assert smallest(uses=10) < plain
        assert smallest(channels=1280, kinds=everything) < smallest(kinds=everything)
        assert smallest(remove=0.75) <= plain <= smallest(remove=0.25)

    def test_the_host_counts_unless_a_graph_is_replayed(self) -> None:
        eager = Device(operations=4e8, bytes=4e6, launch=2.5, host=30.0)
        graph = Device(operations=4e8, bytes=4e6, launch=2.5)
        assert self.pays(graph, 64) and not self.pays(eager, 64)
        assert self.pays(eager, 128)
        # Attention at the finest level would gain, but the rest of a deep model waits for the host.
        deep = {"channels": 640, "blocks": 2, "model_blocks": 70}
        assert self.pays(graph, 64, **deep) and not self.pays(eager, 64, **deep)
        assert self.pays(eager, 64, batch=8, **deep)

    H200 = Device(operations=4.5e8, bytes=3.7e6, launch=2.5, host=50.0, plan=700.0)

    def test_what_is_saved_must_be_worth_the_time_of_the_host(self) -> None:
        """SDXL at 1024 px: with four images the GPU saves less than the host needs for plans."""
        deep = {"channels": 640, "blocks": 2, "model_blocks": 70}
        assert not self.pays(self.H200, 64, batch=8, **deep)
        assert self.pays(self.H200, 64, batch=16, **deep)

    def test_attention_that_writes_its_scores_pays_sooner(self) -> None:
        """Stable Diffusion 1.5 at 512 px, with default windows."""
        cells = Cells.of(64, 64, 2, 2, 8)

        def pays(ratio: float, batch: int, score_heads: int, target: str = "attn") -> bool:
            return merging_pays(
                self.H200,
                batch=batch,
                channels=320,
                cells=cells,
                removes={("attn",): cells.removable(ratio)},
                target=target,
                blocks=1,
                model_blocks=16,
                uses=1,
                item_size=2,
                score_heads=score_heads,
            )

        assert pays(0.1, batch=16, score_heads=8) and not pays(0.1, batch=16, score_heads=0)
        assert pays(0.2, 16, 8, "kv") and not pays(0.2, 16, 0, "kv")
        # One image takes as long as the host does, whatever its attention writes.
        assert not pays(0.5, batch=2, score_heads=0) and not pays(0.5, batch=2, score_heads=8)
        # And with four, it is the scores that take longer.
        assert pays(0.5, batch=8, score_heads=8) and not pays(0.5, batch=8, score_heads=0)

    def test_layers_are_left_alone_and_the_user_is_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(policy.Device, "of", lambda *_, **__: self.SLOW_LAUNCH)
        model = SD1.build()
        plain = run(model)
        tomesd.apply_patch(model, 0.5)
        with pytest.warns(tomesd.MergeWarning, match='longer than merging saves; when="always"'):
            assert torch.equal(run(model), plain)
        assert "left alone: not faster" in str(tomesd.describe(model, 128, 128))
        tomesd.apply_patch(model, 0.5, when="always")
        with warnings.catch_warnings():
            warnings.simplefilter("error", tomesd.MergeWarning)
            assert not torch.equal(run(model), plain)
        assert "left alone" not in str(tomesd.describe(model, 128, 128))

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    def test_where_the_host_is_in_the_way_the_user_is_told_what_to_do(
        self, monkeypatch: pytest.MonkeyPatch, compiled: bool
    ) -> None:
        free = replace(self.SLOW_LAUNCH, operations=1e4, launch=0.0)
        waits = replace(free, host=1e6)

        def device(_: torch.device, launcher: str) -> Device:
            return free if launcher == "graph" else waits

        monkeypatch.setattr(policy.Device, "of", device)
        model = SD1.build()
        plain = run(model)
        tomesd.apply_patch(model, 0.5)
        assert "left alone: pays in CUDA graphs only" in str(tomesd.describe(model, 128, 128))
        runs = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
        with pytest.warns(tomesd.MergeWarning, match=r'the host, .*"reduce-overhead".*pays'):
            torch.testing.assert_close(run(runs), plain)

    def test_kernels_are_loaded_before_a_graph_is_captured(
        self, monkeypatch: pytest.MonkeyPatch, matchings: list
    ) -> None:
        """Eager mode leaves alone what a graph would merge, and no kernel loads in a capture."""
        free = replace(self.SLOW_LAUNCH, operations=1e4, launch=0.0)

        def device(_: torch.device, launcher: str) -> Device:
            return free if launcher == "graph" else replace(free, host=1e6)

        monkeypatch.setattr(policy.Device, "of", device)
        model = SD1.build()
        plain = run(model)
        tomesd.apply_patch(model, 0.5)
        with pytest.warns(tomesd.MergeWarning, match="pays"):
            assert torch.equal(run(model), plain)
        assert set(matchings) == {(16, 16)}
        loaded = len(matchings)
        assert torch.equal(run(model), plain)
        assert len(matchings) == loaded  # once for each shape

    def test_only_cuda_has_graphs(self) -> None:
        for name in ("cpu", "mps"):
            device = torch.device(name)
            assert Device.of(device, "graph") == Device.of(device, "eager")


class Unknown(AttnProcessor):
    """A processor that we cannot know."""


@pytest.fixture
def score_heads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the rule was told about attention."""
    told: list[int] = []

    def record(*args: Any, **options: Any) -> bool:
        told.append(options["score_heads"])
        return merging_pays(*args, **options)

    monkeypatch.setattr(policy, "merging_pays", record)
    policy._pays.cache_clear()
    return told


@pytest.mark.parametrize("fused", [AttnProcessor2_0, Unknown])
def test_the_rule_follows_the_processor(fused: type, score_heads: list[int]) -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5)
    # What has been found out about a shape is not asked again.
    for processor, told in ((fused(), {0}), (AttnProcessor(), {4}), (fused(), set())):
        score_heads.clear()
        model.set_attn_processor(processor)
        run(model)
        assert set(score_heads) == told


@pytest.mark.parametrize(
    ("name", "heads"), [("ldm-sd1", 2), ("compvis", 2), ("sgm", 0), ("comfy-unet", 0)]
)
def test_the_rule_knows_the_attention_of_ldm(name: str, heads: int, score_heads: list[int]) -> None:
    host = next(host for host in zoo_ldm.HOSTS if host.name == name)
    host.run(tomesd.apply_patch(host.build(), 0.5))
    assert set(score_heads) == {heads}


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({"ratio": 0.5}, 8),
        ({"ratio": 0.6}, 0),
        ({"ratio": 0.6, "sx": 4, "sy": 4}, 8),
        ({"ratio": 0.4, "sy": 1}, 0),
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


@pytest.mark.parametrize(
    ("options", "launcher"),
    [
        ({}, "compiled"),
        ({"mode": "reduce-overhead"}, "graph"),
        ({"mode": "max-autotune"}, "graph"),
        ({"options": {"triton.cudagraphs": True}}, "graph"),
        ({"backend": "eager"}, "compiled"),
    ],
    ids=str,
)
def test_the_mode_of_the_compiler_is_known(options: dict[str, Any], launcher: str) -> None:
    torch._dynamo.reset()
    words = {"eager": 1, "compiled": 2, "graph": 3}

    def told(x: torch.Tensor) -> torch.Tensor:
        return x + words[find_launcher(x.device)]

    assert find_launcher(torch.device("cpu")) == "eager"
    compiled = torch.compile(told, fullgraph=True, **options)
    assert compiled(torch.zeros(1)).item() == words[launcher]
    torch._dynamo.reset()
