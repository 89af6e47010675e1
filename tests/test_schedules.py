"""Ratios that change on the way, or differ between layers; and tokens that are protected."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo_ldm
from diffusers import (
    DDIMInverseScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    IPNDMScheduler,
    ScoreSdeVeScheduler,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.mochi.pipeline_mochi import linear_quadratic_schedule
from hypothesis import given
from hypothesis import strategies as st
from merging_dit import SUPPORTED, at_steps_left
from PIL import Image
from torch._dynamo.testing import CompileCounterWithBackend
from zoo_diffusers import HOSTS, make_sd_pipeline

import tomesd
from tomesd.evaluation.variants import make_variants, patched_with
from tomesd.generation import save_image
from tomesd.hosts.timeline import find_timeline
from tomesd.hosts.unets import DEFAULTS
from tomesd.kernels import Cells
from tomesd.metric import angle_to_mean, mask_on_grid
from tomesd.patch import patch_of
from tomesd.schedule import LinearQuadratic, Timeline, ratio_at
from tomesd.selectors import bipartite
from tomesd.settings import Settings

SD1 = HOSTS["sd1"]
NOISE = Timeline(999, shares=tuple((t + 1) / 1000 for t in range(1000)))


def run(model: Any, time: float = 500, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return SD1.run(model, timestep=time, **options)


@contextmanager
def tokens_seen(model: Any, layer: str = "attn1") -> Iterator[list[int]]:
    """How many tokens the layers of a name work on, in the order in which they run."""
    seen: list[int] = []
    modules = [m for name, m in model.named_modules() if name.endswith("." + layer)]
    handles = [
        m.to_q.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
        if hasattr(m, "to_q")
        else m.net[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
        for m in modules
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@given(
    time=st.floats(0, 999),
    ratio=st.floats(0, 1),
    end=st.floats(0, 1),
    shape=st.sampled_from(["linear", "cosine"]),
)
def test_ratios_go_from_one_to_the_other(time: float, ratio: float, end: float, shape: str) -> None:
    settings = Settings(ratio=ratio, ratio_end=end, schedule=shape)
    found = ratio_at(time, settings, NOISE)
    assert min(ratio, end) - 0.025 <= found <= max(ratio, end) + 0.025
    assert abs(found * 20 - round(found * 20)) < 1e-9
    assert abs(ratio_at(999, settings, NOISE) - ratio) <= 0.025 + 1e-9
    assert abs(ratio_at(0, settings, NOISE) - end) <= 0.025 + 1e-9


def test_the_shapes_of_schedules() -> None:
    linear, cosine = (
        [
            ratio_at(999 * (1 - p / 10), Settings(ratio=1, ratio_end=0, schedule=s), NOISE)
            for p in range(11)
        ]
        for s in ("linear", "cosine")
    )
    assert linear == [pytest.approx(1 - p / 10) for p in range(11)]
    wanted = [0.5 * (1 + math.cos(math.pi * p / 10)) for p in range(11)]
    assert cosine == [pytest.approx(w, abs=0.026) for w in wanted]


def test_lists_and_functions() -> None:
    steps = Settings(schedule=[0.6, 0.5, 0.4])
    assert [ratio_at(t, steps, NOISE) for t in (999, 700, 600, 400, 300, 0)] == [
        0.6,
        0.6,
        0.5,
        0.5,
        0.4,
        0.4,
    ]
    assert ratio_at(0, Settings(schedule=lambda p: 0.25 + p / 2), NOISE) == 0.75
    with pytest.raises(ValueError, match=r"schedule\(1\) = 2: must be a number between 0 and 1"):
        ratio_at(0, Settings(schedule=lambda p: 2), NOISE)
    with pytest.raises(ValueError, match=r"schedule\(1\) = 'half': must be a number"):
        ratio_at(0, Settings(schedule=lambda p: "half"), NOISE)


def test_ranges_and_thresholds() -> None:
    """None: as the settings say."""
    middle = Settings(start=0.25, end=0.75)
    found = [ratio_at(t, middle, NOISE) for t in (999, 760, 740, 500, 260, 240, 0)]
    assert found == [0, 0, None, None, None, 0, 0]
    quiet = Settings(tau=0.2)
    assert [ratio_at(t, quiet, NOISE) for t in (999, 200, 199, 198, 0)] == [0, 0, 0, None, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "linear"}, "needs ratio_end"),
        (
            {"schedule": "quadratic", "ratio_end": 0.1},
            "schedule='quadratic': must be None or 'linear', 'cosine'",
        ),
        ({"schedule": []}, r"schedule=\[\]: must be"),
        ({"schedule": [0.5, 1.5]}, r"schedule=\[0.5, 1.5\]: must be .* between 0 and 1"),
        ({"schedule": 3}, "schedule=3: must be None"),
        ({"schedule": [("nearest", 0.5)]}, "must be .* also with a selector"),
        ({"schedule": [("grid", 0.5, 0.2)]}, "must be .* also with a selector"),
        (
            {"schedule": [("grid", 0.5)], "protect": "guidance"},
            "protect: needs selector='bipartite', not 'grid'",
        ),
        ({"ratio_end": 0.3}, "ratio_end: needs schedule"),
        ({"start": 0.8, "end": 0.2}, "start=0.8: must be below end=0.2"),
        ({"tau": 1.5}, r"tau=1\.5"),
        (
            {"level_ratios": {3: 0.5}},
            r"level_ratios=\{3: 0.5\}: must be None or a dict from 1, 2, 4, 8",
        ),
        ({"level_ratios": [0.5]}, "level_ratios=.*must be None or a dict"),
        ({"kind_ratios": {"mlp": 2}}, r"kind_ratios=\{'mlp': 2\}: must be .* between 0 and 1"),
        ({"kind_ratios": {"attn": 0.5}, "target": "block"}, "needs target='attn' or 'kv'"),
        ({"proportional": True, "target": "stack"}, "needs target='attn' or 'kv'"),
        ({"merge_attn": False, "target": "kv"}, "merge_attn=False"),
        ({"protect": "faces"}, "protect='faces'"),
        (
            {"protect": torch.ones(4)},
            r"protect=a tensor \[4\]: must be None or 'guidance' or a tensor",
        ),
        ({"protect": "guidance", "selector": "kmeans"}, "needs selector='bipartite'"),
        ({"preset": "best"}, "preset='best': must be one of 'quality', 'balanced', 'fast'"),
    ],
)
def test_bad_options_are_named_and_change_nothing(options: dict[str, Any], message: str) -> None:
    model = SD1.build()
    with pytest.raises((TypeError, ValueError), match=message):
        tomesd.apply_patch(model, **options)
    assert patch_of(model) is None


def test_the_timestep_alone_says_how_much_is_merged() -> None:
    model = tomesd.apply_patch(SD1.build(), window=0, schedule=[0.5, 0.25])
    plain = SD1.build()
    finest = 16 * 16
    for times in ((900, 100), (100, 900), (100, 100)):
        for time in times:
            with tokens_seen(model) as seen:
                run(model, time)
            assert min(n for n in seen if n > finest / 4) == finest * (0.5 if time > 500 else 0.75)
    outside = tomesd.apply_patch(model, start=0.6)
    assert torch.equal(run(outside, 900), run(plain, 900))
    assert not torch.equal(run(outside, 100), run(plain, 100))


@pytest.mark.parametrize("build", [SD1.build, SUPPORTED["sd3"].build])
def test_a_schedule_may_change_the_selector(build: Any) -> None:
    """Each part of the way merges as if its selector and ratio had been given alone."""
    host = SD1 if build is SD1.build else SUPPORTED["sd3"]
    stages = [("grid", 0.75), ("kmeans", 0.5), 0.25]

    def outputs(**options: Any) -> list[torch.Tensor]:
        model = tomesd.apply_patch(build(), when="always", window=0, metric="input", **options)
        if host is SD1:
            return [SD1.run(model, timestep=time) for time in (990, 500, 10)]
        dit: Any = host
        inputs = dit.inputs()
        return [dit.run(model, at_steps_left(dit, inputs, left)) for left in (0.99, 0.5, 0.01)]

    mixed = outputs(schedule=stages)
    alone = [
        outputs(selector="grid", ratio=0.75, end=1.0)[0],
        outputs(selector="kmeans", ratio=0.5, end=1.0)[1],
        outputs(ratio=0.25, end=1.0)[2],
    ]
    for one, two in zip(mixed, alone, strict=True):
        assert torch.equal(one, two)
    assert hash(Settings(schedule=stages)) == hash(Settings(schedule=[*stages]))


def test_a_function_merges_whatever_the_ratio_says() -> None:
    model = tomesd.apply_patch(SD1.build(), 0, window=0, schedule=lambda progress: 0.5)
    with tokens_seen(model) as seen:
        run(model)
    assert 128 in seen and 256 not in seen


def test_nothing_to_merge_at_this_time_is_no_reason_to_warn(recwarn: Any) -> None:
    run(tomesd.apply_patch(SD1.build(), start=0.6), 900)
    assert not [w for w in recwarn if w.category is tomesd.MergeWarning]


def test_thresholds_know_the_noise_of_the_scheduler() -> None:
    pipe = make_sd_pipeline()
    pipe.set_progress_bar_config(disable=True)
    tomesd.apply_patch(pipe, tau=0.5)
    kept = pipe.scheduler.alphas_cumprod
    with tokens_seen(pipe.unet) as seen:
        pipe("a fox", num_inference_steps=8, height=64, width=64, output_type="np")
    blocks = len([n for n, _ in pipe.unet.named_modules() if n.endswith(".attn1")])
    calls = [seen[i : i + blocks] for i in range(0, len(seen), blocks)]
    merged = [max(call) < max(max(c) for c in calls) for call in calls]
    times = [int(t) for t in pipe.scheduler.timesteps]
    assert merged == [bool(1 - kept[t] < 0.5) for t in times]
    assert any(merged) and not all(merged)


def test_a_threshold_needs_a_scheduler() -> None:
    model = SD1.build()
    with pytest.raises(ValueError, match=r"tau=0\.5: needs a scheduler"):
        tomesd.apply_patch(model, tau=0.5)
    assert patch_of(model) is None


def test_the_noise_of_other_hosts() -> None:
    model = zoo_ldm.build_latent_diffusion()
    noise = find_timeline(model)
    assert noise.noise == len(model.alphas_cumprod) - 1 == 999
    assert noise.shares is not None
    assert noise.shares[500] == pytest.approx(1 - float(model.alphas_cumprod[500]), rel=1e-6)
    assert find_timeline(SD1.build()) == Timeline()
    sampling = zoo_ldm.comfy("model_sampling").ModelSamplingDiscrete()
    found = find_timeline(SimpleNamespace(model=SimpleNamespace(model_sampling=sampling)))
    assert found.noise == 999 and found.shares is not None
    # Stable Diffusion's betas, as ComfyUI has them.
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    share = 1 - (1 - betas).cumprod(0)
    torch.testing.assert_close(
        torch.tensor(found.shares, dtype=torch.float64), share, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("scheduler", "tokens"),
    [
        (FlowMatchEulerDiscreteScheduler(shift=1.0), 1024),
        (FlowMatchEulerDiscreteScheduler(shift=3.0), 1024),
        (FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), 1024),
        (FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), 4096),
        (
            UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
            ),
            1024,
        ),
    ],
)
def test_progress_of_a_flow_is_the_share_of_its_steps(scheduler: Any, tokens: int) -> None:
    """Wherever the scheduler puts its noise levels; as pipelines set the scheduler up."""
    steps, config = 20, scheduler.config
    if config.get("use_dynamic_shifting"):
        mu = calculate_shift(
            tokens,
            config.base_image_seq_len,
            config.max_image_seq_len,
            config.base_shift,
            config.max_shift,
        )
        scheduler.set_timesteps(sigmas=[1 - k / steps for k in range(steps)], mu=mu)
    else:
        scheduler.set_timesteps(steps)
    timeline = replace(find_timeline(SimpleNamespace(scheduler=scheduler)), noise=1000.0, flow=True)
    found = [timeline.progress(float(time), tokens) for time in scheduler.timesteps]
    assert found == pytest.approx([k / steps for k in range(steps)], abs=0.06)


@pytest.mark.parametrize("steps", [4, 28, 64])
def test_progress_of_mochi_is_the_share_of_its_steps(steps: int) -> None:
    levels = linear_quadratic_schedule(steps, 0.025)
    found = [1 - LinearQuadratic().steps_left(float(level), 1024) for level in levels]
    assert found == pytest.approx([k / steps for k in range(steps)])


@pytest.mark.parametrize(
    "options", [{"start": 0.5}, {"schedule": [0.5, 0.2]}, {"preset": "fast"}], ids=str
)
def test_timesteps_that_are_no_count_are_refused(options: dict[str, Any]) -> None:
    pipe = make_sd_pipeline()
    config = {"timestep_type": "continuous", "prediction_type": "v_prediction"}
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, **config)
    with pytest.raises(ValueError, match="need timesteps that count down to 0") as caught:
        tomesd.apply_patch(pipe, **options)
    assert next(iter(options)) in str(caught.value)
    assert patch_of(pipe.unet) is None
    tomesd.apply_patch(pipe, 0.5)


@pytest.mark.parametrize("kind", [DDIMInverseScheduler, IPNDMScheduler, ScoreSdeVeScheduler])
def test_schedulers_with_other_times_are_told_apart(kind: Any) -> None:
    pipe = make_sd_pipeline()
    pipe.scheduler = kind()
    with pytest.raises(ValueError, match="need timesteps that count down to 0"):
        tomesd.apply_patch(pipe, reuse=2)
    patch = patch_of(tomesd.apply_patch(pipe).unet)
    assert patch is not None and patch.settings.ratio == 0.5


def test_a_compiled_model_is_compiled_for_each_ratio() -> None:
    torch._dynamo.reset()
    model = tomesd.apply_patch(SD1.build(), schedule=[0.5, 0.25])
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    for time in (900, 800, 200, 100, 700):
        torch.testing.assert_close(run(compiled, time), run(model, time), rtol=1e-4, atol=1e-5)
    frames = counter.frame_count
    for time in (850, 750, 250, 150):
        run(compiled, time)
    assert counter.frame_count == frames
    torch._dynamo.reset()


def test_ratios_by_level_and_kind() -> None:
    model = tomesd.apply_patch(
        SD1.build(), window=0, merge_mlp=True, level_ratios={2: 0.25}, kind_ratios={"mlp": 0.25}
    )
    for layer, wanted in (("attn1", {128, 48}), ("ff", {192, 56})):
        with tokens_seen(model, layer) as seen:
            run(model)
        assert {n for n in seen if n > 16} == wanted


@pytest.mark.parametrize("option", [{"end": 0.5}, {"tau": 0.5}, {"schedule": [0.5, 0]}])
def test_ratios_by_level_stop_with_the_others(option: dict[str, Any]) -> None:
    pipe = make_sd_pipeline()
    model = pipe.unet = SD1.build()
    tomesd.apply_patch(pipe, 0.0, level_ratios={2: 0.25}, window=0, **option)
    seen_at = {}
    for time in (900, 100):
        with tokens_seen(model, "attn1") as seen:
            run(model, time)
        seen_at[time] = seen
    merges_late = "tau" in option
    assert (48 in seen_at[100], 48 in seen_at[900]) == (merges_late, not merges_late)


@pytest.mark.parametrize("option", [{"share": "steps"}, {"metric": "previous"}])
def test_an_image_made_from_another_one_knows_nothing_of_the_image_before(
    option: dict[str, Any],
) -> None:
    """It begins at a time below that at which the other one stopped merging."""
    model = tomesd.apply_patch(SD1.build(), 0.5, end=0.5, **option)
    for time in (900, 600, 20):
        run(model, time)
    alone = tomesd.apply_patch(SD1.build(), 0.5, end=0.5, **option)
    assert torch.equal(run(model, 550), run(alone, 550))


def test_protected_tokens_stay_alone() -> None:
    mask = torch.zeros(32, 32)
    mask[4:16, 8:20] = 1
    model = tomesd.apply_patch(SD1.build(), 0.5, protect=mask)
    plans: list[Any] = []
    patch_of(model).observer = lambda scope, block, plan: plans.append(plan)
    run(model)
    covered = mask_on_grid(mask, (16, 16), 2)[0]
    assert covered.view(16, 16)[2:8, 4:10].all() and covered.sum() == 36
    for plan in plans:
        assert plan.slot.shape[1] - plan.size.shape[1] == 128
        assert (plan.size.gather(1, plan.slot)[:, covered] == 1).all()


def test_what_guidance_changed_is_protected_at_the_next_step() -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5, protect="guidance", protect_share=0.25)
    plans: list[Any] = []
    patch_of(model).observer = lambda scope, block, plan: plans.append(plan)
    first = run(model, 900)
    assert not _all_alone(plans, torch.ones(2, 256, dtype=torch.bool))
    plans.clear()
    run(model, 800)
    difference = (first[0] - first[1]).abs().mean(0).flatten()
    most = difference >= difference.topk(64).values[-1]
    assert _all_alone(plans, most.expand(2, -1))
    plans.clear()
    run(model, 900)  # a new image: nothing is known of it
    assert not _all_alone(plans, most.expand(2, -1))


def _all_alone(plans: list[Any], tokens: torch.Tensor) -> bool:
    return all(bool((p.size.gather(1, p.slot)[tokens] == 1).all()) for p in plans)


def test_the_previous_output_is_what_the_next_step_matches_on() -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5, window=0, use_rand=False, metric="previous")
    block = next(m for m in model.modules() if type(m).__name__ == "BasicTransformerBlock")
    outputs, plans = [], []
    block.register_forward_hook(lambda _, args, output: outputs.append(output.clone()))

    def record(scope: Any, where: Any, plan: Any) -> None:
        if where is block:
            plans.append(plan)

    patch_of(model).observer = record
    inputs: list[torch.Tensor] = []
    block.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
    for time in (900, 800, 850):
        run(model, time)
    cells = Cells.of(16, 16, 2, 2)
    for plan, metric in zip(plans, (inputs[0], outputs[0], inputs[2]), strict=True):
        assert torch.equal(plan.slot, bipartite(metric, cells, 128).slot)


@given(st.integers(0, 1000))
def test_closer_to_each_other_in_their_distance_from_the_mean(seed: int) -> None:
    x = torch.randn(1, 12, 5, generator=torch.Generator().manual_seed(seed))
    similarity = torch.cosine_similarity(x, x.mean(1, keepdim=True), dim=2)[0]
    angle = angle_to_mean(x)[0]
    cosines = angle @ angle.T
    distance = (similarity[:, None] - similarity).abs().flatten()
    gain = cosines.flatten()[:, None] - cosines.flatten()  # of every pair over every other
    lead = distance - distance[:, None]
    # Near 1, cosines are flat: what rounding leaves of a difference may have any sign.
    assert (gain[lead > 1e-4] > -1e-6).all()
    assert (gain[lead > 0.05] > 0).all()


def test_presets_are_settings_that_options_win_over() -> None:
    model = tomesd.apply_patch(SD1.build(), preset="fast")
    assert patch_of(model).asked == Settings(ratio=0.0, reuse=2, reuse_within=0.15)
    tomesd.apply_patch(model, 0.25, preset="fast", seed=3)
    assert patch_of(model).asked == Settings(ratio=0.25, reuse=2, reuse_within=0.15, seed=3)
    assert patch_of(model).settings == patch_of(model).asked.filled(**DEFAULTS)


def test_an_option_that_is_given_wins_also_when_it_equals_its_default() -> None:
    model = tomesd.apply_patch(SD1.build(), ratio=0.5, preset="balanced")
    assert patch_of(model).settings.ratio == 0.5
    tomesd.apply_patch(model, preset="balanced", reuse_start=0.0, reuse_within=None)
    assert (patch_of(model).settings.reuse_start, patch_of(model).settings.reuse_within) == (
        0,
        None,
    )


@pytest.mark.parametrize("preset", ["quality", "balanced", "fast"])
@pytest.mark.parametrize("build", [SD1.build, SUPPORTED["flux"].build])
def test_a_preset_may_be_kept_from_leaving_out_steps(build: Any, preset: Any) -> None:
    settings = patch_of(tomesd.apply_patch(build(), 0.5, preset=preset, reuse=None)).settings
    assert (settings.reuse, settings.reuse_start, settings.reuse_within) == (None, None, None)
    with pytest.raises(ValueError, match=r"reuse_start=0\.25: needs reuse"):
        tomesd.apply_patch(build(), preset=preset, reuse=None, reuse_start=0.25)


def test_copies_keep_notes_of_their_own() -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5, metric="previous")
    run(model, 900)
    other = copy.deepcopy(model)
    expected = run(model, 800)
    assert not torch.equal(run(other, 800), expected)  # it has seen no step before
    fresh = tomesd.apply_patch(SD1.build(), 0.5, metric="previous")
    assert torch.equal(run(fresh, 800), run(copy.deepcopy(model), 800))


def test_ratios_by_level_come_back_from_a_written_run() -> None:
    """Keys of JSON are words."""
    pipe = make_sd_pipeline()
    (_, variant) = make_variants([0.5], Settings(level_ratios={1: 0.5, 2: 0.25}))
    assert variant.settings["level_ratios"] == {"1": 0.5, "2": 0.25}
    with patched_with(pipe, variant):
        assert patch_of(pipe.unet).settings.level_ratios == {1: 0.5, 2: 0.25}


def test_images_of_a_schedule_that_is_a_function_can_be_saved(tmp_path: Path) -> None:
    settings = Settings(schedule=lambda progress: 0.5)
    save_image(Image.new("RGB", (8, 8)), tmp_path / "a.png", {"merge": vars(settings)})
    assert "function" in Image.open(tmp_path / "a.png").text["tomesd"]
