"""Steps that reuse what a part of the model gave before."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
)
from merging_dit import (
    SUPPORTED,
    assert_differs,
    assert_rounding,
    at_noise,
    at_steps_left,
    block_calls,
    block_lists,
)
from torch import Tensor
from zoo_diffusers import HOSTS as UNET_HOSTS
from zoo_diffusers import make_controlnet, make_controlnet_pipeline, make_unet
from zoo_dit import alone
from zoo_ldm import HOSTS as LDM_HOSTS

import tomesd
from tomesd.hosts.timeline import find_timeline
from tomesd.hosts.unets import runs
from tomesd.kept import Kept
from tomesd.patch import patch_of
from tomesd.reuse import keep, recall
from tomesd.settings import Settings
from tomesd.steps import Moment, Steps

REUSE: dict[str, Any] = {"ratio": 0.0, "reuse": 2, "reuse_start": 0.0, "when": "always"}
# Models whose blocks all have to run, as something is added between them.
APART = ("wan_vace", "consisid")
HOSTS = {name: dit for name, dit in SUPPORTED.items() if name not in APART}


def inner_blocks(model: Any) -> set[str]:
    """All but the first and the last."""
    names = [f"{p}.{k}" for p in block_lists(model) for k in range(len(getattr(model, p)))]
    return set(names[1:-1] if len(names) > 2 else names)


@pytest.mark.parametrize("name", HOSTS)
def test_all_blocks_can_be_left_out(name: str) -> None:
    dit = HOSTS[name]
    model, inputs = dit.build(), dit.inputs()
    tomesd.apply_patch(model, **REUSE, depth=(0.0, 1.0))
    computed = dit.run(model, at_noise(dit, inputs, 0.9))
    with block_calls(model) as calls:
        reused = dit.run(model, at_noise(dit, inputs, 0.9 - 1e-6))
    assert not list(calls)
    assert_rounding(reused, computed, 1e-2)


@pytest.mark.parametrize("name", ["flux", "ltx", "ltx2", "krea2", "joyimage", "cosmos"])
def test_reuse_goes_with_autocast(name: str) -> None:
    """Under which blocks of some models return another dtype than they get."""
    dit = HOSTS[name]
    model, inputs = dit.build(), dit.inputs()
    tomesd.apply_patch(model, **REUSE, depth=(0.0, 1.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        computed = dit.run(model, at_noise(dit, inputs, 0.9))
        reused = dit.run(model, at_noise(dit, inputs, 0.9 - 1e-6))
    assert_rounding(reused.float(), computed.float(), 5e-2)


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
@pytest.mark.parametrize("name", HOSTS)
def test_a_step_that_reuses_runs_no_inner_block(name: str) -> None:
    dit = HOSTS[name]
    model, inputs = dit.build(), dit.inputs()
    for ratio in (0.0, 0.5):
        tomesd.apply_patch(model, **{**REUSE, "ratio": ratio, "end": 1.0})
        dit.run(model, at_noise(dit, inputs, 0.8))
        with block_calls(model) as first:
            computed = dit.run(model, at_noise(dit, inputs, 0.9))  # the time rises: another image
        # The same input a moment later: what is reused is what would have been computed.
        with block_calls(model) as second:
            reused = dit.run(model, at_noise(dit, inputs, 0.9 - 1e-6))
        with block_calls(model) as third:
            dit.run(model, at_noise(dit, inputs, 0.5))
        assert {block for block, _ in first} >= inner_blocks(model)
        assert not {block for block, _ in second} & inner_blocks(model)
        assert_rounding(reused, computed, 5e-3)
        assert {block for block, _ in third} >= inner_blocks(model)


@pytest.mark.parametrize("name", APART)
def test_nothing_is_reused_where_something_comes_between_blocks(name: str) -> None:
    dit = SUPPORTED[name]
    model, inputs = dit.build(), dit.inputs()
    plain = [dit.run(model, at_noise(dit, inputs, noise)) for noise in (0.9, 0.8)]
    tomesd.apply_patch(model, **REUSE)
    with pytest.warns(tomesd.MergeWarning, match="reuses nothing"):
        assert_rounding(dit.run(model, at_noise(dit, inputs, 0.9)), plain[0])
    assert_rounding(dit.run(model, at_noise(dit, inputs, 0.8)), plain[1])


def test_nothing_is_reused_where_a_cache_counts_the_steps() -> None:
    dit = SUPPORTED["flux"]
    inputs = dit.inputs()

    def run(**options: Any) -> list[Tensor]:
        model = dit.build()
        model.enable_cache(diffusers.TaylorSeerCacheConfig(cache_interval=2))
        if options:
            tomesd.apply_patch(model, **options)
        with model.cache_context("cond"):
            return [dit.run(model, at_noise(dit, inputs, noise)) for noise in (0.9, 0.8, 0.7, 0.6)]

    plain = run()
    with pytest.warns(tomesd.MergeWarning, match="reuses nothing"):
        found = run(**REUSE)
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


UNETS = (
    *("sd1", "sdxl", "upscaler", "gligen", "animatediff", "svd", "unet3d"),
    *("ldm-sd1", "ldm-sd2", "compvis", "forge", "sgm", "sgm-xl", "comfy-unet"),
)


class Count:
    """How often a layer of the middle of a UNet has run."""

    def __init__(self, model: Any) -> None:
        self.runs = 0
        of_diffusers = hasattr(model, "mid_block")
        layer = model.mid_block.resnets[0] if of_diffusers else model.middle_block[0].in_layers[0]
        layer.register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        self.runs += 1


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
@pytest.mark.parametrize("name", UNETS)
@torch.no_grad()
def test_a_step_that_reuses_runs_the_finest_level_of_a_unet_only(
    name: str, size: tuple[int, int]
) -> None:
    host: Any = {**UNET_HOSTS, **LDM_HOSTS}[name]
    model, (height, width) = host.build(), size
    count = Count(model)

    def run(time: float, seed: int = 0) -> Tensor:
        return host.run(model, height=height, width=width, timestep=time, seed=seed)

    plain = run(900.0, seed=1)
    tomesd.apply_patch(model, **REUSE)
    computed = run(900.0)
    assert count.runs == 2
    assert_rounding(run(900.0 - 1e-3), computed, 5e-3)
    other = run(900.0 - 2e-3, seed=1)
    assert count.runs == 3  # every second step
    assert_rounding(other, plain, 5e-3)
    reused = run(800.0, seed=0)
    assert count.runs == 3
    tomesd.remove_patch(model)
    assert_differs(reused, run(800.0, seed=0))  # what is new at the finest level is used


@contextmanager
def attention_calls(model: Any, outputs: dict[int, Tensor] | None = None) -> Iterator[list[int]]:
    """Numbers of the layers of self-attention over an image that run.

    Args:
        outputs: of layers, which are used in place of their own.
    """
    calls: list[int] = []
    layers = [block.attn1 for _, blocks, _ in runs(model) for block in blocks]
    handles = []
    for number, layer in enumerate(layers):
        handles.append(layer.to_q.register_forward_hook(lambda *_, n=number: calls.append(n)))
        if outputs is not None:
            handles.append(
                layer.register_forward_hook(lambda _, __, y, n=number: outputs.setdefault(n, y))
            )
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
@pytest.mark.parametrize("ratio", [0.0, 0.5])
@pytest.mark.parametrize("name", UNETS)
@torch.no_grad()
def test_steps_may_use_self_attention_of_the_finest_level_again(name: str, ratio: float) -> None:
    host: Any = {**UNET_HOSTS, **LDM_HOSTS}[name]
    model, options = host.build(), {**REUSE, "ratio": ratio, "share": "block"}

    def run(time: float, seed: int) -> Tensor:
        return host.run(model, height=16, width=16, timestep=time, seed=seed)

    # What it should be: the layers that such a step runs give what they gave before.
    tomesd.apply_patch(model, **options)
    outputs: dict[int, Tensor] = {}
    with attention_calls(model, outputs):
        run(900.0, seed=0)
    with attention_calls(model, outputs) as finest:
        expected = run(800.0, seed=1)
    if not finest:
        with pytest.raises(ValueError, match="reuse_attention=True: means nothing on a"):
            tomesd.apply_patch(model, **options, reuse_attention=True)
        return

    tomesd.apply_patch(model, **options, reuse_attention=True)
    run(900.0, seed=0)
    with attention_calls(model) as calls:
        found = run(800.0, seed=1)
    assert calls == []
    assert_rounding(found, expected, 1e-4)
    with attention_calls(model) as calls:
        run(700.0, seed=1)
    assert set(calls) == outputs.keys()  # every second step


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (UNET_HOSTS["sd1"].build, {"reuse": None}, "reuse_attention=True: needs reuse"),
        (UNET_HOSTS["sd1"].build, {"target": "stack"}, "needs target='attn' or 'kv', not 'stack'"),
        (UNET_HOSTS["dit"].build, {"target": "attn"}, "only on UNets that have attention at"),
        (SUPPORTED["flux"].build, {}, "means nothing on a Flux"),
    ],
)
def test_where_self_attention_cannot_be_used_again(
    build: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tomesd.apply_patch(build(), ratio=0.0, **{"reuse": 2, **options}, reuse_attention=True)


def test_self_attention_is_used_again_beside_a_controlnet() -> None:
    pipe = make_controlnet_pipeline()
    tomesd.apply_patch(pipe, ratio=0.0, reuse=2, reuse_attention=True)
    assert tomesd.describe(pipe, 128, 128).parts[0].settings.reuse_attention


def test_reuse_goes_with_a_controlnet_on_a_unet() -> None:
    host, model, control = UNET_HOSTS["sd1"], make_unet(), make_controlnet()
    inputs = UNET_HOSTS["controlnet"].inputs(16, 16, 2, 0, 900)
    with torch.no_grad():
        down, middle = control(**inputs, return_dict=False)
    inputs = host.inputs(16, 16, 2, 0, 900)
    inputs |= {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
    tomesd.apply_patch(model, **REUSE)
    with torch.no_grad():
        computed = model(**inputs).sample
        reused = model(**inputs | {"timestep": torch.tensor(900 - 1e-3)}).sample
    assert_rounding(reused, computed, 5e-3)


@pytest.mark.parametrize("size", [(16, 16), (13, 18)])
def test_reuse_goes_with_control_in_comfyui(size: tuple[int, int]) -> None:
    host = LDM_HOSTS["comfy-unet"]
    model, (h, w) = host.build(), size
    sizes = [(-(-h // scale), -(-w // scale)) for scale in (1, 1, 2, 2, 4, 4)]
    channels = (32, 32, 32, 64, 64, 64)
    control = [torch.randn(2, c, *hw) for c, hw in zip(channels, sizes, strict=True)]

    def run(time: float) -> Tensor:
        arguments = host.arguments(h, w, 2, 0, 0)
        arguments["timesteps"] = torch.full((2,), time)
        kinds = {"input": control, "middle": control[-1:], "output": control}
        arguments["control"] = {kind: list(residuals) for kind, residuals in kinds.items()}
        with torch.no_grad():
            return model(**arguments)

    tomesd.apply_patch(model, **REUSE)
    computed = run(900.0)
    assert_rounding(run(900.0 - 1e-3), computed, 5e-3)


@pytest.mark.parametrize("name", ["dit", "pixart"])
def test_transformers_of_basic_blocks_reuse_runs_of_them(name: str) -> None:
    host = UNET_HOSTS[name]
    model = host.build()
    tomesd.apply_patch(model, **REUSE)
    runs: list[int] = []
    model.transformer_blocks[0].ff.register_forward_pre_hook(lambda *_: runs.append(1))
    computed = host.run(model, timestep=900)
    host.run(model, timestep=899)
    assert len(runs) == 1
    again = host.run(model, timestep=900)
    assert torch.equal(again, computed) and len(runs) == 2


def test_steps_are_told_apart_by_their_times() -> None:
    steps = Steps()

    def enter(time: float, size: tuple[int, ...] = (2, 16), started: bool = True) -> str:
        resized = steps.enter(time, 1 - time / 10, size)
        moment = steps.moment(Settings(reuse=3, reuse_start=0.0 if started else 1.0))
        return f"{moment.nth}{' reuses' * moment.reuses}{' first' * moment.first}{'!' * resized}"

    # Two calls at each time, as split guidance makes them; every third step runs.
    assert [enter(t) for t in (9, 9, 8, 8, 7, 7, 6, 6, 5)] == [
        "0 first!", "1 first", "0 reuses", "1 reuses", "0 reuses", "1 reuses", "0", "1", "0 reuses",
    ]  # fmt: skip
    assert enter(9) == "0 first"  # another image
    assert enter(8, started=False) == "0"
    assert enter(7) == "0 reuses"
    assert enter(6, (1, 16)) == "0 first!"  # of another size
    assert enter(5, (1, 16)) == "0 reuses"
    assert enter(5, (1, 16)) == "1 first"  # a call that had no counterpart before
    # Images of a single step, one after the other: what is kept does not pile up.
    assert {enter(5, (3, 16)).partition(" ")[0] for _ in range(40)} == set("01234567")


def test_nothing_is_reused_where_a_step_has_too_many_calls() -> None:
    """As for the views of a panorama: what the ninth gave is not the first one's."""
    steps, reused = Steps(), []
    for time in (9, 8, 7, 6, 5):
        calls = 9 if time > 6 else 2
        for _ in range(calls):
            steps.enter(time, 1 - time / 10, (1,))
            reused.append(steps.moment(Settings(reuse=2, reuse_start=0.0)).reuses)
    assert reused == [False] * (3 * 9 + 2) + [True] * 2


