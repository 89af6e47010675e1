"""Video UNets: spatial attention merges frame by frame, temporal attention is left alone."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from test_hosts_diffusers import (
    EVERYTHING,
    fresh,
    slow_block,
    slow_groups,
    watch_block,
)
from torch import nn
from zoo_diffusers import (
    FRAMES,
    VIDEO_HOSTS,
    is_temporal,
    make_sd_pipeline,
    module_state,
    tokens_into,
)

import tomesd

MANY = pytest.mark.parametrize("name", list(VIDEO_HOSTS))
BATCH = 2
LAYERS = ("attn1.to_q", "attn1.to_k", "attn2.to_q", "ff.net.0", "ff_in.net.0")
# The first spatial block of the finest level with attention.
FIRST_BLOCK = {
    "animatediff": "down_blocks.0.attentions.0.transformer_blocks.0",
    "animatediff_sdxl": "down_blocks.1.attentions.0.transformer_blocks.0",
    "svd": "down_blocks.0.attentions.0.transformer_blocks.0",
    "unet3d": "down_blocks.0.attentions.0.transformer_blocks.0",
}


def shapes(host: Any, model: nn.Module, **size: int) -> dict[str, tuple]:
    """Shapes entering every attention and feed-forward layer during one run."""
    with tokens_into(model, *LAYERS) as seen:
        host.run(model, batch=BATCH, **size)
    return seen


@MANY
@pytest.mark.parametrize(("height", "width"), [(16, 16), (13, 15)])
@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
def test_spatial_tokens_merge_and_temporal_tokens_do_not(
    name: str, height: int, width: int
) -> None:
    host, model = fresh(name)
    before = shapes(host, model, height=height, width=width)
    tomesd.apply_patch(model, 0.5, **EVERYTHING)
    after = shapes(host, model, height=height, width=width)
    assert after.keys() == before.keys()
    tokens = max(s[1] for n, s in before.items() if n.endswith("attn1.to_q") and not is_temporal(n))
    merged_layers = 0
    for module, shape in before.items():
        if shape[1] == tokens and not is_temporal(module):  # one row of the batch is one frame
            assert after[module] == (BATCH * FRAMES, tokens - int(tokens * 0.5), shape[2])
            merged_layers += 1
        else:
            assert after[module] == shape
    assert merged_layers >= 4


@MANY
def test_temporal_attention_is_there_and_sees_every_frame(name: str) -> None:
    """Guards the test above: these models do have temporal layers, [positions, frames, C]."""
    host, model = fresh(name)
    tomesd.apply_patch(model, 0.5, 8, **EVERYTHING)
    seen = shapes(host, model)
    temporal = {n: s for n, s in seen.items() if n.endswith("attn1.to_q") and is_temporal(n)}
    assert len(temporal) >= 4
    assert all(shape[1] == FRAMES for shape in temporal.values())
    finest = (16 // (1 if name == "animatediff_sdxl" else host.finest)) ** 2
    assert max(shape[0] for shape in temporal.values()) == BATCH * finest


@MANY
@pytest.mark.filterwarnings("ignore::tomesd.MergeWarning")
def test_even_few_positions_and_many_frames_leave_temporal_attention_alone(name: str) -> None:
    """At 2 x 2 latents there are about as many frames as positions: shapes alone mislead."""
    host, model = fresh(name)
    before = shapes(host, model, height=2, width=2)
    tomesd.apply_patch(model, 0.5, 8, **EVERYTHING)
    after = shapes(host, model, height=2, width=2)
    for module, shape in before.items():
        assert not is_temporal(module) or after[module] == shape


@MANY
def test_spatial_block_equals_the_slow_account_frame_by_frame(name: str) -> None:
    host, model = fresh(name)
    path = FIRST_BLOCK[name]
    block = fresh(name)[1].get_submodule(path)
    tomesd.apply_patch(model, 0.5, use_rand=False, **EVERYTHING)
    height, width = 8 * host.finest, 6 * host.finest
    x, given, output = watch_block(
        model, path, lambda: host.run(model, height=height, width=width, batch=1)
    )
    assert x.shape[:2] == (FRAMES, 48)
    settings = {"grid": (8, 6), "ratio": 0.5, "sx": 2, "sy": 2}
    groups = [slow_groups(frame, **settings) for frame in x]
    assert any(groups[0] != other for other in groups[1:])  # frames do group differently
    slow = slow_block(block, x, given, {"attn1", "attn2", "ff"}, **settings)
    torch.testing.assert_close(output, slow, rtol=1e-5, atol=1e-5)


@MANY
@pytest.mark.parametrize("use_rand", [True, False])
def test_a_frame_does_not_depend_on_how_other_frames_group(name: str, use_rand: bool) -> None:
    host, model = fresh(name)
    tomesd.apply_patch(model, 0.5, use_rand=use_rand, **EVERYTHING)
    block = model.get_submodule(FIRST_BLOCK[name])

    def output_with(replacement: torch.Tensor | None) -> torch.Tensor:
        def replace(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if replacement is None:
                return None
            if args:
                return (replacement, *args[1:]), kwargs
            return args, kwargs | {"hidden_states": replacement}

        handle = block.register_forward_pre_hook(replace, with_kwargs=True)
        _, _, output = watch_block(
            model, FIRST_BLOCK[name], lambda: host.run(model, height=16, width=16, batch=1)
        )
        handle.remove()
        return output

    tokens, _, _ = watch_block(model, FIRST_BLOCK[name], lambda: host.run(model, batch=1))
    others = tokens.clone()
    others[1:] = torch.randn(others[1:].shape, generator=torch.Generator().manual_seed(4))
    first, second = output_with(tokens), output_with(others)
    torch.testing.assert_close(first[0], second[0], rtol=1e-5, atol=1e-5)
    assert (first[1:] - second[1:]).abs().amax(dim=(1, 2)).min() > 1e-2
    assert torch.equal(output_with(None), first)


def test_animatediff_pipeline() -> None:
    unet = fresh("animatediff")[1]
    adapter = diffusers.MotionAdapter(
        block_out_channels=(32, 64, 64),
        motion_layers_per_block=1,
        motion_num_attention_heads=4,
        motion_norm_num_groups=8,
    )
    extra = ("safety_checker", "requires_safety_checker", "feature_extractor")
    parts = {k: v for k, v in make_sd_pipeline().components.items() if k not in extra}
    pipe = diffusers.AnimateDiffPipeline(**(parts | {"unet": unet}), motion_adapter=adapter)
    pipe.set_progress_bar_config(disable=True)
    before = module_state(pipe.unet)

    def run() -> torch.Tensor:
        return pipe(
            prompt="a fox",
            num_frames=FRAMES,
            height=64,
            width=64,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).frames

    plain = run()
    tomesd.apply_patch(pipe, 0)
    assert torch.equal(run(), plain)
    tomesd.apply_patch(pipe, 0.5)
    merged = run()
    assert merged.isfinite().all() and (merged - plain).abs().max() > 1e-3
    assert torch.equal(run(), merged)
    tomesd.remove_patch(pipe)
    assert module_state(pipe.unet) == before
    assert torch.equal(run(), plain)
