"""Matching on the image that a rectified flow is expected to lead to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from merging_dit import ROWS, SUPPORTED, assert_rounding, at_noise
from torch import Tensor
from zoo_diffusers import HOSTS
from zoo_dit import alone

import tomesd
from tomesd.patch import patch_of
from tomesd.regions import Given

FLOWS = {name: dit for name, dit in SUPPORTED.items() if ROWS[dit.kind].flow}


def latent_name(inputs: dict[str, Any]) -> str:
    return "x" if "x" in inputs else "hidden_states"


def mixed(inputs: dict[str, Any], other: dict[str, Any], level: float) -> dict[str, Any]:
    """The inputs with a latent on the straight line from `inputs` (image) to `other` (noise)."""
    name = latent_name(inputs)
    one, two = inputs[name], other[name]
    if isinstance(one, list):
        return inputs | {name: [(1 - level) * a + level * b for a, b in zip(one, two, strict=True)]}
    return inputs | {name: (1 - level) * one + level * two}


def expected_by(model: Any, dit: Any, steps: list[dict[str, Any]]) -> list[Tensor | None]:
    """What tokens were matched by, in each call."""
    found: list[Tensor | None] = []
    for step in steps:
        calls: list[Any] = []
        patch_of(model).observer = lambda scope, *_, calls=calls: calls.append(scope.call)  # type: ignore[union-attr]
        dit.run(model, step)
        found.append(calls[0].clean)
    return found


@pytest.mark.parametrize("name", FLOWS)
def test_two_latents_on_a_line_tell_the_image(name: str) -> None:
    dit = FLOWS[name]
    image, noise = dit.inputs(seed=0), dit.inputs(seed=1)
    model = tomesd.apply_patch(dit.build(), 0.5, when="always", end=1.0)
    steps = [at_noise(dit, mixed(image, noise, level), level) for level in (0.9, 0.7, 0.7, 0.4)]
    first, second, again, third = expected_by(model, dit, steps)
    # The tokens of the image itself, as the same reader makes them of a first latent.
    (tokens,) = expected_by(model, dit, [at_noise(dit, image, 0.95)])
    assert tokens is not None and second is not None and again is not None and third is not None
    for clean in (second, again, third):  # the second call at one time as well
        assert_rounding(clean, tokens, 2e-4)
    assert not torch.equal(first, tokens)  # one latent alone tells nothing


def test_an_image_that_is_made_from_another_one_forgets_the_image_before() -> None:
    """It begins where that one was when its last tokens were merged, or later."""
    dit = FLOWS["flux"]
    model = tomesd.apply_patch(dit.build(), 0.5, when="always")
    for level in (0.95, 0.1):  # at the second one, nothing merges any more
        dit.run(model, at_noise(dit, dit.inputs(seed=0), level))
    begun = at_noise(dit, dit.inputs(seed=1), 0.9)
    (found,) = expected_by(model, dit, [begun])
    (alone,) = expected_by(tomesd.apply_patch(dit.build(), 0.5, when="always"), dit, [begun])
    assert found is not None and alone is not None
    assert torch.equal(found, alone)


def test_batched_and_split_guidance_merge_the_same_tokens() -> None:
    dit = FLOWS["sd3"]
    image, noise = dit.inputs(seed=0), dit.inputs(seed=1)
    levels = (0.9, 0.7, 0.4)
    steps = [at_noise(dit, mixed(image, noise, level), level) for level in levels]
    for step in steps:  # one latent for both prompts
        step["hidden_states"] = step["hidden_states"][:1].repeat(2, 1, 1, 1)
    halves = [{k: v[i : i + 1] for k, v in step.items()} for step in steps for i in (0, 1)]
    models = [tomesd.apply_patch(dit.build(), 0.5, when="always", end=1.0) for _ in range(2)]
    together = [dit.run(models[0], step) for step in steps]
    apart = [dit.run(models[1], half) for half in halves]
    for number, both in enumerate(together):
        assert_rounding(torch.cat(apart[2 * number : 2 * number + 2]), both)


@pytest.mark.parametrize("name", ["flux", "zimage", "wan"])
def test_each_item_of_a_batch_merges_by_itself(name: str) -> None:
    dit = FLOWS[name]
    image, noise = dit.inputs(seed=0), dit.inputs(seed=1)
    steps = [at_noise(dit, mixed(image, noise, level), level) for level in (0.9, 0.7)]
    together = tomesd.apply_patch(dit.build(), 0.5, when="always", end=1.0)
    outputs = [dit.run(together, step) for step in steps]
    for item in (0, 1):
        model = tomesd.apply_patch(dit.build(), 0.5, when="always", end=1.0)
        for step, both in zip(steps, outputs, strict=True):
            assert_rounding(dit.run(model, alone(step, item)), both[item : item + 1])


def test_it_is_the_default_of_flows_alone() -> None:
    def metric(model: Any) -> str | None:
        tomesd.apply_patch(model)
        return patch_of(model).settings.metric  # type: ignore[union-attr]

    assert metric(SUPPORTED["flux"].build()) == "clean"
    assert metric(SUPPORTED["cogvideox_5b"].build()) == "input"
    assert metric(HOSTS["sd1"].build()) == "input"


@pytest.mark.parametrize("model", [SUPPORTED["cogvideox_5b"].build, HOSTS["sd1"].build])
def test_other_models_refuse_it(model: Any) -> None:
    with pytest.raises(ValueError, match=r"metric='clean': a .* is no rectified flow"):
        tomesd.apply_patch(model(), metric="clean")


# Where a pixel or patch is in what a model gets, and which of its tokens has it.
PIXELS = {
    "kandinsky5": ((0, 1, 5, 3), 24 + 2 * 4 + 1),
    "anyflow": ((0, 1, 0, 5, 3), 24 + 2 * 4 + 1),
    "joyimage_plus": ((0, 11), 11),
    "bria_fibo2": ((0, 0, 5, 3), 2 * 4 + 1),
}


@pytest.mark.parametrize("name", PIXELS)
def test_tokens_of_a_latent_are_in_the_order_of_the_blocks(name: str) -> None:
    dit, (pixel, token) = SUPPORTED[name], PIXELS[name]
    inputs = dit.inputs()
    layout = ROWS[dit.kind].layout(dit.build(), Given(("hidden_states",), (), inputs))
    latent = torch.zeros_like(inputs["hidden_states"])
    latent[pixel] = 1
    tokens = layout.tokens_of(latent)
    assert tokens.shape[1] == layout.tokens
    assert tokens[0].any(dim=1).nonzero().flatten().tolist() == [token]