@pytest.mark.parametrize(("count", "longest"), [(28, 3), (20, 3), (10, 1), (8, 1), (4, 0)])
def test_results_are_used_for_a_part_of_the_way(count: int, longest: int) -> None:
    steps, run, runs = Steps(), 0, []
    settings = Settings(reuse=4, reuse_within=0.15)
    for number in range(count):
        steps.enter(-number, number / count, (1,))
        run = run + 1 if steps.moment(settings).reuses else 0
        runs.append(run)
    assert max(runs) == longest


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({"reuse": 3}, [*range(7), 9, 12, 15, 18, 21, 24, 27]),
        # Worked out by hand: 3 steps on from progress 0.21, 6 from 0.75.
        ({"reuse": 3, "reuse_end": 8}, [*range(7), 9, 12, 16, 21, 27]),
        ({"reuse": 4, "reuse_end": 2}, [*range(7), 10, 14, 17, 20, 23, 25, 27]),
    ],
)
def test_more_steps_are_left_out_on_the_way(options: dict[str, int], runs: list[int]) -> None:
    dit = SUPPORTED["flux"]
    model, inputs = dit.build(), dit.inputs()
    tomesd.apply_patch(model, ratio=0, reuse_start=0.25, depth=(0.0, 1.0), **options)
    ran = []
    for step in range(28):
        with block_calls(model) as calls:
            dit.run(model, at_steps_left(dit, inputs, 1 - step / 28))
        inner = {block for block, _ in calls} & set(inner_blocks(model))
        ran += [step] if inner else []
    assert ran == runs


