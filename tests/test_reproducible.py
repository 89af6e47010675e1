"""The same seed gives the same bits, whatever happens around the call.

Everything runs with `use_rand=True`: without it there is nothing to reproduce.
"""

import copy
from typing import Any

import pytest
import torch
from zoo_diffusers import HOSTS, Host, call, make_sd_pipeline, make_unet, noise, run_pipeline

import tomesd

SD1 = HOSTS["sd1"]
hosts = pytest.mark.parametrize(
    "host", [HOSTS[n] for n in ("sd1", "sdxl", "pixart", "svd")], ids=lambda h: h.name
)
OPTIONS: dict[str, Any] = {"ratio": 0.5, "merge_crossattn": True, "merge_mlp": True}


def build(host: Host, **options: Any) -> Any:
    return tomesd.apply_patch(host.build(), **(OPTIONS | options))


def assert_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def assert_differs(actual: torch.Tensor, other: torch.Tensor) -> None:
    assert (actual - other).std() > 1e-3 * other.std()


@hosts
def test_same_bits_again(host: Host) -> None:
    model = build(host)
    first = host.run(model)
    assert_differs(first, host.run(host.build()))
    host.run(model, height=8, width=12, timestep=7)  # leaves nothing behind
    assert torch.equal(host.run(model), first)
    assert torch.equal(host.run(build(host)), first)
    assert torch.equal(host.run(copy.deepcopy(model)), first)
    tomesd.apply_patch(model, 0.25, seed=5)
    tomesd.apply_patch(model, **OPTIONS)
    assert torch.equal(host.run(model), first)


@hosts
def test_other_state_of_the_global_rng(host: Host) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = host.run(build(host))
        torch.manual_seed(2)
        torch.rand(17)
        assert torch.equal(host.run(build(host)), first)


@hosts
def test_global_rng_is_not_touched(host: Host) -> None:
    model = host.build()
    before = torch.get_rng_state()
    tomesd.apply_patch(model, **OPTIONS)
    assert torch.equal(torch.get_rng_state(), before)
    host.run(model)
    assert torch.equal(torch.get_rng_state(), before)
    tomesd.remove_patch(model)
    assert torch.equal(torch.get_rng_state(), before)


@hosts
def test_other_seed_draws_differently(host: Host) -> None:
    outputs = [host.run(build(host, seed=seed)) for seed in (0, 1, 2**31, 2**40)]
    for k, output in enumerate(outputs):
        for other in outputs[:k]:
            assert_differs(output, other)
    # With fixed destinations there is nothing for the seed to change.
    fixed = [host.run(build(host, seed=seed, use_rand=False)) for seed in (0, 1)]
    assert torch.equal(*fixed)


def make_timeless_unet() -> Any:
    """A UNet that ignores the timestep: what still depends on it is the draw alone."""
    unet = make_unet()
    with torch.no_grad():
        unet.time_embedding.linear_2.weight.zero_()
    return unet


def test_each_timestep_has_its_own_draw() -> None:
    unet = make_timeless_unet()
    steps = (981, 961, 1, 0)
    plain = [SD1.run(unet, timestep=step) for step in steps]
    tomesd.apply_patch(unet, 0.5, use_rand=False)
    fixed = [SD1.run(unet, timestep=step) for step in steps]
    tomesd.apply_patch(unet, 0.5)
    drawn = [SD1.run(unet, timestep=step) for step in steps]
    for k in range(1, len(steps)):
        assert torch.equal(plain[k], plain[0])
        assert torch.equal(fixed[k], fixed[0])
        for other in drawn[:k]:
            assert_differs(drawn[k], other)
    assert torch.equal(SD1.run(unet, timestep=steps[1]), drawn[1])


@pytest.mark.parametrize(
    "timestep",
    [
        500,
        500.0,
        torch.tensor(500),
        torch.tensor([500]),
        torch.tensor(500.0),
        torch.full((2,), 500),
    ],
    ids=["int", "float", "tensor", "one", "float tensor", "batch"],
)
def test_draw_does_not_depend_on_how_the_timestep_is_given(timestep: Any) -> None:
    unet = build(SD1)
    inputs = SD1.inputs(16, 16, 2, 0, 500)
    with torch.no_grad():
        expected = call(unet, inputs, leading=3)
        assert_rounding(call(unet, inputs | {"timestep": timestep}, leading=3), expected)
        assert_rounding(call(unet, inputs | {"timestep": timestep}), expected)


def test_fractional_timesteps_draw_differently() -> None:
    """Samplers of the k-diffusion kind run at timesteps such as 500.2 and 500.7."""
    unet = tomesd.apply_patch(make_timeless_unet(), 0.5)
    inputs = SD1.inputs(16, 16, 2, 0, 500)
    with torch.no_grad():
        first, second = (call(unet, inputs | {"timestep": torch.tensor(t)}) for t in (500.2, 500.7))
    assert_differs(first, second)


@hosts
def test_item_does_not_depend_on_the_batch(host: Host) -> None:
    model = build(host)
    batch = host.run(model, batch=4)
    assert_rounding(host.run(model, batch=1), batch[:1])
    assert_rounding(host.run(model, batch=3), batch[:3])


def test_items_with_timesteps_of_their_own() -> None:
    """As in training: each item is drawn as if it were alone."""
    unet = build(SD1)
    inputs = SD1.inputs(16, 16, 3, 0, 500) | {"timestep": torch.tensor([10, 500, 990])}
    with torch.no_grad():
        batch = call(unet, inputs)
        for k in range(3):
            alone = {name: value[k : k + 1] for name, value in inputs.items()}
            assert_rounding(call(unet, alone), batch[k : k + 1])


@pytest.mark.parametrize("host", [HOSTS["sd1"], HOSTS["sdxl"]], ids=lambda h: h.name)
def test_split_guidance_equals_batched_guidance(host: Host) -> None:
    """One latent, with and without the text: in one call, or in two as low-memory modes do."""
    model = build(host)
    both = host.inputs(16, 16, 2, 0, 500)
    both["sample"] = noise(1, 4, 16, 16, seed=3).repeat(2, 1, 1, 1)
    added = both.get("added_cond_kwargs", {})
    with torch.no_grad():
        batched = call(model, both)
        for k in range(2):
            half = both | {n: both[n][k : k + 1] for n in ("sample", "encoder_hidden_states")}
            if added:
                half["added_cond_kwargs"] = {n: v[k : k + 1] for n, v in added.items()}
            assert_rounding(call(model, half), batched[k : k + 1])


def test_pipeline_gives_the_same_picture() -> None:
    pipe = make_sd_pipeline()
    plain = run_pipeline(pipe)
    tomesd.apply_patch(pipe, **OPTIONS)
    first = run_pipeline(pipe)
    assert_differs(first, plain)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert torch.equal(run_pipeline(pipe), first)
    assert not torch.equal(run_pipeline(tomesd.apply_patch(pipe, **OPTIONS, seed=1)), first)
