"""The tiny transformers of `zoo_dit` behave like models: what other tests take for granted."""

import inspect
from typing import Any

import pytest
import torch
from pipelines_dit import LATENT, PIPELINES, run
from torch._subclasses import fake_tensor
from zoo_diffusers import TEXT
from zoo_dit import DITS, TIMES, Dit, alone

from tomesd.hosts.inputs import example_inputs


@pytest.fixture(params=DITS.values(), ids=DITS)
def dit(request: pytest.FixtureRequest) -> Dit:
    return request.param


def test_a_batch_is_its_items_one_by_one(dit: Dit) -> None:
    model = dit.build()
    inputs = dit.inputs(batch=2)
    output = dit.run(model, inputs)
    assert torch.equal(output, dit.run(dit.build(), dit.inputs(batch=2)))
    assert output.isfinite().all()
    assert (output[0] - output[1]).std() > 0.1 * output.std()
    for k in range(2):
        one = dit.run(model, alone(inputs, k))
        assert (one[0] - output[k]).abs().max() < 5e-5 * output.std()


def test_every_part_of_the_input_shows_in_the_output(dit: Dit) -> None:
    model = dit.build()
    inputs = dit.inputs(batch=1)
    output = dit.run(model, inputs)
    for name, other in dit.inputs(batch=1, seed=1).items():
        if name in TIMES or not (isinstance(other, torch.Tensor) and other.is_floating_point()):
            continue
        changed = dit.run(model, inputs | {name: other})
        assert (changed - output).std() > 0.005 * output.std(), name


def test_inputs_are_made_up_for_it(dit: Dit) -> None:
    """With as much text as its pipeline gives."""
    model = dit.build()
    inputs = example_inputs(model, dit.size, 1, dit.frames)
    assert inputs is not None
    assert dit.run(model, inputs).isfinite().all()


# The first three compute with shapes only. The others read masks or positions. Not here: HiDream,
# NucleusMoE and HunyuanVideo 1.5, which read what they compute and cannot run without data.
@pytest.mark.parametrize(
    "name", ["flux", "sd35", "wan", "lumina2", "mochi", "framepack", "glm_image", "omnigen"]
)
def test_the_inputs_will_do_for_a_run_on_shapes(name: str, monkeypatch: Any) -> None:
    dit = DITS[name]
    model = dit.build()
    monkeypatch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", 1 << 16)  # the masks are constants
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        inputs = example_inputs(model, dit.size, 2, dit.frames)
        assert inputs is not None
        assert len(dit.run(model, inputs)) == 2


def test_inputs_have_the_precision_of_the_layers() -> None:
    """Checkpoints of Wan stay in full precision in parts, the first parameter among them."""
    model = DITS["wan"].build().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules):
            parameter.data = parameter.data.float()
    assert next(model.parameters()).dtype == torch.float32
    inputs = example_inputs(model, (12, 8), 1, 3)
    assert inputs is not None
    assert DITS["wan"].run(model, inputs).dtype == torch.bfloat16


# What a pipeline gives besides, or in another shape, because of what is special about it.
SPECIAL = {
    "flux_kontext": {"hidden_states", "img_ids"},
    "qwen_edit": {"hidden_states", "img_shapes"},
    "wan_ti2v": {"timestep"},
    "allegro": {"encoder_hidden_states"},
    "hunyuan_image": {"encoder_hidden_states_2", "encoder_attention_mask_2"},
    "pixart_sigma": {"encoder_hidden_states"},
    "motif": {"image_embeds"},
}
# May be left out: masks that hide nothing, settings of blocks, residuals of ControlNets.
OPTIONAL = {
    "encoder_attention_mask", "attention_mask", "attention_kwargs", "joint_attention_kwargs",
    "controlnet_block_samples", "controlnet_single_block_samples", "controlnet_blocks_repeat",
    "block_controlnet_hidden_states", "control_hidden_states_scale", "rope_interpolation_scale",
    "enable_temporal_attentions", "image_noise_mask", "return_dict", "scale_factor",
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_runs_and_gives_the_inputs_that_are_made_up(name: str) -> None:
    pipe, arguments = PIPELINES[name]()
    calls: list[dict[str, Any]] = []
    forward = inspect.signature(type(pipe.transformer).forward)

    def note(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        given = forward.bind(module, *args, **kwargs).arguments
        calls.append({key: value for key, value in given.items() if value is not None})

    with pipe.transformer.register_forward_pre_hook(note, with_kwargs=True):
        assert run(pipe, arguments).isfinite().all()
    given = calls[0]
    batch = len(given["x"] if "x" in given else given["hidden_states"])
    size = (8, 8) if name == "latte" else LATENT
    made_up = example_inputs(pipe.transformer, size, batch, 3, TEXT)
    assert made_up is not None
    ours, theirs = (
        {
            key: _shape(value)
            for key, value in inputs.items()
            if key not in OPTIONAL | SPECIAL.get(name, set()) | {"self", "return_dict"}
        }
        for inputs in (made_up, given)
    )
    assert ours == theirs


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape[1:] if value.ndim == 3 and value.shape[0] == 1 else value.shape)
    if isinstance(value, (list, tuple)):
        return [_shape(part) for part in value]
    return value if isinstance(value, int) else type(value)