SCHEDULERS = {
    "flow": (FlowMatchEulerDiscreteScheduler, {"shift": 3.0}),
    "flow, bfloat16": (FlowMatchEulerDiscreteScheduler, {"shift": 3.0}),
    "trailing": (DDIMScheduler, {"timestep_spacing": "trailing"}),
    "leading": (DDIMScheduler, {"timestep_spacing": "leading", "steps_offset": 1}),
    "linspace": (EulerDiscreteScheduler, {"timestep_spacing": "linspace"}),
}


@pytest.mark.parametrize("count", [2, 4, 8, 20, 28, 50])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_last_step_is_known_by_the_length_of_steps(kind: str, count: int) -> None:
    make, config = SCHEDULERS[kind]
    scheduler = make(**config)
    timeline = find_timeline(SimpleNamespace(scheduler=scheduler))
    if kind.startswith("flow"):
        timeline = replace(timeline, noise=1000.0, flow=True)
    scheduler.set_timesteps(count)
    times = scheduler.timesteps.float()
    if "bfloat16" in kind:
        times = times.bfloat16().float()
    steps, ends = Steps(), []
    for time in times.tolist():
        for _ in range(2):  # split guidance
            steps.enter(time, timeline.progress(time, 4096), (1, 4096))
            ends.append(steps.ends)
    assert ends[-2:] == [True, True]
    # Where the last time is hardly above 0, the one before may look like the last as well.
    assert not any(ends[:-4])
    if kind == "trailing":
        assert not any(ends[:-2])


