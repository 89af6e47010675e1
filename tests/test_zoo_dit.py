"""The tiny transformers of `zoo_dit` behave like models: what other tests take for granted."""

import pytest
import torch
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
    model = dit.build()
    inputs = example_inputs(model, dit.size, 1, dit.frames)
    assert inputs is not None
    shape = dit.run(model, dit.inputs(batch=1)).shape
    result = dit.run(model, inputs)
    assert result.isfinite().all()
    if dit.change is None:
        assert result.shape == shape
