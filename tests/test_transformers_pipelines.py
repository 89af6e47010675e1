"""Whole pipelines around diffusion transformers, patched as a user would."""

from __future__ import annotations

import logging
from typing import Any

import diffusers
import pytest
import torch
from merging_dit import ROWS
from pipelines_dit import PIPELINES, run
from torch import Tensor, nn
from zoo_diffusers import module_state

import tomesd
from tomesd.generation import sample
from tomesd.patch import patch_of
from tomesd.settings import Settings

UNSUPPORTED = {"sana"}
SUPPORTED = [name for name in PIPELINES if name not in UNSUPPORTED]
TRANSFORMERS = [name for name in SUPPORTED if name != "pixart_sigma"]  # which has a UNet's blocks


def models(pipe: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def pipeline_state(pipe: Any) -> dict[str, Any]:
    """Classes and attribute names of all models of a pipeline, and of the pipeline itself."""
    states: dict[str, Any] = {name: module_state(part) for name, part in models(pipe).items()}
    return states | {"pipeline": (type(pipe), frozenset(vars(pipe)))}


def test_commands_say_that_they_make_no_videos() -> None:
    pipe, _ = PIPELINES["wan"]()
    with pytest.raises(ValueError, match="a WanPipeline makes videos, and this makes images only"):
        sample(pipe, "a cat", size=(128, 128), steps=1)


def made(pipe: Any, arguments: dict[str, Any], **changes: Any) -> Tensor:
    """One run; some pipelines draw from the global generator to encode a picture."""
    torch.manual_seed(0)
    return run(pipe, arguments, **changes)


# Qwen-Edit makes any picture large, and takes a second to encode it.
@pytest.mark.parametrize("name", [name for name in SUPPORTED if name != "qwen_edit"])
@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
def test_pipeline_merges_repeats_and_is_put_back(name: str) -> None:
    pipe, arguments = PIPELINES[name]()
    plain = made(pipe, arguments)
    before = pipeline_state(pipe)
    assert tomesd.apply_patch(pipe, 0.5, when="always") is pipe
    merged = made(pipe, arguments)
    assert merged.shape == plain.shape and merged.isfinite().all()
    assert (merged - plain).std() > 0.01 * plain.std()
    assert torch.equal(made(pipe, arguments), merged)
    tomesd.apply_patch(pipe, 0.0)
    assert torch.equal(made(pipe, arguments), plain)
    assert tomesd.remove_patch(pipe) is pipe
    assert pipeline_state(pipe) == before
    assert torch.equal(made(pipe, arguments), plain)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_other_pipelines_are_refused_and_left_as_they_are(name: str) -> None:
    pipe, _ = PIPELINES[name]()
    before = pipeline_state(pipe)
    with pytest.raises(tomesd.UnsupportedModelError):
        tomesd.apply_patch(pipe)
    assert pipeline_state(pipe) == before


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_first_half_of_the_way_merges(name: str) -> None:
    """By what the scheduler says about noise, whatever times the pipeline gives to the model."""
    pipe, arguments = PIPELINES[name]()
    tomesd.apply_patch(pipe, 0.5, when="always")
    steps = 4
    denoisers = [part for part in (pipe.transformer, getattr(pipe, "transformer_2", None)) if part]
    merging: dict[nn.Module, list[bool]] = {part: [] for part in denoisers}

    def note(module: Any, *_: Any) -> None:
        """What the call before this one did."""
        if patch_of(module).decisions:
            merging[module].append(any(d.remove > 0 for d in patch_of(module).decisions))

    for part in denoisers:
        part.register_forward_pre_hook(note)
    made(pipe, arguments, num_inference_steps=steps)
    for part in denoisers:
        note(part)
    calls = [call for part in denoisers for call in merging[part]]

    times = pipe.scheduler.timesteps.float()
    most = pipe.scheduler.config.num_train_timesteps
    if type(pipe.scheduler).__name__ != "FlowMatchEulerDiscreteScheduler":
        most -= 1
    expected = [float(1 - time / most) <= 0.5 for time in times]
    if name == "mochi":  # whose pipeline has steps of its own
        expected = [step / steps <= 0.5 for step in range(steps)]
    assert True in expected and False in expected
    each = len(calls) // steps  # in a step: one, or one for each prompt
    assert calls == [step for step in expected for _ in range(each)]


GROWING = {"use_dynamic_shifting": True}
LINEAR = {"base_shift": 0.25, "max_shift": 0.75, "time_shift_type": "linear"}


@pytest.mark.parametrize(
    ("name", "config"),
    [("flux", GROWING), ("flux2", GROWING), ("qwen", GROWING), ("cogview4", GROWING | LINEAR)],
)
@pytest.mark.parametrize("steps", [4, 12])
def test_progress_counts_steps_where_they_shift_with_the_size(
    name: str, config: dict[str, Any], steps: int
) -> None:
    """Every pipeline has its own way to compute how much. The last step is known, too."""
    pipe, arguments = PIPELINES[name]()
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**config)
    tomesd.apply_patch(pipe, ratio=0.0, reuse=99, reuse_start=0.0)
    progress, ends = [], []

    def note(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        progress.append(patch_of(pipe.transformer).steps.progress)
        ends.append(patch_of(pipe.transformer).steps.ends)
        return values

    made(pipe, arguments, num_inference_steps=steps, callback_on_step_end=note)
    whole = steps - 1 if name == "cogview4" else steps  # its last step is at the end
    for number, found in enumerate(progress):
        assert abs(found - number / whole) < 0.1
    assert ends[-1] and not any(ends[:-2])


def test_both_transformers_of_wan() -> None:
    """The one for much noise, and the one for little."""
    pipe, arguments = PIPELINES["wan"]()
    arguments["num_inference_steps"] = 4
    plain = made(pipe, arguments)
    outputs = {}
    for parts in (("transformer",), ("transformer_2",), ("transformer", "transformer_2")):
        tomesd.apply_patch(pipe, 0.5, when="always", end=1.0)
        for name in {"transformer", "transformer_2"} - set(parts):
            tomesd.remove_patch(getattr(pipe, name))
        outputs[parts] = made(pipe, arguments)
        assert (outputs[parts] - plain).std() > 0.01 * plain.std()
    first, second, both = outputs.values()
    assert not torch.equal(first, both) and not torch.equal(second, both)
    tomesd.remove_patch(pipe)
    assert torch.equal(made(pipe, arguments), plain)


@pytest.mark.parametrize("name", ["flux_controlnet", "sd3_controlnet"])
def test_controlnets_are_patched_along(name: str, caplog: Any) -> None:
    pipe, arguments = PIPELINES[name]()
    plain = made(pipe, arguments)
    with caplog.at_level(logging.INFO, logger="tomesd"):
        tomesd.apply_patch(pipe, 0.5, when="always", end=1.0)
    assert "controlnet" in caplog.text
    seen: dict[str, set[int]] = {"controlnet": set(), "transformer": set()}
    for part, tokens in seen.items():
        block = getattr(pipe, part).transformer_blocks[1]
        layer = block.attn.to_q
        layer.register_forward_pre_hook(lambda m, args, t=tokens: t.add(args[0].shape[1]))
    both = made(pipe, arguments)
    assert seen == {"controlnet": {12}, "transformer": {12}}
    tomesd.remove_patch(pipe.controlnet)
    alone = made(pipe, arguments)
    assert (both - alone).std() > 1e-3 * plain.std() and (alone - plain).std() > 0.01 * plain.std()


@pytest.mark.parametrize("name", ["flux_controlnet", "sd3_controlnet", "wan"])
def test_each_part_gets_its_own_settings_back(name: str) -> None:
    pipe, arguments = PIPELINES[name]()
    first, second = pipe.transformer, getattr(pipe, "controlnet", None) or pipe.transformer_2
    tomesd.apply_patch(first, 0.25, when="always", end=1.0)
    tomesd.apply_patch(second, 0.5, when="always", seed=3, end=1.0)
    before = made(pipe, arguments)
    patches = patch_of(first), patch_of(second)
    with tomesd.patched(pipe, 0.4, when="always", end=1.0):
        assert not torch.equal(made(pipe, arguments), before)
        assert {patch_of(part).settings.ratio for part in (first, second)} == {0.4}
    assert (patch_of(first), patch_of(second)) == patches
    assert torch.equal(made(pipe, arguments), before)
    tomesd.remove_patch(second)
    with tomesd.patched(pipe, 0.4):
        assert patch_of(second) is not None
    assert patch_of(second) is None and patch_of(first) is patches[0]


@pytest.mark.parametrize("name", ["flux_true_cfg", "sd3"])
def test_an_image_reuses_nothing_of_the_image_before(name: str) -> None:
    """Which may have been a single step, or interrupted."""
    pipe, arguments = PIPELINES[name]()
    arguments["num_inference_steps"] = 4
    tomesd.apply_patch(pipe, ratio=0.0, reuse=3, reuse_start=0.0)
    alone = made(pipe, arguments)

    def interrupt(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = True
        return values

    for changes in ({"num_inference_steps": 1}, {"callback_on_step_end": interrupt}):
        made(pipe, arguments | changes, seed=5)
        assert torch.equal(made(pipe, arguments), alone)


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen"])
def test_pipelines_made_of_a_patched_one_share_its_patch(name: str) -> None:
    """As docs/methods.md says."""
    pipe, arguments = PIPELINES[name]()
    tomesd.apply_patch(pipe, 0.5, when="always")
    merged = made(pipe, arguments)
    auto = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    other = type(pipe).from_pipe(pipe, transformer=pipe.transformer)
    other.set_progress_bar_config(disable=True)
    assert auto.transformer is other.transformer is pipe.transformer
    assert torch.equal(made(other, arguments), merged)
    tomesd.remove_patch(other)
    assert patch_of(pipe.transformer) is None


def test_presets_and_options_together() -> None:
    """An option that means nothing on a transformer is refused beside a preset too."""
    pipe, _ = PIPELINES["flux"]()
    before = pipeline_state(pipe)
    with pytest.raises(ValueError, match="proportional=True: means nothing on a Flux"):
        tomesd.apply_patch(pipe, preset="quality", proportional=True)
    assert pipeline_state(pipe) == before
    tomesd.apply_patch(pipe, preset="quality")
    assert patch_of(pipe.transformer).settings.reuse == 2


# Pipelines whose models cannot run on shapes, or that are slow to describe.
DESCRIBED = ["flux_controlnet", "sd3_controlnet", "qwen", "wan", "ltx", "mochi", "cogvideox"]
DESCRIBED += ["bria"]


@pytest.mark.parametrize("name", DESCRIBED)
def test_described(name: str) -> None:
    """The pipeline knows how many pixels and frames become one token."""
    pipe, arguments = PIPELINES[name]()
    height, width, frames = (arguments.get(n) for n in ("height", "width", "num_frames"))
    tomesd.apply_patch(pipe, 0.5, when="always", end=1.0)
    told = tomesd.describe(pipe, height, width, frames)
    made(pipe, arguments)
    assert len(told.parts) == sum(type(part).__name__ in ROWS for part in models(pipe).values())
    for part in told.parts:
        (level,) = part.levels
        (decision,) = patch_of(models(pipe)[part.name]).decisions
        assert (level.tokens, level.merged_tokens) == (
            decision.tokens,
            decision.tokens - decision.remove,
        )
        assert level.merged_tokens == level.tokens // 2
        assert part.saved > 0.005
        assert isinstance(part.settings, Settings)