@pytest.mark.parametrize("count", [2, 4, 6, 8, 12])
def test_the_last_step_is_known_where_steps_are_uneven(count: int) -> None:
    scheduler = LCMScheduler()
    timeline = find_timeline(SimpleNamespace(scheduler=scheduler))
    scheduler.set_timesteps(count)
    steps, ends = Steps(), []
    for time in scheduler.timesteps.tolist():
        steps.enter(time, timeline.progress(time, 4096), (1, 4096))
        ends.append(steps.ends)
    assert ends == [False] * (count - 1) + [True]


def run_steps(model: Any, dit: Any, times: tuple[float, ...], seed: int = 0) -> list[Tensor]:
    inputs = dit.inputs()
    return [dit.run(model, at_noise(dit, inputs, time)) for time in times]


TIMES = (0.9, 0.7, 0.5, 0.3)


def test_extrapolation_carries_on_a_straight_line() -> None:
    """Where everything changes evenly with time, extrapolating loses nothing."""
    call: Any = SimpleNamespace(
        settings=SimpleNamespace(extrapolate=True), patch=SimpleNamespace(kept=Kept())
    )
    base, slope = torch.randn(1, 4, 3), torch.randn(1, 4, 3)
    for number, time in enumerate((1.0, 0.8)):
        call.timestep, call.moment = torch.tensor([time]), Moment(first=number == 0)
        keep(call, "x", base + slope * time)
    call.timestep = torch.tensor([0.6])
    torch.testing.assert_close(recall(call, "x", base.shape, base), base + slope * 0.6)
    call.timestep, call.moment = torch.tensor([1.0]), Moment(first=True)  # another image
    keep(call, "x", base)
    call.timestep = torch.tensor([0.5])
    torch.testing.assert_close(recall(call, "x", base.shape, base), base)


