"""The norm before self-attention merges what it gives, so that attention runs without the rest.

A hook on the norm, which may look at what it gives, makes the layer merge instead. So the same
model with such a hook is what results and memory are compared with.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo_ldm
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo_diffusers import HOSTS, seeded

import tomesd
from tomesd.regions import Norm

SIDE, CHANNELS, HEADS, BATCH = 16, 32, 8, 2


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside, and notes the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self.known:
            return
        self.known.add(address)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, address, storage.nbytes())

    def _forget(self, address: int, size: int) -> None:
        self.known.discard(address)
        self.now -= size


def make_block(**options: Any) -> Any:
    """A block as in Stable Diffusion 1.5, whose attention is not fused."""
    block = seeded(
        BasicTransformerBlock, CHANNELS, HEADS, 4, cross_attention_dim=24, **options
    ).eval()
    block.attn1.set_processor(AttnProcessor())
    return block


def run_block(block: Any, *args: Any, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, SIDE**2, CHANNELS, generator=generator)
    text = torch.randn(BATCH, 7, 24, generator=generator)
    with torch.no_grad():
        return block(x, *args, encoder_hidden_states=text, **options)


def merge_late(model: Any) -> Any:
    """A copy of a model in which the layers merge."""
    late = copy.deepcopy(model)
    for name, module in late.named_modules():
        if name.endswith("norm1") and isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda *_: None)
    return late


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that the norms gave."""
    tokens: list[int] = []
    original = Norm.run

    def record(*args: Any) -> Any:
        output = original(*args)
        tokens.append(output.shape[1])
        return output

    monkeypatch.setattr(Norm, "run", record)
    return tokens


def test_attention_runs_without_the_tokens_before_merging() -> None:
    block = tomesd.apply_patch(make_block(), 0.5, when="always")
    peaks = {}
    for name, model in (("early", block), ("late", merge_late(block))):
        run_block(model)
        with Peak() as peak:
            run_block(model)
        peaks[name] = peak.most
    number = torch.float32.itemsize
    assert peaks["late"] - peaks["early"] == BATCH * SIDE**2 * CHANNELS * number


def test_the_peak_is_what_attention_on_merged_tokens_needs() -> None:
    """Computed by hand, to the byte."""
    block = tomesd.apply_patch(make_block(), 0.5, when="always")
    run_block(block)
    with Peak() as peak:
        run_block(block)
    left, number = SIDE**2 // 2, torch.float32.itemsize
    scores = 2 * BATCH * HEADS * left**2  # before the softmax and after it
    tokens = BATCH * SIDE**2 * CHANNELS
    slots = BATCH * left * CHANNELS  # what attention gets, queries, keys and values
    text = BATCH * 7 * 24
    plan = 2 * BATCH * SIDE**2  # the slot of each token, an integer of 64 bits, and no more
    weights = 3 * CHANNELS**2  # transposed, those of queries, keys and values count as made
    assert peak.most == number * (scores + tokens + 4 * slots + text + plan + weights)


def test_the_feed_forward_layer_runs_without_the_plan() -> None:
    """With fused attention it needs the most memory: the patch adds nothing to that."""
    block = make_block()
    block.attn1.set_processor(AttnProcessor2_0())
    peaks = []
    for _ in range(2):
        run_block(block)
        with Peak() as peak:
            run_block(block)
        peaks.append(peak.most)
        tomesd.apply_patch(block, 0.5, when="always")
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("name", ["sd1", "sd2", "sdxl", "gligen", "svd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"merge_crossattn": True, "merge_mlp": True, "max_downsample": 2},
        {"metric": "keys"},
        {"proportional": True},
        {"share": "level", "window": 0},
    ],
    ids=lambda options: " ".join(options) or "default",
)
def test_results_are_the_same(name: str, options: dict, given: list[int]) -> None:
    host = HOSTS[name]
    model = tomesd.apply_patch(host.build(), 0.5, **options)
    late = merge_late(model)
    with torch.no_grad():
        early = host.run(model)
        fewest = min(given)
        given.clear()
        assert torch.equal(host.run(late), early)
    assert fewest < min(given)


