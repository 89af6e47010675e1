"""What is special about the ldm family; see also `test_hosts`.

Real ldm and ComfyUI, and the block shapes of CompVis v1, sgm and Forge.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import exact_cases
import pytest
import torch
import zoo_ldm
from safetensors.torch import load_file
from torch import Tensor, nn
from zoo_ldm import HOSTS, Host

import tomesd

# A model that merges nothing must not pass for one that merges.
pytestmark = [
    pytest.mark.filterwarnings("error::tomesd.MergeWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),  # ldm's sampler
    pytest.mark.filterwarnings("ignore:.*autocast.*deprecated"),  # ldm's checkpoint
]

# With each host's own checkpoint function; sgm's is torch's, which comes in two kinds.
CHECKPOINTED = [(name, False) for name in ("ldm-sd1", "ldm-sd2", "compvis", "ldm-block")]
CHECKPOINTED += [(name, reentrant) for name in ("sgm", "sgm-xl") for reentrant in (False, True)]


@contextmanager
def token_counts(model: nn.Module) -> Iterator[list[int]]:
    """How many tokens each self-attention, in order of execution, computes queries for."""
    counts: list[int] = []
    handles = [
        module.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1]))
        for name, module in model.named_modules()
        if name.endswith("attn1.to_q")
    ]
    assert handles
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
@torch.no_grad()
def test_sizes_can_alternate(host: Host) -> None:
    """The grid is read anew in every call. (A block on its own takes square ones only.)"""
    tall = (20, 20) if host.name.endswith("-block") else (24, 8)
    model = tomesd.apply_patch(host.build(), ratio=0.5)
    small = host.run(model)
    other = host.run(model, height=tall[0], width=tall[1])
    fresh = tomesd.apply_patch(host.build(), ratio=0.5)
    assert torch.equal(other, host.run(fresh, height=tall[0], width=tall[1]))
    assert torch.equal(host.run(model), small)


def test_code_bases_equal_the_original() -> None:
    """The same weights in every block shape give what tomesd 0.1.3 gave in ldm."""
    (case,) = [c for c in exact_cases.CASES if c.host == "ldm-sd1" and c.dtype == torch.float32]
    frozen = load_file(Path(__file__).parent / "fixtures" / "original.safetensors")[case.name]
    models: dict[str, nn.Module] = {}
    for code_base in (zoo_ldm.CompVis, zoo_ldm.Forge, zoo_ldm.Sgm):
        with zoo_ldm.built_from(code_base):
            models[code_base.__name__] = exact_cases.ldm_unet(linear=False)
    four_levels = {"channel_mult": [1, 2, 2, 2], "attention_resolutions": [1, 2, 4]}
    models["ComfyUI"] = zoo_ldm.build_comfy(**four_levels)
    latent = exact_cases.noise(f"latent {case.salt}", (1, 4, 16, 16), torch.float32)
    text = (1, exact_cases.CONTEXT_TOKENS, exact_cases.CONTEXT_DIM)
    context = exact_cases.noise("context", text, torch.float32)
    for name, model in models.items():
        options = {"use_rand": False, "window": 0, "when": "always"}
        tomesd.apply_patch(exact_cases.fill(model), **options, **case.settings)
        with torch.no_grad():
            output = exact_cases.sample(model(latent, torch.zeros(1), context))
        torch.testing.assert_close(output, frozen, rtol=2e-5, atol=2e-5, msg=name)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) > 10
    return found


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    scale = max(float(g.abs().max()) for g in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / scale


def one_call(host: Host, model: nn.Module) -> Tensor:
    return host.run(model).square().mean()


def two_calls(host: Host, model: nn.Module) -> Tensor:
    """Two sizes and timesteps are in flight before either is recomputed."""
    first = host.run(model, timestep=900).square().mean()
    return first + host.run(model, height=24, width=24, timestep=100, seed=1).square().mean()


@pytest.mark.parametrize("loss", [one_call, two_calls])
@pytest.mark.parametrize("name, reentrant", CHECKPOINTED)
def test_checkpointing_gives_the_same_gradients(
    name: str, reentrant: bool, loss: Callable[[Host, nn.Module], Tensor]
) -> None:
    host = HOSTS[name]
    models = [host.build(checkpoint=flag) for flag in (False, True)]
    for model in models:
        for module in model.modules():
            if hasattr(module, "use_reentrant"):
                module.use_reentrant = reentrant
        tomesd.apply_patch(model, ratio=0.5, merge_crossattn=True, merge_mlp=True)
    plain, checkpointed = (gradients(model, loss(host, model)) for model in models)
    assert largest_difference(plain, checkpointed) < 1e-5
    # The comparison is worth something: another draw, or no merging, gives other gradients.
    tomesd.apply_patch(models[1], ratio=0.5, merge_crossattn=True, merge_mlp=True, seed=1)
    assert largest_difference(plain, gradients(models[1], loss(host, models[1]))) > 1e-3


@pytest.mark.parametrize("name", ["ldm-block", "comfy-block"])
@torch.no_grad()
def test_block_without_a_grid_warns_once_and_runs_unmerged(name: str) -> None:
    host = HOSTS[name]
    block = host.build()
    before = host.run(block, height=24, width=8)
    tomesd.apply_patch(block, ratio=0.5)
    with pytest.warns(tomesd.MergeWarning, match="square") as caught:
        outputs = [host.run(block, height=24, width=8) for _ in range(3)]
    assert len(caught) == 1
    assert all(torch.equal(output, before) for output in outputs)


@torch.no_grad()
def test_sgm_arguments_arrive() -> None:
    block = zoo_ldm.build_block(zoo_ldm.Sgm)
    arguments = zoo_ldm.block_arguments(16, 16, 4, 0)
    extras = {
        "additional_tokens": zoo_ldm.noise("additional", 0, 4, 3, zoo_ldm.CHANNELS),
        "n_times_crossframe_attn_in_self": 2,
    }
    unpatched = block(**arguments, **extras)
    tomesd.apply_patch(block, ratio=0)
    assert torch.equal(block(**arguments, **extras), unpatched)
    tomesd.apply_patch(block, ratio=0.5)
    everything = block(**arguments, **extras)
    assert everything.shape == unpatched.shape
    for name in extras:
        one_missing = {key: value for key, value in extras.items() if key != name}
        assert (block(**arguments, **one_missing) - everything).abs().max() > 0.01
    assert torch.equal(block(*arguments.values(), *extras.values()), everything)


@torch.no_grad()
def test_comfy_patches_still_see_every_token() -> None:
    """ComfyUI's own extension points sit around attention; their users expect the full grid."""
    host = HOSTS["comfy-unet"]
    model = host.build()
    seen: list[tuple[int, int, int]] = []

    def attn1_patch(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple:
        seen.append((q.shape[1], k.shape[1], v.shape[1]))
        return q, k, v

    def attn1_output_patch(out: Tensor, options: dict[str, Any]) -> Tensor:
        seen.append((out.shape[1],) * 3)
        return 0.5 * out

    patches = {"attn1_patch": [attn1_patch], "attn1_output_patch": [attn1_output_patch]}
    arguments = zoo_ldm.unet_arguments(16, 16, 2, 0)

    def run() -> tuple[Tensor, list[tuple[int, int, int]]]:
        seen.clear()
        return model(**arguments, transformer_options={"patches": patches}), list(seen)

    before, full = run()
    tomesd.apply_patch(model, ratio=0.5)
    with token_counts(model) as counts:
        after, merged = run()
    assert merged == full
    assert min(counts) < 128 == max(counts)
    assert (after - before).abs().max() > 0.01