@pytest.mark.parametrize("name", ["flux", "wan", "sd3"])
def test_reuse_repeats_copies_and_is_told_to_nobody(name: str) -> None:
    dit = SUPPORTED[name]
    model = dit.build()
    plain = run_steps(model, dit, TIMES)
    tomesd.apply_patch(model, **REUSE, extrapolate=True)
    once = run_steps(model, dit, TIMES)
    assert_differs(once[1], plain[1])
    assert torch.equal(once[0], plain[0])
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for one, two in zip(run_steps(other, dit, TIMES), once, strict=True):
            assert torch.equal(one, two)
    found: list[list[Tensor]] = []
    threads = [
        threading.Thread(target=lambda: found.append(run_steps(model, dit, TIMES))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for outputs in found:
        for one, two in zip(outputs, once, strict=True):
            assert_rounding(one, two)
    tomesd.remove_patch(model)
    assert all(torch.equal(*pair) for pair in zip(run_steps(model, dit, TIMES), plain, strict=True))


def test_batched_and_split_guidance_agree() -> None:
    dit = SUPPORTED["sd3"]
    model, inputs = dit.build(), dit.inputs()
    tomesd.apply_patch(model, **REUSE)
    together = [dit.run(model, at_noise(dit, inputs, time)) for time in TIMES]
    halves = [{k: v[i : i + 1] for k, v in inputs.items()} for i in (0, 1)]
    for time, both in zip(TIMES, together, strict=True):
        apart = [dit.run(model, at_noise(dit, half, time)) for half in halves]
        assert_rounding(torch.cat(apart), both)


def test_only_one_size_is_kept() -> None:
    dit = SUPPORTED["sd3"]
    model, inputs = dit.build(), dit.inputs()
    tomesd.apply_patch(model, **REUSE)

    def kept() -> int:
        return sum(t.numel() for t in vars(patch_of(model).kept.local).values())  # type: ignore[union-attr]

    dit.run(model, at_noise(dit, inputs, 0.9))
    before = kept()
    smaller = inputs | {"hidden_states": inputs["hidden_states"][..., :-4]}
    dit.run(model, at_noise(dit, smaller, 0.9))
    assert 0 < kept() < before


@pytest.mark.parametrize("time", [0.9, 0.7])
def test_an_image_that_fails_leaves_nothing_to_the_next(time: float) -> None:
    dit = SUPPORTED["sd3"]
    model = tomesd.apply_patch(dit.build(), **REUSE)
    expected = run_steps(model, dit, TIMES)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    for level, where in itertools.product(
        (0.9, time), (model.transformer_blocks[0], model.proj_out)
    ):
        spoiled = at_noise(dit, dit.inputs(seed=1), level)
        handle = where.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            dit.run(model, spoiled)
        handle.remove()
        found = run_steps(model, dit, TIMES)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["flux", "wan", "zimage"])
def test_a_step_of_another_batch_reuses_nothing(name: str) -> None:
    """Guidance may stop on the way, which halves the batch."""
    dit = SUPPORTED[name]
    model, inputs = dit.build(), dit.inputs()
    half = at_noise(dit, alone(inputs, 0), 0.8)
    plain = dit.run(model, half)
    tomesd.apply_patch(model, **REUSE)
    dit.run(model, at_noise(dit, inputs, 0.9))
    assert torch.equal(dit.run(model, half), plain)


def test_gradients_want_every_block() -> None:
    dit = SUPPORTED["flux"]
    model, inputs = dit.build(), dit.inputs()
    tomesd.apply_patch(model, **REUSE)
    run_steps(model, dit, (0.9,))
    with block_calls(model) as calls, pytest.warns(tomesd.MergeWarning, match="reuses nothing"):
        model(**at_noise(dit, inputs, 0.8))
    assert {block for block, _ in calls} >= inner_blocks(model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reuse": 1}, "reuse=1: must be None or an int of at least 2"),
        ({"reuse": 2.0}, "reuse=2.0: must be None or an int of at least 2"),
        ({"reuse_start": 0.5}, "reuse_start=0.5: needs reuse"),
        ({"extrapolate": True}, "extrapolate=True: needs reuse"),
        ({"reuse": 2, "reuse_start": 1.5}, "reuse_start=1.5: must be None or a number between 0"),
        ({"reuse": 2, "target": "attn"}, "reuse=2: needs target='stack' or 'block' on a"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    model = SUPPORTED["wan"].build()
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        tomesd.apply_patch(model, **options)


def test_models_that_cannot_reuse_say_so() -> None:
    model = LDM_HOSTS["ldm-stack"].build()
    with pytest.raises(ValueError, match="reuse=2: means nothing on a SpatialTransformer"):
        tomesd.apply_patch(model, reuse=2)


def test_a_unet_around_a_controlnet_says_so() -> None:
    model = diffusers.UNetControlNetXSModel(
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
        cross_attention_dim=16,
        ctrl_block_out_channels=(8, 16),
        num_attention_heads=2,
        ctrl_num_attention_heads=2,
    )
    with pytest.raises(ValueError, match="reuse=2: means nothing on a UNetControlNetXSModel"):
        tomesd.apply_patch(model, reuse=2)


def test_a_unet_without_a_middle() -> None:
    host, model = UNET_HOSTS["sd1"], make_unet(mid_block_type=None)
    tomesd.apply_patch(model, **REUSE)
    computed = host.run(model, timestep=900.0)
    assert_rounding(host.run(model, timestep=900.0 - 1e-3), computed, 5e-3)


@pytest.mark.parametrize("name", APART)
def test_where_nothing_is_reused_is_described(name: str) -> None:
    dit = SUPPORTED[name]
    model = tomesd.apply_patch(dit.build(), **REUSE)
    inputs = dit.inputs()
    assert "no step can be left out" in str(tomesd.describe(model, 64, 64, inputs=inputs))


def test_it_is_described() -> None:
    model = tomesd.apply_patch(SUPPORTED["sd3"].build(), preset="fast")
    told = str(tomesd.describe(model, 64, 64))
    for words in (
        "nothing is merged\n  coarse up",
        "one step in 6 runs the whole model, from progress 0.35",
    ):
        assert words in told


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        # Of ten steps: w is whole, c is coarse, - is left out.
        ("quality", "www-w-w-ww"),
        ("balanced", "ww-w--w--w"),
        ("fast", "ccccw--w-w"),
    ],
)
def test_presets_of_transformers_leave_steps_out(preset: Any, expected: str) -> None:
    dit = SUPPORTED["flux"]
    model, inputs = dit.build(), dit.inputs()
    with block_calls(model) as calls:
        dit.run(model, inputs)
    whole = calls[0][1]["hidden_states"].shape[1]
    tomesd.apply_patch(model, preset=preset)
    ran = ""
    for step in range(10):
        with block_calls(model) as calls:
            dit.run(model, at_steps_left(dit, inputs, 1 - step / 10))
        inner = [given for block, given in calls if block in inner_blocks(model)]
        tokens = max((given["hidden_states"].shape[1] for given in inner), default=0)
        ran += {0: "-", whole // 4: "c", whole: "w"}[tokens]
    assert ran == expected
    # An option that is given wins.
    assert patch_of(tomesd.apply_patch(model, preset=preset, reuse=5)).settings.reuse == 5  # type: ignore[union-attr]
