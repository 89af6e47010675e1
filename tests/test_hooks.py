"""Hooks of other libraries around patched modules, put on and taken off in any order."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import diffusers.hooks
import pytest
import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.cache_utils import CacheMixin
from torch import nn
from zoo_diffusers import HOSTS, PIXART_CONFIG, make_unet, module_state, seeded

import tomesd

SD1, PIXART = HOSTS["sd1"], HOSTS["pixart"]
ALL: dict[str, Any] = {"ratio": 0.5, "merge_crossattn": True, "merge_mlp": True}
# Patch, unpatch, hook, remove the hook: every order that makes sense, and some with a second patch.
ORDERS = [
    order
    for order in map("".join, itertools.permutations("PUHR"))
    if order.index("P") < order.index("U") and order.index("H") < order.index("R")
] + ["PHURPU", "PHUPRU", "PHPRU", "HPUPRU"]


def build() -> Any:
    """A UNet with blocks on the way down, in the middle and on the way up, and little else."""
    return make_unet(
        block_out_channels=(32,),
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
    )


def assert_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def assert_differs(actual: torch.Tensor, other: torch.Tensor) -> None:
    assert (actual - other).std() > 1e-3 * other.std()


def hooked_modules(model: nn.Module) -> list[nn.Module]:
    """The model itself, its stacks of blocks, and all that is patched inside a block."""
    kinds = (BasicTransformerBlock, Attention, FeedForward, diffusers.Transformer2DModel)
    return [model, *(m for m in model.modules() if isinstance(m, kinds))]


@dataclass
class Hooks:
    """One way to hook a model: `on` and `off`, and how often the hooks ran."""

    model: nn.Module
    calls: int = 0
    undo: list[Callable[[], Any]] = field(default_factory=list)

    def on(self) -> None:
        raise NotImplementedError

    def off(self) -> None:
        for undo in reversed(self.undo):
            undo()

    def count(self, *_: Any) -> None:
        self.calls += 1


class AccelerateHooks(Hooks):
    def on(self) -> None:
        class Count(accelerate.hooks.ModelHook):
            def pre_forward(hook, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                self.count()
                return args, kwargs

        for module in hooked_modules(self.model):
            add_hook_to_module(module, Count())

    def off(self) -> None:
        remove_hook_from_module(self.model, recurse=True)


class AccelerateBlockHooks(AccelerateHooks):
    """On the blocks alone, each hook chained onto another one."""

    def on(self) -> None:
        for module in self.model.modules():
            if isinstance(module, BasicTransformerBlock):
                add_hook_to_module(module, accelerate.hooks.ModelHook())
                add_hook_to_module(module, Counting(self), append=True)


class Counting(accelerate.hooks.ModelHook):
    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.hooks.count()
        return args, kwargs


class SequentialOffload(Hooks):
    """Weights come to the device leaf by leaf, for the time of each call."""

    def on(self) -> None:
        accelerate.cpu_offload(self.model, execution_device="cpu")
        assert all(p.device.type == "meta" for p in self.model.parameters())
        self.undo.append(self.model.conv_in.register_forward_hook(self.count).remove)

    def off(self) -> None:
        super().off()
        remove_hook_from_module(self.model, recurse=True)


class ModelOffload(Hooks):
    def on(self) -> None:
        _, hook = accelerate.cpu_offload_with_hook(self.model, execution_device="cpu")
        self.undo += [hook.remove, self.model.register_forward_hook(self.count).remove]


class WrappedForward(Hooks):
    """What user interfaces do by hand: put a function around `forward`, later put it back."""

    def on(self) -> None:
        for module in hooked_modules(self.model):
            self.wrap(module, module.forward)

    def wrap(self, module: nn.Module, original: Callable[..., Any]) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return original(*args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]
        self.undo.append(functools.partial(module.__delattr__, "forward"))


class WrappedForwardPutBack(WrappedForward):
    """The same, undone by assignment: what was found stays on the instance."""

    def wrap(self, module: nn.Module, original: Callable[..., Any]) -> None:
        super().wrap(module, original)
        self.undo[-1] = functools.partial(module.__setattr__, "forward", original)


class DiffusersHooks(Hooks):
    def on(self) -> None:
        class Count(diffusers.hooks.ModelHook):
            def new_forward(hook, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                self.count()
                return hook.fn_ref.original_forward(*args, **kwargs)

        for module in hooked_modules(self.model):
            registry = diffusers.hooks.HookRegistry.check_if_exists_or_initialize(module)
            registry.register_hook(diffusers.hooks.ModelHook(), "first")
            registry.register_hook(Count(), "second")

    def off(self) -> None:
        for name in ("first", "second"):
            self.model._diffusers_hook.remove_hook(name, recurse=True)


class GroupOffload(Hooks):
    kind = "leaf_level"

    def on(self) -> None:
        cpu = torch.device("cpu")
        self.model.enable_group_offload(cpu, cpu, self.kind, num_blocks_per_group=1)
        self.undo.append(self.model.conv_in.register_forward_hook(self.count).remove)

    def off(self) -> None:
        super().off()
        registry = diffusers.hooks.HookRegistry.check_if_exists_or_initialize(self.model)
        registry.remove_hook("group_offloading", recurse=True)


class BlockGroupOffload(GroupOffload):
    kind = "block_level"


class TorchHooks(Hooks):
    """They see all tokens, before merging and after unmerging."""

    def on(self) -> None:
        for module in hooked_modules(self.model):
            pre = module.register_forward_pre_hook(self.count)
            post = module.register_forward_hook(self.count)
            self.undo += [pre.remove, post.remove]


KINDS = [
    AccelerateHooks,
    AccelerateBlockHooks,
    SequentialOffload,
    ModelOffload,
    WrappedForward,
    WrappedForwardPutBack,
    DiffusersHooks,
    GroupOffload,
    BlockGroupOffload,
    TorchHooks,
]


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return SD1.run(build())


@pytest.fixture(scope="module")
def merged() -> torch.Tensor:
    return SD1.run(tomesd.apply_patch(build(), **ALL))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_order(
    kind: type[Hooks], order: str, plain: torch.Tensor, merged: torch.Tensor
) -> None:
    """At every stage the output is right and the hooks run; at the end only their traces are left.

    A twin model gets the same hooks and no patch: some hooks leave attributes behind.
    """
    assert_differs(merged, plain)
    unet, twin = build(), build()
    hooks, twin_hooks = kind(unet), kind(twin)
    is_patched = is_hooked = False
    for action in order:
        if action == "P":
            tomesd.apply_patch(unet, **ALL)
        elif action == "U":
            tomesd.remove_patch(unet)
        elif action == "H":
            hooks.on()
            twin_hooks.on()
        else:
            hooks.off()
            twin_hooks.off()
        is_patched = {"P": True, "U": False}.get(action, is_patched)
        is_hooked = {"H": True, "R": False}.get(action, is_hooked)
        before = hooks.calls
        assert torch.equal(SD1.run(unet), merged if is_patched else plain)
        assert (hooks.calls > before) == is_hooked
        if is_hooked:
            SD1.run(twin)
            assert hooks.calls - before == twin_hooks.calls
            twin_hooks.calls = 0
    assert module_state(unet) == module_state(twin)
    if kind is WrappedForwardPutBack:  # nobody can change what a closure holds
        return
    # Nor does anything that a hook kept still lead to a generated class.
    for module in unet.modules():
        for value in vars(module).values():
            assert "tomesd" not in getattr(getattr(value, "__code__", None), "co_filename", "")


def test_disk_offload(tmp_path: Path, plain: torch.Tensor, merged: torch.Tensor) -> None:
    for name in ("before", "after"):
        unet = build()
        if name == "before":
            tomesd.apply_patch(unet, **ALL)
        accelerate.disk_offload(unet, tmp_path / name, execution_device="cpu")
        if name == "after":
            tomesd.apply_patch(unet, **ALL)
        assert torch.equal(SD1.run(unet), merged)
        tomesd.remove_patch(unet)
        assert torch.equal(SD1.run(unet), plain)


@pytest.mark.parametrize("order", ["casting, patch", "patch, casting"])
def test_layerwise_casting(order: str) -> None:
    """Weights are stored in bfloat16 and used in float32: the same as rounding them once."""
    reference = build()
    skip = diffusers.hooks.layerwise_casting.DEFAULT_SKIP_MODULES_PATTERN
    cast = build()
    cast.enable_layerwise_casting(torch.bfloat16, torch.float32)
    rounded = {n for n, p in cast.named_parameters() if p.dtype == torch.bfloat16}
    assert len(rounded) > 20 and skip
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in rounded:
                parameter.copy_(parameter.bfloat16().float())
    plain = SD1.run(reference)
    expected = SD1.run(tomesd.apply_patch(reference, **ALL))
    assert_differs(expected, plain)
    unet = build()
    for action in order.split(", "):
        if action == "patch":
            tomesd.apply_patch(unet, **ALL)
        else:
            unet.enable_layerwise_casting(torch.bfloat16, torch.float32)
    assert torch.equal(SD1.run(unet), expected)
    assert {n for n, p in unet.named_parameters() if p.dtype == torch.bfloat16} == rounded
    tomesd.remove_patch(unet)
    assert torch.equal(SD1.run(unet), plain)


def test_torch_hooks_see_and_change_all_tokens() -> None:
    """A hook on a merged layer works on the full set, whenever it was put there."""
    outputs = []
    for order in ("hook, patch", "patch, hook"):
        unet, seen = build(), set()

        def double(module: Any, args: tuple, output: torch.Tensor, seen: set = seen) -> Any:
            seen.add((args[0].shape[1], output.shape[1]))
            return 2 * output

        for action in order.split(", "):
            if action == "patch":
                tomesd.apply_patch(unet, 0.5)
            else:
                unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.register_forward_hook(
                    double
                )
        outputs.append(SD1.run(unet))
        assert seen == {(256, 256)}
    assert torch.equal(*outputs)
    assert_differs(outputs[0], SD1.run(tomesd.apply_patch(build(), 0.5)))


# Caches of diffusers. What they keep must be full-size outputs: the next step merges other tokens.


class CachedPixArt(diffusers.PixArtTransformer2DModel, CacheMixin):
    """PixArt with the cache methods that newer models of diffusers have."""


def make_pixart() -> CachedPixArt:
    return seeded(CachedPixArt, **(PIXART_CONFIG | {"num_layers": 3}))


STEPS = (900, 800, 500, 400, 300)
ORDERS_WITH_CACHE = pytest.mark.parametrize("order", ["cache, patch", "patch, cache"])


def run_steps(model: Any) -> list[torch.Tensor]:
    return [PIXART.run(model, timestep=step, seed=step) for step in STEPS]


def prepare(order: str, add_cache: Callable[[Any], Any]) -> Any:
    model = make_pixart()
    for action in order.split(", "):
        if action == "patch":
            tomesd.apply_patch(model, **ALL)
        else:
            add_cache(model)
    return model


Rule = Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]


def replay(
    rule: Rule, select: Callable[[Any], list[nn.Module]], **patch: Any
) -> list[torch.Tensor]:
    """What a patched model gives when torch hooks apply `rule(past outputs, output)` themselves."""
    model = make_pixart()
    if patch:
        tomesd.apply_patch(model, **patch)
    for module in select(model):
        past: list[torch.Tensor] = []

        def hook(_: Any, args: tuple, output: torch.Tensor, past: list = past) -> torch.Tensor:
            assert output.shape[1] == 64
            past.append(rule(past, output))
            return past[-1]

        module.register_forward_hook(hook)
    return run_steps(model)


def self_attentions(model: Any) -> list[nn.Module]:
    return [block.attn1 for block in model.transformer_blocks]


def assert_replayed(model: Any, rule: Rule) -> None:
    expected, unmerged = (replay(rule, self_attentions, **patch) for patch in (ALL, {}))
    for actual, output, other in zip(run_steps(model), expected, unmerged, strict=True):
        assert_rounding(actual, output)
        assert_differs(output, other)


def assert_cache_gone(model: Any) -> None:
    model.disable_cache()
    expected = run_steps(tomesd.apply_patch(make_pixart(), **ALL))
    assert all(map(torch.equal, run_steps(model), expected))
    tomesd.remove_patch(model)
    assert all(map(torch.equal, run_steps(model), run_steps(make_pixart())))


@ORDERS_WITH_CACHE
def test_pyramid_attention_broadcast(order: str) -> None:
    """Self-attention is computed at every second step."""
    config = diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: 500,
    )
    model = prepare(order, lambda m: m.enable_cache(config))
    assert_replayed(model, lambda past, new: past[-1] if len(past) % 2 else new)
    assert_cache_gone(model)


@ORDERS_WITH_CACHE
def test_faster_cache(order: str) -> None:
    """From the third step on, every second self-attention is extrapolated from the last two."""
    iteration = itertools.count()
    config = diffusers.FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        tensor_format="BCHW",
        is_guidance_distilled=True,
        attention_weight_callback=lambda _: 0.5,
        current_timestep_callback=lambda: STEPS[next(iteration) // 4],  # model and three layers
    )

    def rule(past: list[torch.Tensor], new: torch.Tensor) -> torch.Tensor:
        skip = len(past) > 2 and len(past) % 2
        return past[-1] + 0.5 * (past[-1] - past[-2]) if skip else new

    model = prepare(order, lambda m: m.enable_cache(config))
    assert_replayed(model, rule)
    assert_cache_gone(model)


@ORDERS_WITH_CACHE
@pytest.mark.parametrize("threshold", [0.0, 1e9], ids=["never", "always"])
def test_first_block_cache(order: str, threshold: float) -> None:
    """After the first step, all blocks but the first are replaced by what they once added."""
    config = diffusers.FirstBlockCacheConfig(threshold)
    model = prepare(order, lambda m: m.enable_cache(config))
    with model.cache_context("cond"):
        actual = run_steps(model)
    reference = tomesd.apply_patch(make_pixart(), **ALL)
    heads: list[torch.Tensor] = []
    added: list[torch.Tensor] = []
    reference.transformer_blocks[0].register_forward_hook(lambda m, a, out: heads.append(out))

    def tail(module: Any, args: tuple, output: torch.Tensor) -> torch.Tensor:
        added.append(output - heads[-1])
        return output if threshold == 0 else heads[-1] + added[0]

    reference.transformer_blocks[2].register_forward_hook(tail)
    for output, expected in zip(actual, run_steps(reference), strict=True):
        assert_rounding(output, expected)
    assert_cache_gone(model)


@ORDERS_WITH_CACHE
def test_layer_skip_finds_blocks_in_the_registry(order: str) -> None:
    config = diffusers.LayerSkipConfig(indices=[1], fqn="transformer_blocks")
    model = prepare(order, lambda m: diffusers.hooks.apply_layer_skip(m, config))
    reference = tomesd.apply_patch(make_pixart(), **ALL)
    expected, complete = run_steps(reference), reference.transformer_blocks[1]
    assert not all(map(torch.equal, run_steps(model), expected))
    del reference.transformer_blocks[1]
    assert all(map(torch.equal, run_steps(model), run_steps(reference)))
    assert complete is not None


@ORDERS_WITH_CACHE
def test_layer_skip_of_attention(order: str) -> None:
    """A skipped attention gives its input back, all tokens of it."""
    config = diffusers.LayerSkipConfig(indices=[1], fqn="transformer_blocks", skip_ff=False)
    model = prepare(order, lambda m: diffusers.hooks.apply_layer_skip(m, config))
    reference = tomesd.apply_patch(make_pixart(), **ALL)
    reference.transformer_blocks[1].attn1.register_forward_hook(lambda m, args, output: args[0])
    assert all(map(torch.equal, run_steps(model), run_steps(reference)))


def test_registries_know_patched_modules() -> None:
    clean, model = make_pixart(), tomesd.apply_patch(make_pixart(), **ALL)
    blocks = diffusers.hooks._helpers.TransformerBlockRegistry
    processors = diffusers.hooks._helpers.AttentionProcessorRegistry
    for one, other in zip(clean.transformer_blocks, model.transformer_blocks, strict=True):
        known, expected = blocks.get(other.__class__), blocks.get(one.__class__)
        assert known.return_hidden_states_index == expected.return_hidden_states_index
        known = processors.get(other.attn1.processor.__class__)
        assert known is processors.get(one.attn1.processor.__class__)
