"""Steps on a coarser image: `coarse`."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
from typing import Any

import diffusers
import numpy as np
import pytest
import tomesd_demo_model
import torch
from merging_dit import (
    ROWS,
    SUPPORTED,
    assert_differs,
    assert_rounding,
    at_steps_left,
    block_calls,
    tokens_seen,
)
from pipelines_dit import PIPELINES, run
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from zoo_diffusers import HOSTS as UNET_HOSTS
from zoo_diffusers import (
    make_controlnet,
    make_controlnet_pipeline,
    make_sd_pipeline,
    make_sdxl_pipeline,
    make_unet,
    module_state,
    pipeline_inputs,
    run_pipeline,
)
from zoo_dit import Dit, alone, largest_time, seeded
from zoo_ldm import HOSTS as LDM_HOSTS

import tomesd
from tomesd.generation import load_pipeline
from tomesd.regions.coarse import Step, pack, unpack

PLAIN: dict[str, Any] = {"ratio": 0.0, "coarse": 1.0}
# Models that get something that only goes with the whole image, and what is said about it.
FULL = {
    "flux_kontext": "reference images",
    "flux2_edit": "reference images",
    "qwen_edit": "reference images",
    "qwen_edit_2511": "reference images",
    "hunyuan_video_i2v": "reference images or frames",
    "wan_i2v": "the latent has 9 channels, of which 4 are made",
    "wan_ti2v": "tokens have times of their own",
    "ltx_i2v": "tokens have times of their own",
}
HOSTS = {
    name: dit
    for name, dit in SUPPORTED.items()
    if ROWS[dit.kind].coarse is not None and name not in FULL
}
RISING = ("ZImageTransformer2DModel", "Lumina2Transformer2DModel")
PACKED = ("Flux", "Flux2", "Chroma", "QwenImage")  # 2 x 2 pixels in a token


# By hand, slowly


def averaged(latent: Tensor) -> Tensor:
    """`[..., H, W]`, pixel by pixel."""
    h, w = (side // 2 for side in latent.shape[-2:])
    small = latent.new_zeros(*latent.shape[:-2], h, w)
    for i in range(h):
        for j in range(w):
            pixels = [latent[..., 2 * i + k, 2 * j + m] for k in (0, 1) for m in (0, 1)]
            small[..., i, j] = sum(pixels) / 4  # type: ignore[assignment]
    return small


def enlarging(n: int) -> Tensor:
    """What n pixels of a row become, `[2 n, n]`: three parts of the nearest, one of the next."""
    matrix = torch.zeros(2 * n, n)
    for i in range(2 * n):
        next_one = i // 2 + (1 if i % 2 else -1)
        matrix[i, i // 2] += 0.75
        matrix[i, min(n - 1, max(0, next_one))] += 0.25
    return matrix


def enlarged(latent: Tensor) -> Tensor:
    h, w = latent.shape[-2:]
    return enlarging(h) @ latent @ enlarging(w).T


def pixels_of(dit: Dit, value: Any, h: int, w: int) -> Tensor:
    """What a model gets or gives, as `[B, C, .., H, W]`.

    Args:
        h, w: of the tokens.
    """
    if isinstance(value, list):
        return torch.stack(value)
    if "LTX" in dit.kind:
        return value.unflatten(1, (dit.frames, h, w)).permute(0, 4, 1, 2, 3)
    if not is_packed(dit):
        return value
    latent = value.new_zeros(value.shape[0], value.shape[2] // 4, 2 * h, 2 * w)
    for token in range(value.shape[1]):
        for channel in range(value.shape[2]):
            row, column = 2 * (token // w), 2 * (token % w)
            row, column = row + channel % 4 // 2, column + channel % 2
            latent[:, channel // 4, row, column] = value[:, token, channel]
    return latent


def from_pixels(dit: Dit, latent: Tensor) -> Any:
    if "ZImage" in dit.kind:
        return list(latent)
    if "LTX" in dit.kind:
        return latent.permute(0, 2, 3, 4, 1).flatten(1, 3)
    return (
        diffusers.FluxPipeline._pack_latents(latent, *latent.shape[:2], *latent.shape[2:])
        if is_packed(dit)
        else latent
    )


def is_packed(dit: Dit) -> bool:
    return dit.kind.removesuffix("Transformer2DModel") in PACKED


def latent_name(inputs: dict[str, Any]) -> str:
    return "x" if "x" in inputs else "hidden_states"


def side_of(dit: Dit) -> int:
    """Pixels along one side of a token."""
    return 1 if "LTX" in dit.kind or "HunyuanImage" in dit.kind else 2


def coarse_by_hand(
    dit: Dit, model: Any, inputs: dict[str, Any], size: tuple[int, int] | None = None
) -> Tensor:
    """What a model that is not patched says about the coarser image, for the whole one.

    Where rows or columns of tokens are odd in number, the small image has its last row or column of
    pixels twice, so that it can be cut into tokens.
    """
    name = latent_name(inputs)
    time = next(name for name in ("timestep", "t") if name in inputs)
    most = largest_time(dit.kind)
    h, w = (pixels // side_of(dit) for pixels in size or dit.size)
    rows, columns = (h + 1) // 2, (w + 1) // 2

    latent = pixels_of(dit, inputs[name], h, w)
    t = inputs[time] / most
    t = 1 - t if dit.kind in RISING else t
    scale = 1 / ((1 - t) + t / 2)
    small_t = scale * t / 2
    beside = (-1, *[1] * (latent.ndim - 1))
    small = scale.view(beside) * averaged(latent)
    padded = small
    if h % 2:
        padded = torch.cat([padded, padded[..., -1:, :]], dim=-2)
    if w % 2:
        padded = torch.cat([padded, padded[..., -1:]], dim=-1)

    changes = {
        name: from_pixels(dit, padded),
        time: most * (1 - small_t if dit.kind in RISING else small_t),
    }
    if "img_ids" in inputs:  # rows of tokens in pairs: in the middle between them
        places = [
            [0, 2 * i + 0.5, 2 * j + 0.5, *[0] * (inputs["img_ids"].shape[1] - 3)]
            for i in range(rows)
            for j in range(columns)
        ]
        changes["img_ids"] = torch.tensor(places)
    if "img_shapes" in inputs:
        changes["img_shapes"] = [[(1, rows, columns)]] * len(t)
    if "num_frames" in inputs:
        changes |= {"height": rows, "width": columns}
    if dit.kind == "ChromaTransformer2DModel":  # tokens of the image are never hidden
        seen = inputs["attention_mask"].shape[1] - h * w + rows * columns
        changes["attention_mask"] = inputs["attention_mask"][:, :seen]
    prediction = dit.run(model, inputs | changes)
    prediction = pixels_of(dit, list(prediction) if name == "x" else prediction, rows, columns)
    prediction = prediction[..., : small.shape[-2], : small.shape[-1]]
    sign = -1 if dit.kind in RISING else 1
    image = small - small_t.view(beside) * sign * prediction
    whole = from_pixels(dit, sign * (latent - enlarged(image)) / t.view(beside))
    return torch.stack(whole) if isinstance(whole, list) else whole


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
@pytest.mark.parametrize("batch", [2, 1])
@pytest.mark.parametrize("name", HOSTS)
def test_a_coarse_step_is_what_was_worked_out_by_hand(name: str, batch: int) -> None:
    dit = HOSTS[name]
    model, inputs = dit.build(), dit.inputs(batch=batch)  # items differ in their times
    expected = coarse_by_hand(dit, model, inputs)
    whole = dit.run(model, inputs)
    tomesd.apply_patch(model, **PLAIN)
    assert_rounding(dit.run(model, inputs), expected, 2e-4)
    assert_differs(expected, whole)
    tomesd.apply_patch(model, ratio=0.5, when="always", end=1.0, coarse=1.0)
    assert_rounding(dit.run(model, inputs), expected, 2e-4)  # nothing merges in it


@pytest.mark.parametrize("name", FULL)
def test_what_goes_with_the_whole_image_only_runs_at_full_size(name: str) -> None:
    dit = SUPPORTED[name]
    model, inputs = dit.build(), dit.inputs()
    plain = dit.run(model, inputs)
    tomesd.apply_patch(model, **PLAIN)
    with pytest.warns(tomesd.MergeWarning, match=f"that coarse would make fewer: .*{FULL[name]}"):
        assert torch.equal(dit.run(model, inputs), plain)


def with_controlnet(dit: Dit, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    width = model.transformer_blocks[0].norm1.linear.in_features
    samples = [torch.randn(2, 24, width, generator=torch.Generator().manual_seed(0))] * len(
        model.transformer_blocks
    )
    name = "block_controlnet_hidden_states" if dit.name == "sd3" else "controlnet_block_samples"
    return inputs | {name: samples}


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_controlnets_want_full_size(name: str) -> None:
    dit = HOSTS[name]
    model = dit.build()
    inputs = with_controlnet(dit, model, dit.inputs())
    plain = dit.run(model, inputs)
    assert_differs(plain, dit.run(model, dit.inputs()))
    tomesd.apply_patch(model, **PLAIN)
    with pytest.warns(tomesd.MergeWarning, match="make fewer: .*controlnet.* is given"):
        assert torch.equal(dit.run(model, inputs), plain)


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
@pytest.mark.parametrize("size", [(12, 10), (10, 8), (14, 6)])
@pytest.mark.parametrize("name", [name for name, dit in HOSTS.items() if side_of(dit) == 2])
def test_odd_numbers_of_tokens_are_halved_too(name: str, size: tuple[int, int]) -> None:
    dit = HOSTS[name]
    model, inputs = dit.build(), dit.inputs(size=size)
    expected = coarse_by_hand(dit, model, inputs, size)
    tomesd.apply_patch(model, **PLAIN)
    assert_rounding(dit.run(model, inputs), expected, 2e-4)


def test_a_grid_that_cannot_be_halved_runs_at_full_size() -> None:
    dit = HOSTS["ltx"]
    model, inputs = dit.build(), dit.inputs(size=(6, 5))
    plain = dit.run(model, inputs)
    tomesd.apply_patch(model, **PLAIN)
    with pytest.warns(tomesd.MergeWarning, match="fewer: 6x5 tokens cannot be halved"):
        assert torch.equal(dit.run(model, inputs), plain)


def test_caches_of_blocks_want_full_size() -> None:
    dit = HOSTS["flux"]
    model, inputs = dit.build(), dit.inputs()
    tomesd.apply_patch(model, **PLAIN)
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.0))
    with (
        model.cache_context("x"),
        pytest.warns(tomesd.MergeWarning, match="fewer: a cache"),
    ):
        assert_rounding(dit.run(model, inputs), dit.run(dit.build(), inputs))


def test_it_is_said_once() -> None:
    dit = SUPPORTED["wan_ti2v"]
    model, inputs = dit.build(), dit.inputs()
    tomesd.apply_patch(model, **PLAIN)
    with pytest.warns(tomesd.MergeWarning) as told:
        dit.run(model, inputs)
        dit.run(model, inputs)
    assert len(told) == 1


# What averaging does to noise


def test_a_latent_of_squares_is_on_the_flow_again() -> None:
    torch.manual_seed(0)
    small = torch.randn(8, 4, 24, 16)
    image = small.repeat_interleave(2, -1).repeat_interleave(2, -2)
    for level in (0.95, 0.5, 0.1):
        t = torch.tensor(level)
        noise = torch.randn_like(image)
        step = Step((1 - t) * image + t * noise, 1 - t, t, "flow")
        after = step.small_s
        found = (step.small - (1 - after) * small) / after
        assert abs(found.mean()) < 0.03 and abs(found.std() - 1) < 0.03
        assert torch.allclose(found, 2 * averaged(noise), atol=1e-3)
        # A model that knows the small image makes the large one of it.
        velocity = step.prediction(found - small)
        torch.testing.assert_close(step.latent - t * velocity, enlarged(small), atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", [1, 2])
def test_tokens_are_unpacked_and_packed_again(side: int) -> None:
    latent = torch.randn(2, 3, 2, 4 * side, 6 * side)
    tokens = pack(latent, side)
    assert tokens.shape == (2, 2 * 4 * 6, 3 * side * side)
    assert torch.equal(unpack(tokens, (2, 4, 6), side), latent)


# When


def is_coarse(dit: Dit, model: Any, inputs: dict[str, Any]) -> bool:
    with block_calls(model) as calls:
        dit.run(model, inputs)
    (tokens,) = {count for counts in tokens_seen(model, calls).values() for count in counts}
    assert tokens in (24, 6)
    return tokens == 6


@pytest.mark.parametrize("share", [0.3, 0.25, 0.0, None])
def test_the_first_steps_are_coarse_and_the_others_are_as_before(share: float | None) -> None:
    dit = HOSTS["flux"]
    model, plain, inputs = dit.build(), dit.build(), dit.inputs()
    tomesd.apply_patch(model, 0.0, coarse=share)
    coarse = []
    for step in range(28):
        now = at_steps_left(dit, inputs, 1 - step / 28)
        coarse.append(is_coarse(dit, model, now))
        if not coarse[-1]:
            assert torch.equal(dit.run(model, now), dit.run(plain, now))
    assert coarse == [step < 28 * (share or 0) for step in range(28)]


def test_full_steps_merge() -> None:
    dit = HOSTS["sd3"]
    model, inputs = dit.build(), dit.inputs()
    merging = tomesd.apply_patch(dit.build(), 0.5, when="always", metric="input")
    tomesd.apply_patch(model, 0.5, when="always", metric="input", coarse=0.3)
    for left in (1.0, 0.8, 0.6, 0.4):
        now = at_steps_left(dit, inputs, left)
        same = torch.equal(dit.run(model, now), dit.run(merging, now))
        assert same is (left < 0.7)


def test_full_steps_match_on_the_latents_of_coarse_ones() -> None:
    """The first full step knows the latent before it, as it would without coarse steps."""
    dit = HOSTS["sd3"]
    latents = [dit.inputs(seed=seed) for seed in (0, 1)]
    now = [
        at_steps_left(dit, latent, left) for latent, left in zip(latents, (0.8, 0.6), strict=True)
    ]
    outputs = []
    for share in (0.0, 0.3):
        model = tomesd.apply_patch(dit.build(), 0.5, when="always", coarse=share)
        outputs.append([dit.run(model, step) for step in now])
    assert_differs(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
    fresh = tomesd.apply_patch(dit.build(), 0.5, when="always")
    assert_differs(dit.run(fresh, now[1]), outputs[1][1])


def test_the_first_full_step_computes_what_later_ones_reuse() -> None:
    dit = HOSTS["flux"]
    model, plain, inputs = dit.build(), dit.build(), dit.inputs()
    tomesd.apply_patch(model, 0.0, coarse=0.3, reuse=2, reuse_start=0.0)
    ran, outputs = [], []
    # Two images; then one that is given up, and another.
    shares = (1.0, 0.8, 0.6, 0.4, 0.2) * 2 + (1.0, 0.8, 0.6, 1.0, 0.8, 0.6, 0.4)
    for left in shares:
        now = at_steps_left(dit, inputs, left)
        with block_calls(model) as calls:
            outputs.append(dit.run(model, now))
        ran.append("transformer_blocks.1" in {name for name, _ in calls})
        if left == 0.6:
            assert torch.equal(outputs[-1], dit.run(plain, now))
    assert ran == [True, True, True, False, True] * 2 + [True] * 6 + [False]
    assert all(map(torch.equal, outputs[:5], outputs[5:10]))


# Guidance, copies, compilers


@pytest.mark.parametrize("name", ["flux", "sd3", "zimage", "wan"])
def test_batched_and_split_guidance_agree(name: str) -> None:
    dit = HOSTS[name]
    model, inputs = dit.build(), dit.inputs()
    tomesd.apply_patch(model, **PLAIN)
    together = dit.run(model, inputs)
    apart = [dit.run(model, alone(inputs, k)) for k in (0, 1)]
    assert_rounding(torch.cat(apart), together)


def test_arguments_by_place_and_results_by_name() -> None:
    dit = HOSTS["sd3"]
    model, inputs = dit.build(), dit.inputs()
    tomesd.apply_patch(model, **PLAIN)
    expected = dit.run(model, inputs)
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")
    with torch.no_grad():
        result = model(*(inputs[name] for name in names))
    assert type(result).__name__ == "Transformer2DModelOutput"
    assert torch.equal(result.sample, expected) and torch.equal(result[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    dit = HOSTS["flux"]
    inputs = dit.inputs()
    exact = dit.run(tomesd.apply_patch(dit.build(), **PLAIN), inputs)
    half = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    output = dit.run(tomesd.apply_patch(dit.build().to(dtype), **PLAIN), half)
    assert output.dtype == dtype
    assert (output.float() - exact).std() < 0.1 * exact.std()


def test_whole_numbers_as_times() -> None:
    """Wan's scheduler gives them; the coarse step lies between two."""
    dit = HOSTS["wan"]
    model, inputs = dit.build(), dit.inputs()
    whole = inputs | {"timestep": torch.tensor([801, 333])}
    tomesd.apply_patch(model, **PLAIN)
    expected = dit.run(model, whole | {"timestep": whole["timestep"].float()})
    assert torch.equal(dit.run(model, whole), expected)


