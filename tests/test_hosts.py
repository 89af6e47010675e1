"""Every UNet of diffusers and the ldm family: exact without merging, right with it."""

import copy
import functools
from typing import Any

import pytest
import torch
import zoo_diffusers
import zoo_ldm
from torch import nn
from zoo_diffusers import expected_tokens, module_state, spatial_tokens, tokens_into

import tomesd

# A model that merges nothing must not pass for one that merges.
pytestmark = [
    pytest.mark.filterwarnings("error::tomesd.MergeWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),  # ldm's sampler
    pytest.mark.filterwarnings("ignore:.*autocast.*deprecated"),  # ldm's checkpoint
]

EVERYTHING = {"merge_crossattn": True, "merge_mlp": True}
HOSTS: dict[str, Any] = zoo_diffusers.HOSTS | zoo_ldm.HOSTS
ONE_LEVEL = ("dit", "pixart", "ldm-stack", "ldm-block", "comfy-stack", "comfy-block")
every_host = pytest.mark.parametrize("name", HOSTS)


@functools.cache
def _built(name: str) -> nn.Module:
    return HOSTS[name].build()


def fresh(name: str) -> tuple[Any, Any]:
    """The host and a copy of its model that a test may patch."""
    return HOSTS[name], copy.deepcopy(_built(name))


def assert_differs(one: torch.Tensor, other: torch.Tensor, name: str) -> None:
    assert (one - other).abs().max() > (0.01 if name in zoo_ldm.HOSTS else 1e-3)


@every_host
@torch.no_grad()
def test_ratio_zero_is_bit_identical(name: str) -> None:
    host, model = fresh(name)
    plain = host.run(model)
    tomesd.apply_patch(model, ratio=0, max_downsample=8, **EVERYTHING)
    assert torch.equal(host.run(model), plain)
    assert torch.equal(host.run(model, keyword=True), plain)


@every_host
@torch.no_grad()
def test_merging_changes_the_output_and_nothing_else(name: str) -> None:
    host, model = fresh(name)
    torch.manual_seed(1)
    plain = host.run(model)  # a sampler may draw noise itself
    state = torch.get_rng_state()
    assert tomesd.apply_patch(model, ratio=0.5) is model
    torch.manual_seed(1)
    merged = host.run(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert merged.shape == plain.shape and merged.isfinite().all()
    assert_differs(merged, plain, name)
    torch.manual_seed(2)
    assert torch.equal(host.run(model), merged)
    assert torch.equal(host.run(tomesd.apply_patch(fresh(name)[1], ratio=0.5)), merged)
    assert not torch.equal(host.run(tomesd.apply_patch(model, ratio=0.5, seed=1)), merged)


@every_host
@torch.no_grad()
def test_keyword_call_equals_positional_call(name: str) -> None:
    host, model = fresh(name)
    for options in ({}, EVERYTHING):
        tomesd.apply_patch(model, ratio=0.5, **options)
        assert torch.equal(host.run(model), host.run(model, keyword=True))


@every_host
@torch.no_grad()
def test_remove_patch_restores_bits_classes_and_attributes(name: str) -> None:
    host, model = fresh(name)
    before, plain = module_state(model), host.run(model)
    tomesd.apply_patch(model, 0.5, 8, **EVERYTHING)
    swapped = {n: type(m) for n, m in model.named_modules() if type(m) is not before[n][0]}
    assert any(n.endswith("attn1") or "transformer_blocks" in n for n in swapped)
    for n, cls in swapped.items():
        original = before[n][0]
        assert issubclass(cls, original)
        assert (cls.__module__, cls.__qualname__) == (original.__module__, original.__qualname__)
        assert cls.__name__ == original.__name__
    assert not torch.equal(host.run(model), plain)
    tomesd.apply_patch(model, 0.25)  # a second patch replaces the first, so one removal is enough
    host.run(model)
    assert tomesd.remove_patch(model) is model
    assert module_state(model) == before
    assert torch.equal(host.run(model), plain)


@every_host
@torch.no_grad()
def test_exactly_the_chosen_levels_lose_exactly_the_chosen_share(name: str) -> None:
    host, model = fresh(name)
    # DiT cuts its output back into a square, and a block on its own knows squares only.
    height = 16 if name == "dit" or name.endswith("-block") else 24

    def tokens() -> dict[str, int]:
        with tokens_into(model) as seen:
            host.run(model, height=height, batch=1)
        return spatial_tokens(seen)

    full = tokens()
    assert max(full.values()) == height * 16 // host.finest**2  # the zoo states it rightly
    assert (len(set(full.values())) == 1) == (name in ONE_LEVEL)
    for levels, ratio in [(1, 0.5), (1, 0.25), (2, 0.25), (2, 0.5), (2, 0.75)]:
        tomesd.apply_patch(model, ratio, None if levels == 1 else 2 * host.finest)
        assert tokens() == expected_tokens(full, levels, ratio)


@every_host
@torch.no_grad()
def test_each_option_merges_its_own_layer(name: str) -> None:
    host, model = fresh(name)
    options = {"merge_attn": "attn1.to_q", "merge_crossattn": "attn2.to_q", "merge_mlp": "ff.net.0"}

    def run() -> tuple[dict[str, int], torch.Tensor]:
        with tokens_into(model, *options.values()) as seen:
            output = host.run(model, batch=1)
        return spatial_tokens(seen), output

    full, plain = run()
    outputs = [plain]
    for chosen, layer in options.items():
        if not any(n.endswith(layer) for n in full):  # as in DiT, without a text
            continue
        merging = {option: option == chosen for option in options}
        tomesd.apply_patch(model, 0.5, **merging, when="always")
        found, output = run()
        merged = expected_tokens(full, 1, 0.5)
        assert found == {n: merged[n] if n.endswith(layer) else full[n] for n in full}
        for other in outputs:
            assert_differs(output, other, name)
        outputs.append(output)
