"""Selectors, metrics, targets and proportional attention on real hosts, against hand computation.

Everything by hand starts from what hooks saw going into a block, and uses an unpatched copy.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ldm.modules.attention
import pytest
import torch
import zoo_diffusers
import zoo_ldm
from torch import Tensor, nn
from zoo_diffusers import tokens_into

import tomesd
from tomesd.kernels import Cells
from tomesd.plan import MergePlan
from tomesd.selectors import SELECTORS

# A method that quietly does less than it says must not pass.
pytestmark = [
    pytest.mark.filterwarnings("error::tomesd.MergeWarning"),
    pytest.mark.filterwarnings("ignore:.*autocast.*deprecated"),  # ldm's checkpoint
]

DIFFUSERS = ("sd1", "sdxl", "pixart", "dit", "controlnet")
LDM = ("ldm-sd1", "sgm", "comfy-unet")
HOSTS: dict[str, Any] = {name: zoo_diffusers.HOSTS[name] for name in DIFFUSERS}
HOSTS |= {name: zoo_ldm.HOSTS[name] for name in LDM}

# (selector, target, metric, proportional): each selector with each target, each metric with each
# selector, and proportional attention wherever it can be.
METHODS = [
    ("bipartite", "attn", "keys", True),
    ("bipartite", "kv", "input", False),
    ("bipartite", "block", "mean", False),
    ("bipartite", "stack", "previous", False),
    ("kmeans", "attn", "mean", False),
    ("kmeans", "kv", "keys", True),
    ("kmeans", "block", "previous", False),
    ("kmeans", "stack", "input", False),
    ("grid", "attn", "input", True),
    ("grid", "kv", "previous", True),
    ("grid", "block", "input", False),
    ("grid", "stack", "keys", False),
]
NAMES = ("selector", "target", "metric", "proportional")
# The block of sgm differs in its attention only, which has tests of its own.
PLACES = [name for name in HOSTS if name != "sgm"]
# All of them on the two hosts that differ most; on others, every second.
CROSS = [
    (name, method)
    for i, name in enumerate(PLACES)
    for j, method in enumerate(METHODS)
    if name in ("sd1", "sdxl") or (i + j) % 2 == 0
]

LAYERS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q", "ff.net.0")
MERGED = {
    "attn": {"attn1.to_q", "attn1.to_k", "attn1.to_v"},
    "kv": {"attn1.to_k", "attn1.to_v"},
    "block": set(LAYERS),
    "stack": set(LAYERS),
}


@functools.cache
def _built(name: str) -> nn.Module:
    return HOSTS[name].build()


def fresh(name: str) -> tuple[Any, nn.Module]:
    """The host and a copy of its model that a test may patch."""
    return HOSTS[name], copy.deepcopy(_built(name))


def patch(model: nn.Module, method: tuple, ratio: float = 0.5, **options: Any) -> None:
    tomesd.apply_patch(
        model, ratio, when="always", **dict(zip(NAMES, method, strict=True)), **options
    )


@pytest.mark.parametrize(("name", "method"), CROSS, ids=str)
@torch.no_grad()
def test_every_method_runs_merges_what_it_says_and_comes_off(name: str, method: tuple) -> None:
    host, model = fresh(name)
    with tokens_into(model, *LAYERS) as full:
        plain = host.run(model)
    patch(model, method)
    with tokens_into(model, *LAYERS) as seen:
        output = host.run(model)
    assert output.shape == plain.shape and output.isfinite().all()
    assert (output - plain).abs().max() > 1e-3
    finest = max(shape[1] for shape in full.values())
    merged = tuple(MERGED[method[1]])
    for layer, shape in full.items():
        expected = shape[1] // 2 if layer.endswith(merged) and shape[1] == finest else shape[1]
        assert seen[layer] == (shape[0], expected, shape[2]), layer
    assert torch.equal(host.run(model), output)  # at the same timestep nothing is remembered
    tomesd.remove_patch(model)
    assert torch.equal(host.run(model), plain)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("method", METHODS[1::6], ids=str)
@torch.no_grad()
def test_removing_no_token_changes_no_bit(name: str, method: tuple) -> None:
    host, model = fresh(name)
    plain = host.run(model)
    patch(model, method, ratio=0.001, window=0)
    with pytest.warns(tomesd.MergeWarning, match="merged nothing"):
        assert torch.equal(host.run(model), plain)


@pytest.mark.parametrize("name", ["sd1", "pixart"])
@torch.no_grad()
def test_every_choice_matters(name: str) -> None:
    host, model = fresh(name)
    outputs = {}
    for method in METHODS:
        patch(model, method)
        host.run(model, timestep=600)  # what the metric `previous` looks back to
        outputs[method] = host.run(model)
    for one, output in outputs.items():
        for other, different in outputs.items():
            gap = (output - different).abs().max()
            # What merges by the same plan again gets back what it had: then, runs are blocks.
            same = one[0] == other[0] == "grid" and {one[1], other[1]} <= {"block", "stack"}
            assert gap < 1e-5 if same or one == other else gap > 1e-4, (one, other)


# One attention layer, by hand.


@dataclass
class Seen:
    """What went in and out of a module when it ran last."""

    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None

    @property
    def x(self) -> Tensor:
        return (*self.args, *self.kwargs.values())[0]

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        """Runs `module` with what was seen, but for its first argument, `x`."""
        assert self.args
        return module(x, *self.args[1:], **self.kwargs)


@contextmanager
def watching(model: nn.Module, *paths: str) -> Iterator[list[Seen]]:
    seen = [Seen() for _ in paths]

    def note(into: Seen) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            into.args, into.kwargs, into.output = args, dict(kwargs), output

        return hook

    handles = [
        model.get_submodule(path).register_forward_hook(note(into), with_kwargs=True)
        for path, into in zip(paths, seen, strict=True)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def slow_merge(plan: MergePlan, x: Tensor) -> Tensor:
    slots = plan.size.shape[1]
    return torch.stack(
        [
            torch.stack([x[b, plan.slot[b] == m].mean(0) for m in range(slots)])
            for b in range(len(x))
        ]
    )


def slow_unmerge(plan: MergePlan, y: Tensor) -> Tensor:
    return torch.stack([y[b][plan.slot[b]] for b in range(len(y))])


def slow_attention(attention: Any, x: Tensor, source: Tensor, size: Tensor | None) -> Tensor:
    """Attention of `x` to `source`, a key of size s counting s times."""
    q, k, v = attention.to_q(x), attention.to_k(source), attention.to_v(source)
    q, k, v = (t.unflatten(2, (attention.heads, -1)).transpose(1, 2) for t in (q, k, v))
    weight = (q @ k.mT / math.sqrt(q.shape[-1])).exp()
    if size is not None:
        weight = weight * size[:, None, None, :]
    y = (weight / weight.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2)
    for layer in attention.to_out:
        y = layer(y)
    return y


def slow_angle(x: Tensor) -> Tensor:
    """Tokens as directions in a quarter of a plane, by how similar they are to their mean."""
    found = torch.empty(*x.shape[:2], 2)
    for b, image in enumerate(x):
        mean = image.mean(0)
        likeness = [float(token @ mean / token.norm() / mean.norm()) for token in image]
        low, high = min(likeness), max(likeness)
        for n, value in enumerate(likeness):
            angle = (value - low) / (high - low) * math.pi / 2
            found[b, n] = torch.tensor([math.cos(angle), math.sin(angle)])
    return found


def plan_of(selector: str, metric: Tensor, side: int, remove: int) -> MergePlan:
    return SELECTORS[selector](metric, Cells.of(side, side, 2, 2, window=4), remove)


# Host, a block on the finest grid, and the side of the grid for a latent of 16 x 16.
BLOCKS = {
    "sd1": ("down_blocks.0.attentions.0.transformer_blocks.0", 16),
    "sdxl": ("down_blocks.1.attentions.0.transformer_blocks.1", 8),
    "pixart": ("transformer_blocks.1", 8),
    "controlnet": ("down_blocks.0.attentions.0.transformer_blocks.0", 16),
    "ldm-sd1": ("input_blocks.1.1.transformer_blocks.0", 16),
    "sgm": ("input_blocks.1.1.transformer_blocks.0", 16),
    "comfy-unet": ("input_blocks.1.1.transformer_blocks.0", 16),
}
blocks = pytest.mark.parametrize("name", BLOCKS)
attention_methods = pytest.mark.parametrize(
    "method", [m for m in METHODS if m[1] in ("attn", "kv")], ids=str
)
BY_HAND = {"ratio": 0.5, "use_rand": False, "window": 4}


@blocks
@attention_methods
@torch.no_grad()
def test_attention_is_what_the_hand_computes(name: str, method: tuple) -> None:
    selector, target, metric, proportional = method
    host, model = fresh(name)
    path, side = BLOCKS[name]
    block = copy.deepcopy(model.get_submodule(path))
    patch(model, method, **BY_HAND)
    with watching(model, path, f"{path}.attn1") as (around, attention):
        host.run(model, timestep=600)
        before = around.output
        host.run(model, timestep=500, seed=1)
    x, normed = around.x, attention.x
    measured = {
        "input": lambda: x,
        "keys": lambda: block.attn1.to_k(block.norm1(x)),
        "mean": lambda: slow_angle(x),
        "previous": lambda: before,
    }[metric]()
    plan = plan_of(selector, measured, side, side * side // 2)
    merged = slow_merge(plan, normed)
    size = plan.size if proportional else None
    if target == "kv":
        expected = slow_attention(block.attn1, normed, merged, size)
    else:
        expected = slow_unmerge(plan, slow_attention(block.attn1, merged, merged, size))
    torch.testing.assert_close(attention.output, expected, rtol=1e-4, atol=1e-5)
    other = slow_attention(block.attn1, normed, normed, None)
    assert (attention.output - other).abs().max() > 1e-3


# A stack on its own keeps equal tokens equal, which convolutions and positions do not.


def diffusers_stack() -> nn.Module:
    return zoo_diffusers.make_unet().get_submodule("down_blocks.0.attentions.0")


def run_stack(stack: nn.Module, features: Tensor) -> Tensor:
    context = zoo_ldm.context(len(features), seed=0)
    if hasattr(stack, "config"):
        context = zoo_diffusers.noise(len(features), 7, zoo_diffusers.CROSS, seed=0)
        return stack(features, encoder_hidden_states=context, return_dict=False)[0]
    return stack(features, context)


STACKS: dict[str, Callable[[], nn.Module]] = {
    "diffusers": diffusers_stack,
    "ldm": lambda: zoo_ldm.build_stack(ldm.modules.attention),
    "comfy": lambda: zoo_ldm.build_stack(zoo_ldm.comfy(zoo_ldm.COMFY_ATTENTION)),
}


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("target", ["attn", "kv"])
@torch.no_grad()
def test_proportional_attention_loses_nothing_where_copies_merge(
    kind: str, selector: str, target: str
) -> None:
    """A picture of flat 2 x 2 cells: what merges are copies, so that only their number is lost,
    which proportional attention makes up for."""
    stack = STACKS[kind]()
    features = 3 * zoo_ldm.noise("features", 0, 2, zoo_ldm.CHANNELS, 4, 4)
    features = features.repeat_interleave(2, 2).repeat_interleave(2, 3)
    plain = run_stack(stack, features)
    error = {}
    for proportional in (True, False):
        patch(stack, (selector, target, "input", proportional), window=0)
        error[proportional] = float((run_stack(stack, features) - plain).abs().max())
    assert error[True] < 1e-5
    assert error[False] > 1e-3


# Whole blocks, and runs of them, by hand.


def deep(name: str) -> tuple[Any, nn.Module]:
    """A host of the ldm family with two blocks after each other."""
    if name == "deep comfy":
        attention = zoo_ldm.comfy(zoo_ldm.COMFY_ATTENTION)
        return zoo_ldm.HOSTS["comfy-stack"], zoo_ldm.build_stack(attention, depth=2)

    def arguments(*place: int) -> dict[str, Any]:
        found = zoo_ldm.unet_arguments(*place)
        return found | {"context": [found["context"]] * 2}  # one for each block

    host = dataclasses.replace(zoo_ldm.HOSTS["ldm-sd1"], arguments=arguments)
    return host, zoo_ldm.build_ldm(transformer_depth=2, context_dim=[zoo_ldm.CONTEXT_DIM] * 2)


# Host, where its blocks are, how many of them follow each other, and the side of the grid.
RUNS = {
    "sd1": ("down_blocks.0.attentions.0.transformer_blocks", 1, 16),
    "sdxl": ("down_blocks.1.attentions.0.transformer_blocks", 2, 8),
    "pixart": ("transformer_blocks", 2, 8),
    "dit": ("transformer_blocks", 2, 8),
    "deep ldm": ("input_blocks.1.1.transformer_blocks", 2, 16),
    "deep comfy": ("transformer_blocks", 2, 16),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("target", ["block", "stack"])
@torch.no_grad()
def test_tokens_keep_their_own_and_gain_what_their_slot_gains(
    name: str, selector: str, target: str
) -> None:
    path, count, side = RUNS[name]
    host, model = deep(name) if name.startswith("deep") else fresh(name)
    original = copy.deepcopy(model.get_submodule(path))
    patch(model, (selector, target, "input", False), **BY_HAND)
    with watching(model, *(f"{path}.{i}" for i in range(count))) as seen:
        host.run(model)
    runs = [range(count)] if target == "stack" else [[i] for i in range(count)]
    for run in runs:
        x = seen[run[0]].x
        plan = plan_of(selector, x, side, side * side // 2)
        merged = y = slow_merge(plan, x)
        for i in run:
            y = seen[i].run(original[i], y)
        expected = x + slow_unmerge(plan, y - merged)
        output = seen[run[-1]].output
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
        # In between, tokens stay merged.
        assert all(seen[i].x.shape[1] == plan.size.shape[1] for i in run[1:])


@torch.no_grad()
def test_a_new_image_does_not_look_back() -> None:
    """The metric `previous` has nothing to look at where time stands still or rises."""
    host, model = fresh("sd1")
    patch(model, ("bipartite", "attn", "input", False))
    on_input = host.run(model, timestep=500)
    patch(model, ("bipartite", "attn", "previous", False))
    for earlier in (None, 500, 400):
        if earlier is not None:
            host.run(model, timestep=earlier, seed=3)
        assert torch.equal(host.run(model, timestep=500), on_input)
    host.run(model, timestep=600, seed=3)
    assert not torch.equal(host.run(model, timestep=500), on_input)
