"""Corners of patching that no single host shows."""

import pytest
import torch
import zoo_diffusers
import zoo_ldm
from torch import nn

import tomesd
from tomesd import api


@pytest.mark.parametrize("library", ["diffusers", "ldm"])
def test_removing_the_patch_before_a_checkpointed_backward_is_refused(library: str) -> None:
    """The backward pass runs the blocks again; unmerged, its gradients would be wrong."""
    if library == "diffusers":
        model = zoo_diffusers.HOSTS["sd1"].build().train()
        model.enable_gradient_checkpointing()
        width = model.config.cross_attention_dim
    else:
        model = zoo_ldm.build_ldm(checkpoint=True).train()
        width = next(m.attn2.to_k.in_features for m in model.modules() if hasattr(m, "attn2"))
    latent = torch.randn(2, 4, 16, 16, requires_grad=True)
    with tomesd.patched(model, ratio=0.5):
        output = model(latent, torch.tensor([500, 500]), torch.randn(2, 7, width))
        loss = getattr(output, "sample", output).sum()
    with pytest.raises(RuntimeError, match="between a forward pass with gradient"):
        loss.backward()


def test_a_failure_half_way_leaves_nothing_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo_diffusers.HOSTS["sd1"].build()
    before = zoo_diffusers.module_state(model)
    swap, calls = api.swap, []

    def swap_ten(*args):
        calls.append(args)
        if len(calls) == 10:
            raise MemoryError
        swap(*args)

    monkeypatch.setattr(api, "swap", swap_ten)
    with pytest.raises(MemoryError):
        tomesd.apply_patch(model)
    assert zoo_diffusers.module_state(model) == before


def test_attention_with_a_mask_over_the_tokens_runs_unmerged_and_says_so() -> None:
    host = zoo_diffusers.HOSTS["dit"]
    model = host.build()
    block = model.transformer_blocks[0]
    tomesd.apply_patch(block, ratio=0.5)
    x, steps = torch.randn(2, 16, block.attn1.to_q.in_features), torch.tensor([1, 1])
    mask = torch.zeros(2, 1, 16)
    arguments = {"timestep": steps, "class_labels": steps}
    with pytest.warns(tomesd.MergeWarning, match="attention_mask"):
        masked = block(x, attention_mask=mask, **arguments)
    tomesd.remove_patch(block)
    torch.testing.assert_close(masked, block(x, **arguments))


def test_a_stack_outside_its_model_is_refused() -> None:
    model = tomesd.apply_patch(zoo_diffusers.HOSTS["sd1"].build())
    stack = model.down_blocks[0].attentions[0]
    with pytest.raises(RuntimeError, match="outside its model's forward"):
        stack(torch.randn(1, stack.config.in_channels, 8, 8))


class Wrapper(nn.Module):
    """What user code puts around a model: other argument names, more than one model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = zoo_diffusers.HOSTS["sd1"].build()
        self.second = zoo_diffusers.HOSTS["sd1"].build()

    def forward(self, latent, sigma, text):
        return self.first(latent, sigma, text).sample + self.second(latent, sigma, text).sample


def test_every_model_inside_a_wrapper_is_patched() -> None:
    model = Wrapper()
    width = model.first.config.cross_attention_dim
    inputs = (torch.randn(2, 4, 16, 16), torch.tensor(500), torch.randn(2, 7, width))
    with torch.no_grad():
        plain = model(*inputs)
        tomesd.apply_patch(model, ratio=0.5)
        with zoo_diffusers.tokens_into(model) as seen:
            merged = model(*inputs)
    assert not torch.equal(plain, merged)
    for part in ("first", "second"):
        assert 128 in {tokens for name, (_, tokens, _) in seen.items() if name.startswith(part)}