@pytest.mark.parametrize("name", ["ldm-sd1", "ldm-sd2", "ldm-no-self-attention", "ldm-block"])
def test_results_are_the_same_in_ldm(name: str, given: list[int]) -> None:
    host = zoo_ldm.HOSTS[name]
    model = tomesd.apply_patch(host.build(), 0.5)
    early = host.run(model)
    assert min(given) == SIDE**2 // 2
    assert torch.equal(host.run(merge_late(model)), early)


def uses_the_norm_twice(self: Any, hidden_states: Tensor, **_: Any) -> Tensor:
    """A forward that a UI puts in place of the block's own."""
    normed = self.norm1(hidden_states)
    return self.attn1(normed) + normed


def hook_attention(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block.attn1.register_forward_pre_hook(lambda _, args: assert_full(args[0]))


def wrap_attention(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = block.attn1.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert_full(x)
        return original(x, *args, **kwargs)

    block.attn1.forward = forward


def replace_forward(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BasicTransformerBlock, "forward", uses_the_norm_twice)


def assert_full(x: Tensor) -> None:
    assert x.shape[1] == SIDE**2


@pytest.mark.parametrize(
    ("change", "patch_first"),
    [
        (hook_attention, True),
        (hook_attention, False),
        (wrap_attention, True),
        (replace_forward, True),
        (replace_forward, False),
    ],
)
def test_whoever_looks_at_the_tokens_sees_all(
    change: Callable[..., None],
    patch_first: bool,
    given: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = make_block()
    if not patch_first:
        change(block, monkeypatch)
    tomesd.apply_patch(block, 0.5, when="always")
    if patch_first:
        change(block, monkeypatch)
    run_block(block)
    assert set(given) <= {SIDE**2}


@pytest.mark.parametrize("positional", [True, False])
def test_a_mask_of_all_tokens_leaves_attention_alone(positional: bool, given: list[int]) -> None:
    """Checkpointing gives arguments by position, and so the mask."""
    block = make_block()
    mask = torch.zeros(BATCH, 1, SIDE**2)
    mask[..., ::2] = -1e4
    masked = ((mask,), {}) if positional else ((), {"attention_mask": mask})
    plain = run_block(block, *masked[0], **masked[1])
    tomesd.apply_patch(block, 0.5, when="always")
    with pytest.warns(tomesd.MergeWarning, match="attention_mask is given"):
        assert torch.equal(run_block(block, *masked[0], **masked[1]), plain)
    assert given == [SIDE**2]
    tomesd.apply_patch(block, 0.5, when="always", target="block")
    with pytest.warns(tomesd.MergeWarning, match="attention_mask is given"):
        assert torch.equal(run_block(block, *masked[0], **masked[1]), plain)


@pytest.mark.parametrize("target", ["kv", "block", "stack"])
def test_other_targets_merge_as_ever(target: str, given: list[int]) -> None:
    block = tomesd.apply_patch(make_block(), 0.5, when="always", target=target)
    late = merge_late(block)
    assert torch.equal(run_block(block), run_block(late))
    whole = SIDE**2 if target == "kv" else SIDE**2 // 2
    assert set(given) <= {whole}


def test_a_norm_put_in_later_merges_nothing_and_the_layer_does() -> None:
    block = tomesd.apply_patch(make_block(), 0.5, when="always")
    expected = run_block(block)
    norm = nn.LayerNorm(CHANNELS)
    norm.load_state_dict(block.norm1.state_dict())
    block.norm1 = norm
    assert torch.equal(run_block(block), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"norm_type": "ada_norm_single"},
        {"norm_type": "ada_norm_zero", "num_embeds_ada_norm": 10},
        {"positional_embeddings": "sinusoidal", "num_positional_embeddings": SIDE**2},
    ],
    ids=["single", "zero", "positions"],
)
def test_blocks_that_change_what_the_norm_gives_keep_it(options: dict) -> None:
    block = make_block(**options)
    before = type(block.norm1)
    tomesd.apply_patch(block, 0.5)
    assert type(block.norm1) is before


def test_nothing_is_left_of_it_and_copies_have_it() -> None:
    block = tomesd.apply_patch(make_block(), 0.5, when="always")
    expected = run_block(block)
    assert type(block.norm1) is not nn.LayerNorm
    assert torch.equal(run_block(copy.deepcopy(block)), expected)
    tomesd.remove_patch(block)
    assert type(block.norm1) is nn.LayerNorm
    assert vars(block.norm1).keys() == vars(nn.LayerNorm(CHANNELS)).keys()
