"""Whole diffusers pipelines: patched as a user would, run for a few steps, and put back."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from zoo_diffusers import (
    CROSS,
    SDXL_CONFIG,
    make_controlnet,
    make_controlnet_pipeline,
    make_img2img_pipeline,
    make_inpaint_pipeline,
    make_sd_pipeline,
    make_sdxl_pipeline,
    module_state,
    noise,
    run_pipeline,
    tokens_into,
)

import tomesd

PIPELINES: dict[str, Callable[[], Any]] = {
    "txt2img": make_sd_pipeline,
    "img2img": make_img2img_pipeline,
    "inpaint": make_inpaint_pipeline,
    "controlnet": make_controlnet_pipeline,
    "sdxl": make_sdxl_pipeline,
}
MANY = pytest.mark.parametrize("name", list(PIPELINES))


@functools.cache
def _built(name: str) -> Any:
    return PIPELINES[name]()


def fresh(name: str) -> Any:
    """A copy of a pipeline whose models a test may patch."""
    return copy.deepcopy(_built(name))


def pipeline_state(pipe: Any) -> dict[str, Any]:
    """Classes and attribute names of all models of a pipeline, and of the pipeline itself."""
    models = {k: v for k, v in pipe.components.items() if isinstance(v, torch.nn.Module)}
    states = {k: module_state(v) for k, v in models.items()}
    return states | {"pipeline": (type(pipe), frozenset(vars(pipe)))}


@MANY
@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
def test_pipeline_merges_repeats_and_is_put_back(name: str) -> None:
    pipe = fresh(name)
    plain = run_pipeline(pipe, steps=3)
    before = pipeline_state(pipe)

    assert tomesd.apply_patch(pipe, ratio=0.5) is pipe
    torch.manual_seed(1)
    merged = run_pipeline(pipe, steps=3)
    assert merged.shape == plain.shape and merged.isfinite().all()
    assert (merged - plain).abs().max() > 1e-3
    torch.manual_seed(2)
    assert torch.equal(run_pipeline(pipe, steps=3), merged)

    tomesd.apply_patch(pipe, ratio=0)
    assert torch.equal(run_pipeline(pipe, steps=3), plain)
    assert tomesd.remove_patch(pipe) is pipe
    assert pipeline_state(pipe) == before
    assert torch.equal(run_pipeline(pipe, steps=3), plain)


@MANY
def test_patched_undoes_itself_after_success_and_after_failure(name: str) -> None:
    pipe = fresh(name)
    plain = run_pipeline(pipe, output_type="pt")
    before = pipeline_state(pipe)
    with tomesd.patched(pipe, ratio=0.5) as inside:
        assert inside is pipe
        merged = run_pipeline(pipe, output_type="pt")
    assert merged.isfinite().all() and not torch.equal(merged, plain)
    assert pipeline_state(pipe) == before

    def fail(*args: Any) -> None:
        raise KeyError("stopped half-way")

    with pytest.raises(KeyError, match="half-way"), tomesd.patched(pipe, ratio=0.5):
        run_pipeline(pipe, callback_on_step_end=fail)
    assert pipeline_state(pipe) == before
    assert torch.equal(run_pipeline(pipe, output_type="pt"), plain)


def test_sdxl_merges_at_the_defaults() -> None:
    """SDXL has no attention at full resolution: the first level that has it is merged."""
    pipe = tomesd.apply_patch(fresh("sdxl"), ratio=0.5)
    with tokens_into(pipe.unet) as seen:
        run_pipeline(pipe, size=128)  # latents 16 x 16, tokens 8 x 8 and 4 x 4
    levels = {name: shape[1] for name, shape in seen.items()}
    assert {n for k, n in levels.items() if k.startswith("down_blocks.1")} == {32}
    assert {n for k, n in levels.items() if k.startswith("up_blocks.1")} == {32}
    assert {n for k, n in levels.items() if k.startswith(("down_blocks.2", "mid"))} == {16}
    text = str(tomesd.describe(pipe, height=128, width=128))
    assert "64" in text and "32" in text


@pytest.mark.parametrize("name", ["txt2img", "sdxl"])
def test_one_patch_serves_many_sizes(name: str) -> None:
    """Sizes mixed on one patched pipeline give what a fresh patch gives for each of them."""
    mixed = tomesd.apply_patch(fresh(name))
    sizes = [{"height": 96, "width": 160}, {}, {"height": 104, "width": 72}, {}]
    for size in sizes:
        alone = tomesd.apply_patch(fresh(name))
        assert torch.equal(run_pipeline(mixed, **size), run_pipeline(alone, **size))


def test_patching_a_pipeline_patches_its_controlnet_and_says_so(caplog: Any) -> None:
    pipe = fresh("controlnet")
    with caplog.at_level(logging.INFO, logger="tomesd"):
        tomesd.apply_patch(fresh("txt2img"), 0.5)
        assert "controlnet" not in caplog.text.lower()
        tomesd.apply_patch(pipe, 0.5)
    said = [r for r in caplog.records if "controlnet" in r.getMessage().lower()]
    assert said and all(r.name.startswith("tomesd") and r.levelno == logging.INFO for r in said)
    assert "controlnet" in str(tomesd.describe(pipe, height=128, width=128)).lower()
    plain_state = module_state(_built("controlnet").controlnet)
    assert module_state(pipe.controlnet) != plain_state
    with tokens_into(pipe.controlnet) as control, tokens_into(pipe.unet) as unet:
        run_pipeline(pipe)
    for seen in (control, unet):
        assert {shape[1] for n, shape in seen.items() if n.startswith("down_blocks.0")} == {128}
        assert {shape[1] for n, shape in seen.items() if n.startswith("down_blocks.1")} == {64}


def test_the_controlnet_itself_gives_another_output() -> None:
    pipe = fresh("controlnet")
    inputs = {
        "sample": noise(1, 4, 16, 16, seed=0),
        "timestep": 500,
        "encoder_hidden_states": noise(1, 7, CROSS, seed=1),
        "controlnet_cond": noise(1, 3, 128, 128, seed=2),
    }
    with torch.no_grad():
        plain = pipe.controlnet(**inputs).mid_block_res_sample
        with tomesd.patched(pipe, 0.5):
            merged = pipe.controlnet(**inputs).mid_block_res_sample
        assert (merged - plain).abs().max() > 1e-4
        assert torch.equal(pipe.controlnet(**inputs).mid_block_res_sample, plain)


def test_every_one_of_several_controlnets_is_patched() -> None:
    several = diffusers.MultiControlNetModel([make_controlnet(), make_controlnet()])
    cls = diffusers.StableDiffusionControlNetPipeline
    pipe = make_sd_pipeline(cls, controlnet=several)
    picture = noise(1, 3, 128, 128, seed=7).sigmoid()
    images = {"image": [picture, 1 - picture], "controlnet_conditioning_scale": [1.0, 0.5]}
    plain = run_pipeline(pipe, **images)
    before = pipeline_state(pipe)
    tomesd.apply_patch(pipe, 0.5)
    with tokens_into(pipe.controlnet) as seen:
        merged = run_pipeline(pipe, **images)
    first = {n: s[1] for n, s in seen.items() if ".down_blocks.0." in n}
    assert {n.split(".")[1] for n in first} == {"0", "1"} and set(first.values()) == {128}
    assert not torch.equal(merged, plain)
    tomesd.remove_patch(pipe)
    assert pipeline_state(pipe) == before and torch.equal(run_pipeline(pipe, **images), plain)


def test_sdxl_controlnet_pipeline() -> None:
    parts = {k: v for k, v in fresh("sdxl").components.items() if v is not None}
    pipe = diffusers.StableDiffusionXLControlNetPipeline(
        **parts, controlnet=make_controlnet(SDXL_CONFIG), add_watermarker=False
    )
    pipe.set_progress_bar_config(disable=True)
    plain = run_pipeline(pipe)
    tomesd.apply_patch(pipe, ratio=0.5)
    with tokens_into(pipe.controlnet) as seen:
        merged = run_pipeline(pipe)
    assert {s[1] for n, s in seen.items() if n.startswith("down_blocks.1")} == {32}
    assert merged.isfinite().all() and not torch.equal(merged, plain)
    tomesd.remove_patch(pipe)
    assert torch.equal(run_pipeline(pipe), plain)


@pytest.mark.parametrize("guidance", [7.5, 1.0])  # with and without classifier-free guidance
def test_perturbed_attention_guidance(guidance: float) -> None:
    """PAG swaps processors of self-attention in the middle of a call, also on merged levels."""
    cls = diffusers.StableDiffusionPAGPipeline
    pipe = make_sd_pipeline(cls, pag_applied_layers=["down_blocks.0", "mid"])
    run = functools.partial(run_pipeline, pipe, guidance_scale=guidance)
    plain = run(pag_scale=3.0)
    before = pipeline_state(pipe)
    tomesd.apply_patch(pipe, 0)
    assert torch.equal(run(pag_scale=3.0), plain)
    tomesd.apply_patch(pipe, 0.5)
    with tokens_into(pipe.unet) as seen:
        merged = run(pag_scale=3.0)
    assert {s[1] for n, s in seen.items() if n.startswith("down_blocks.0")} == {128}
    assert merged.isfinite().all() and (merged - plain).abs().max() > 1e-3
    assert torch.equal(run(pag_scale=3.0), merged)
    assert (run(pag_scale=0.0) - merged).abs().max() > 1e-3
    tomesd.remove_patch(pipe)
    assert pipeline_state(pipe) == before and torch.equal(run(pag_scale=3.0), plain)


def ip_adapter_weights(unet: Any, image_width: int = 24) -> dict[str, dict[str, torch.Tensor]]:
    """Random IP-Adapter weights in the layout of the released files."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    adapter = {}
    cross = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    for number, name in enumerate(cross):
        width = unet.get_submodule(name.removesuffix(".processor")).to_q.in_features
        for kind in ("k", "v"):
            adapter[f"{2 * number + 1}.to_{kind}_ip.weight"] = draw(width, CROSS)
    projection = {
        "proj.weight": draw(4 * CROSS, image_width),
        "proj.bias": draw(4 * CROSS),
        "norm.weight": draw(CROSS),
        "norm.bias": draw(CROSS),
    }
    return {"image_proj": projection, "ip_adapter": adapter}