def test_gradients_flow() -> None:
    dit = HOSTS["sd3"]
    model, inputs = dit.build(), dit.inputs()
    tomesd.apply_patch(model, **PLAIN)
    latent = inputs["hidden_states"].requires_grad_()
    output = model(**inputs, return_dict=False)[0]
    assert torch.allclose(output, dit.run(model, inputs))
    output.square().sum().backward()
    assert latent.grad is not None and latent.grad.isfinite().all() and latent.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["flux", "zimage"])
def test_copies_and_no_trace(name: str) -> None:
    dit = HOSTS[name]
    model, inputs = dit.build(), dit.inputs()
    plain, before = dit.run(model, inputs), module_state(model)
    tomesd.apply_patch(model, **PLAIN)
    once = dit.run(model, inputs)
    assert_differs(once, plain)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(dit.run(other, inputs), once)
    tomesd.remove_patch(model)
    assert module_state(model) == before
    assert torch.equal(dit.run(model, inputs), plain)


@pytest.mark.parametrize("name", ["flux", "sd3", "wan"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled(name: str, wrapped: bool) -> None:
    """One graph for the coarse steps and one for the full ones."""
    torch._dynamo.reset()
    dit, counter = HOSTS[name], CompileCounterWithBackend("eager")
    eager = tomesd.apply_patch(dit.build(), 0.0, coarse=0.5)
    model, inputs = dit.build(), alone(dit.inputs(), 0)
    if wrapped:
        model = torch.compile(model, fullgraph=True, backend=counter)
        tomesd.apply_patch(model, 0.0, coarse=0.5)
    else:
        tomesd.apply_patch(model, 0.0, coarse=0.5).compile(fullgraph=True, backend=counter)
    for left in (1.0, 0.8, 0.4, 0.2, 0.9, 0.3):
        now = at_steps_left(dit, inputs, left)
        assert_rounding(dit.run(model, now), dit.run(eager, now))
    assert counter.frame_count == 2
    torch._dynamo.reset()


# Whole pipelines

PIPES = [
    *("flux", "flux_true_cfg", "flux2", "sd3", "qwen", "zimage", "chroma", "lumina2", "auraflow"),
    *("wan", "hunyuan_video", "ltx"),
]


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
@pytest.mark.parametrize("name", PIPES)
def test_pipelines(name: str) -> None:
    pipe, arguments = PIPELINES[name]()
    plain = run(pipe, arguments, num_inference_steps=4)
    tomesd.apply_patch(pipe, 0.0, coarse=0.5)
    coarse = run(pipe, arguments, num_inference_steps=4)
    assert_differs(coarse, plain)
    tomesd.remove_patch(pipe)
    assert torch.equal(run(pipe, arguments, num_inference_steps=4), plain)


IMAGE = 0.7


def knowing(pipe: Any, sign: float) -> None:
    """Makes the transformers know what they are to make, an image of one colour, and predict that.

    Args:
        sign: -1 if they predict the image less the noise.
    """
    for part in (pipe.transformer, getattr(pipe, "transformer_2", None)):
        if part is not None:
            part.__class__ = _knowing_class(type(part), sign)


@functools.cache
def _knowing_class(cls: Any, sign: float) -> Any:
    names = inspect.signature(cls.forward)
    (kind,) = {name for name in ROWS if name == cls.__name__}

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = names.bind(self, *args, **kwargs).arguments
        time = given["t" if "t" in given else "timestep"] / largest_time(kind)
        t = float(1 - time[0] if kind in RISING else time[0])
        latent = given[latent_name(given)]
        if isinstance(latent, list):
            return ([sign * (x - IMAGE) / t for x in latent],)
        return (sign * (latent - IMAGE) / t,)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


@pytest.mark.parametrize("name", PIPES)
def test_pipelines_take_predictions_with_the_sign_that_coarse_steps_give(name: str) -> None:
    """A model that knows the image leads the pipeline to it, if its prediction has the sign that
    the pipeline expects. So it does through coarse steps, which have to know the sign too."""
    ends = {}
    for sign in (1.0, -1.0):
        for coarse in (0.0, 1.0):
            pipe, arguments = PIPELINES[name]()
            knowing(pipe, sign)
            tomesd.apply_patch(pipe, 0.0, coarse=coarse)
            made = run(pipe, arguments)
            ends[sign, coarse] = bool(((made - IMAGE).abs() < 1e-2).all())
    right = -1.0 if any(type(pipe.transformer).__name__ == kind for kind in RISING) else 1.0
    assert ends == {(sign, coarse): sign == right for sign in (1.0, -1.0) for coarse in (0.0, 1.0)}


@pytest.mark.parametrize("name", ["flux_fill", "flux_kontext", "wan_i2v", "wan_ti2v"])
def test_pipelines_that_take_pictures_run_at_full_size(name: str) -> None:
    pipe, arguments = PIPELINES[name]()
    torch.manual_seed(0)
    plain = run(pipe, arguments)
    tomesd.apply_patch(pipe, **PLAIN)
    torch.manual_seed(0)
    with pytest.warns(tomesd.MergeWarning, match="that coarse would make fewer"):
        assert torch.equal(run(pipe, arguments), plain)


def test_a_model_that_is_told_its_next_time_runs_at_full_size() -> None:
    """The distilled HunyuanImage."""
    dit = HOSTS["hunyuan_image"]
    model = seeded(diffusers.HunyuanImageTransformer2DModel, **dit.config, use_meanflow=True)
    inputs = dit.inputs() | {"timestep_r": torch.tensor([200.0, 200.0])}
    plain = dit.run(model, inputs)
    tomesd.apply_patch(model, **PLAIN)
    with pytest.warns(tomesd.MergeWarning, match="fewer: timestep_r is given"):
        assert torch.equal(dit.run(model, inputs), plain)


def test_the_embedded_transformer_loses_less_by_it_than_by_merging() -> None:
    """At the first two of 28 steps, with a quarter of the tokens instead of half of them. (Measured
    on one picture: 0.046 and 0.107 of what is predicted, squared, against 0.192 and 0.229.)"""
    pipe = load_pipeline("transformer")
    caption = tomesd_demo_model.held_out_captions()[0]
    calls: list[dict[str, Any]] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    # The second step of 28, from a pipeline that is stopped there.
    stop = {"callback_on_step_end": lambda pipe, step, *_: _stop_after(pipe, step, 1)}
    pipe(
        caption,
        negative_prompt="",
        true_cfg_scale=4,
        height=256,
        width=256,
        num_inference_steps=28,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        **stop,
    )
    hook.remove()
    assert len(calls) == 4  # with and without the prompt

    def predictions(**options: Any) -> list[Tensor]:
        tomesd.apply_patch(pipe, **options)
        with torch.no_grad():
            made = [pipe.transformer(**call)[0] for call in calls]
        return [without + 4 * (with_it - without) for with_it, without in (made[:2], made[2:])]

    plain = predictions(ratio=0.0)
    lost = {
        name: [
            float((a - b).square().sum() / b.square().sum())
            for a, b in zip(found, plain, strict=True)
        ]
        for name, found in (
            ("coarse", predictions(ratio=0.0, coarse=0.3)),
            ("merged", predictions(ratio=0.5, when="always")),
        )
    }
    assert all(0 < one < 0.7 * two for one, two in zip(lost["coarse"], lost["merged"], strict=True))
    assert max(lost["coarse"]) < 0.2


def _stop_after(pipe: Any, step: int, last: int) -> dict[str, Any]:
    pipe._interrupt = step >= last
    return {}


# UNets


def predicting(kind: str, make: Any = make_sd_pipeline) -> Any:
    pipe = make()
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, prediction_type=kind)
    return pipe


def unet_by_hand(pipe: Any, inputs: dict[str, Any]) -> Tensor:
    """What a UNet that is not patched says about the coarser image, for the whole one."""
    shares = 1 - pipe.scheduler.alphas_cumprod.numpy()
    x, times = inputs["sample"], inputs["timestep"].expand(len(inputs["sample"]))
    share = np.interp(times, range(1000), shares)
    a, s = (torch.tensor(part**0.5).view(-1, 1, 1, 1).float() for part in (1 - share, share))
    scale = (a**2 + s**2 / 4).rsqrt()
    small, small_a, small_s = scale * averaged(x), scale * a, scale * s / 2
    small_times = np.interp(small_s.flatten() ** 2, shares, range(1000))
    with torch.no_grad():
        changes = {"sample": small, "timestep": torch.tensor(small_times).float()}
        prediction = pipe.unet(**inputs | changes).sample
    if pipe.scheduler.config.prediction_type == "epsilon":
        image = enlarged((small - small_s * prediction) / small_a)
        return (x - a * image) / s
    image = enlarged(small_a * small - small_s * prediction)
    return a * (x - a * image) / s - s * image


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("make", [make_sd_pipeline, make_sdxl_pipeline])
def test_a_coarse_step_of_a_unet_is_what_was_worked_out_by_hand(kind: str, make: Any) -> None:
    pipe = predicting(kind, make)
    host = UNET_HOSTS["sdxl" if make is make_sdxl_pipeline else "sd1"]
    inputs = host.inputs(16, 12, 2, 0, 900)
    for times in (torch.tensor(900), torch.tensor([871.3, 222.0])):
        inputs["timestep"] = times
        expected = unet_by_hand(pipe, inputs)
        with torch.no_grad():
            whole = pipe.unet(**inputs).sample
            tomesd.apply_patch(pipe, 0.5, when="always", coarse=1.0)
            assert_rounding(pipe.unet(**inputs).sample, expected, 1e-3)
        assert_differs(expected, whole)
        tomesd.remove_patch(pipe)


def test_a_latent_of_squares_has_less_variance_from_noise() -> None:
    small = torch.randn(8, 4, 24, 16)
    image, share = small.repeat_interleave(2, -1).repeat_interleave(2, -2), torch.tensor(0.9)
    noise = torch.randn_like(image)
    for predicts_noise in (True, False):
        latent = (1 - share).sqrt() * image + share.sqrt() * noise
        predicts = "epsilon" if predicts_noise else "v_prediction"
        step = Step(latent, (1 - share).sqrt(), share.sqrt(), predicts)
        after = step.small_s**2
        found = (step.small - (1 - after).sqrt() * small) / after.sqrt()
        assert abs(found.mean()) < 0.03 and abs(found.std() - 1) < 0.03
        ideal = found if predicts_noise else (1 - after).sqrt() * found - after.sqrt() * small
        made = step.prediction(ideal)
        a, s = (1 - share).sqrt(), share.sqrt()
        clean = (latent - s * made) / a if predicts_noise else a * latent - s * made
        torch.testing.assert_close(clean, enlarged(small), atol=1e-4, rtol=0)


@pytest.mark.parametrize("scheduler", ["DDIM", "EulerDiscrete", "DPMSolverMultistep"])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_pipelines_of_unets(kind: str, scheduler: str) -> None:
    """Whatever the scheduler gives to the model; and steps after the coarse ones are as before."""
    pipe = predicting(kind)
    cls = getattr(diffusers, f"{scheduler}Scheduler")
    pipe.scheduler = cls.from_config(pipe.scheduler.config)
    seen: list[tuple[float, int]] = []
    plain = run_pipeline(pipe, num_inference_steps=5)

    def note(_: Any, args: Any, kwargs: Any) -> None:
        seen.append(args[0].shape[-1])

    pipe.unet.conv_in.register_forward_pre_hook(note, with_kwargs=True)
    tomesd.apply_patch(pipe, 0.0, coarse=0.5)
    coarse = run_pipeline(pipe, num_inference_steps=5)
    assert_differs(coarse, plain)
    whole = pipeline_inputs(pipe)["width"] // pipe.vae_scale_factor
    early = [1 - float(time) / 999 < 0.5 for time in pipe.scheduler.timesteps]
    assert seen == [whole // 2 if first else whole for first in early] and True in early
    tomesd.remove_patch(pipe)
    assert torch.equal(run_pipeline(pipe, num_inference_steps=5), plain)


def test_a_unet_reuses_what_its_first_full_step_gave() -> None:
    pipe, inputs = predicting("epsilon"), UNET_HOSTS["sd1"].inputs(16, 16, 2, 0, 900)
    ran: list[int] = []
    pipe.unet.mid_block.resnets[0].register_forward_pre_hook(lambda *_: ran.append(1))
    outputs, counts = [], []
    with torch.no_grad():
        plain = pipe.unet(**inputs | {"timestep": torch.tensor(500)}).sample
        tomesd.apply_patch(pipe, 0.0, coarse=0.4, reuse=2)
        for time in (900, 700, 500, 400, 300) * 2:
            ran.clear()
            outputs.append(pipe.unet(**inputs | {"timestep": torch.tensor(time)}).sample)
            counts.append(len(ran))
    assert counts == [1, 1, 1, 0, 1] * 2
    assert torch.equal(outputs[2], plain)
    assert all(map(torch.equal, outputs[:5], outputs[5:]))


def test_a_compiled_unet() -> None:
    torch._dynamo.reset()
    pipe, inputs = predicting("epsilon"), UNET_HOSTS["sd1"].inputs(16, 16, 1, 0, 900)
    eager = tomesd.apply_patch(predicting("epsilon"), 0.0, coarse=0.5).unet
    counter = CompileCounterWithBackend("eager")
    tomesd.apply_patch(pipe, 0.0, coarse=0.5).unet.compile(fullgraph=True, backend=counter)
    for time in (900.0, 800.0, 300.0, 200.0, 850.0):
        now = inputs | {"timestep": torch.tensor(time)}
        with torch.no_grad():
            assert_rounding(pipe.unet(**now).sample, eager(**now).sample)
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_what_unets_run_at_full_size() -> None:
    pipe, host = predicting("epsilon"), UNET_HOSTS["sd1"]
    inputs = host.inputs(16, 16, 2, 0, 900)
    with torch.no_grad():
        down, middle = make_controlnet()(
            **UNET_HOSTS["controlnet"].inputs(16, 16, 2, 0, 900), return_dict=False
        )
    more = {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
    odd = host.inputs(15, 16, 2, 0, 900)
    for arguments, words in ((inputs | more, "residuals is given"), (odd, "15x16 pixels cannot")):
        tomesd.remove_patch(pipe)
        with torch.no_grad():
            plain = pipe.unet(**arguments).sample
            tomesd.apply_patch(pipe, **PLAIN)
            with pytest.warns(tomesd.MergeWarning, match=f"make fewer: .*{words}"):
                assert torch.equal(pipe.unet(**arguments).sample, plain)


def test_unets_that_cannot_say_so() -> None:
    with pytest.raises(ValueError, match=r"coarse=0\.3: needs a scheduler that knows its noise"):
        tomesd.apply_patch(make_unet(), coarse=0.3)
    with pytest.raises(ValueError, match=r"coarse=0\.3: needs .*'v_prediction'"):
        tomesd.apply_patch(predicting("sample"), coarse=0.3)
    with pytest.raises(ValueError, match=r"coarse=0\.3: means nothing on a ControlNetModel"):
        tomesd.apply_patch(make_controlnet_pipeline(), coarse=0.3)
    for name in ("svd", "unet3d", "animatediff", "dit"):
        with pytest.raises(ValueError, match=r"coarse=0\.3: means nothing on a"):
            tomesd.apply_patch(UNET_HOSTS[name].build(), coarse=0.3)
    with pytest.raises(ValueError, match=r"coarse=0\.3: means nothing on a UNetModel"):
        tomesd.apply_patch(LDM_HOSTS["ldm-sd1"].build(), coarse=0.3)


# What is told


@pytest.mark.parametrize("name", ["flux", "qwen", "sd3", "wan", "ltx"])
def test_it_is_described(name: str) -> None:
    dit = HOSTS[name]
    model = tomesd.apply_patch(dit.build(), ratio=0.0, coarse=0.3)
    told = tomesd.describe(model, 12 * 8, 8 * 8, inputs=dit.inputs())
    (part,) = told.parts
    assert part.coarse_tokens == part.levels[0].tokens // 4
    inputs, flops = dit.inputs(), []
    for left in (0.5, 1.0):
        # With unfused attention, which the counter knows on the CPU without help.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            dit.run(model, at_steps_left(dit, inputs, left))
        flops.append(counter.get_total_flops())
    assert [part.flops, part.coarse_flops] == flops and flops[1] < 0.7 * flops[0]
    share = f"{flops[1] / flops[0]:.1%}"
    words = f"coarse up to progress 0.3, {part.coarse_tokens} tokens with {share} of the operations"
    assert f"nothing is merged\n  {words}" in str(told)
    odd = tomesd.describe(model, inputs=dit.inputs(size=(6, 5) if name == "ltx" else (12, 10)))
    (part,) = odd.parts
    left = part.levels[0].tokens * 9 // 30  # of 6x5
    assert part.coarse_tokens == (0 if name == "ltx" else left)
    assert ("no step can be coarse" in str(odd)) is (name == "ltx")


# Errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"coarse": 1.5}, "coarse=1.5: must be None or a number between 0 and 1"),
        ({"coarse": -0.1}, "coarse=-0.1: must be None or a number between 0 and 1"),
        ({"coarse": True}, "coarse=True: must be None or a number between 0 and 1"),
        ({"coarse": "all"}, "coarse='all': must be None or a number between 0 and 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        tomesd.apply_patch(HOSTS["flux"].build(), **options)


@pytest.mark.parametrize("name", ["mochi", "cogvideox_5b", "wan_vace", "ernie"])
def test_models_that_cannot_say_so(name: str) -> None:
    dit = SUPPORTED[name]
    model = dit.build()
    with pytest.raises(ValueError, match=f"coarse=0.3: means nothing on a {dit.kind}"):
        tomesd.apply_patch(model, coarse=0.3)
    tomesd.apply_patch(model, coarse=0.0)
