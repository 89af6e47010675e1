"""How pipelines are called: each by the arguments that it takes."""

import time
from typing import Any

import pytest
import torch
from pipelines_dit import PIPELINES, STEPS
from zoo_diffusers import make_sd_pipeline, make_sdxl_pipeline

from tomesd.generation import Sampling, load_pipeline, sample
from tomesd.generation.sampling import _callback, _Clock, call_pipeline

WIDTH, HEIGHT = 64, 96


@pytest.mark.parametrize(
    ("name", "argument", "own"),
    [
        ("flux", "guidance_scale", 3.5),  # which has learnt to do with it
        ("flux2", "guidance_scale", 4.0),
        ("sd3", "guidance_scale", 7.0),
        ("qwen", "true_cfg_scale", 4.0),
        ("zimage", "guidance_scale", 5.0),
        ("pixart_sigma", "guidance_scale", 4.5),
    ],
)
@torch.no_grad()
def test_guidance_and_steps_reach_a_transformer(name: str, argument: str, own: float) -> None:
    pipe, arguments = PIPELINES[name]()
    assert Sampling.of(pipe, (WIDTH, HEIGHT)).guidance == own
    rest = {k: v for k, v in arguments.items() if k not in ("height", "width")}
    del rest["num_inference_steps"]
    done: list[int] = []
    outputs = []
    for guidance in (2.5, 1.5):
        sampling = Sampling.of(pipe, (WIDTH, HEIGHT), steps=STEPS, guidance=guidance)
        inputs = rest | _callback(pipe, _Clock(torch.device("cpu")), done.append)
        outputs.append(call_pipeline(pipe, inputs, [3], sampling).images)
    assert done == [1, 2, 1, 2]
    generator = [torch.Generator().manual_seed(3)]
    expected = pipe(**arguments, **{argument: 2.5}, generator=generator).images
    assert torch.equal(outputs[0], expected)
    assert not torch.equal(outputs[1], expected)


@pytest.mark.parametrize(
    ("make", "guidance", "size"),
    [
        (make_sd_pipeline, 7.5, (128, 128)),
        (make_sdxl_pipeline, 5.0, (128, 128)),
        (lambda: PIPELINES["flux"]()[0], 3.5, (1024, 1024)),
        (lambda: PIPELINES["zimage"]()[0], 5.0, (1024, 1024)),
        (lambda: load_pipeline("unet"), 5.0, (256, 256)),
        (lambda: load_pipeline("transformer"), 4.0, (256, 256)),
    ],
)
def test_what_is_not_given_is_the_models_own(make: Any, guidance: float, size: Any) -> None:
    sampling = Sampling.of(make())
    assert (sampling.guidance, (sampling.width, sampling.height)) == (guidance, size)


def test_the_seconds_of_a_step_are_those_on_average() -> None:
    """Steps that leave a part of the model out would make the fastest one say nothing."""
    pipe = make_sd_pipeline()
    wait = iter((0.0, 0.0, 0.0, 0.4))
    pipe.unet.register_forward_pre_hook(lambda *_: time.sleep(next(wait)))
    made = sample(pipe, "a cat", size=(WIDTH, HEIGHT), steps=4, guidance=1.0)
    assert 0.4 / 3 < made.step_seconds < 0.4


def test_what_a_model_cannot_do_is_refused() -> None:
    for pipe in (PIPELINES["flux"]()[0], PIPELINES["flux2"]()[0]):
        with pytest.raises(ValueError, match=r"negative_prompt='fog': Flux2?Pipeline takes none"):
            Sampling.of(pipe, negative_prompt="fog")
    with pytest.raises(ValueError, match=r"scheduler='ddim': the model has a FlowMatch"):
        Sampling.of(load_pipeline("transformer"), scheduler="ddim")
    assert Sampling.of(load_pipeline("transformer"), negative_prompt="fog").guidance == 4.0