@pytest.mark.parametrize("name", ["txt2img", "sdxl"])
@pytest.mark.parametrize("options", [{}, {"merge_crossattn": True, "merge_mlp": True}])
def test_ip_adapter_before_and_after_the_patch(name: str, options: dict[str, bool]) -> None:
    early, late = fresh(name), fresh(name)
    weights = ip_adapter_weights(early.unet)

    def load(pipe: Any) -> None:
        pipe.load_ip_adapter(weights, subfolder="", weight_name="", image_encoder_folder=None)

    def run(pipe: Any, scale: float = 1.0) -> torch.Tensor:
        pipe.set_ip_adapter_scale(scale)
        embeds = noise(2, 1, 24, seed=6)  # one for the empty prompt, one for the prompt
        return run_pipeline(pipe, ip_adapter_image_embeds=[embeds])

    load(early)
    plain = run(early)
    tomesd.apply_patch(early, 0, **options)
    assert torch.equal(run(early), plain)
    tomesd.apply_patch(early, 0.5, **options)
    merged = run(early)
    assert merged.isfinite().all() and (merged - plain).abs().max() > 1e-3
    assert (run(early, scale=0.0) - merged).abs().max() > 1e-3  # the picture still counts

    tomesd.apply_patch(late, 0.5, **options)
    load(late)
    assert torch.equal(run(late), merged)
    for pipe in (early, late):
        tomesd.remove_patch(pipe)
        assert torch.equal(run(pipe), plain)
