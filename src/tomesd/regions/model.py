"""The model as a whole, and the stacks of blocks in a UNet: where size, time and grid are read."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import Layout
from ..metric import expect_clean, note_guidance, recall_guidance
from ..planning import load_kernels
from ..policy import decide, decide_layout, explain_nothing, level_of, read_time
from ..state import Call, Decision, Patch, Scope, current_scope, refuse_outside, run_inside
from .coarse import SIDE, Coarse, coarse_unet, halved, unet_obstacle
from .role import Given, Inner, Role


@dataclass(frozen=True)
class _Root(Role):
    names: tuple[str, ...]
    """Parameters of its forward, in order."""
    time: str
    """Name of the parameter that takes the timestep."""

    def start_call(
        self, patch: Patch, given: Given, size: Any, tokens: int, apart: bool, obstacle: str
    ) -> Call:
        """Collects what is known about a call before any block runs.

        Args:
            size: height and width of the latent.
            tokens: image tokens in the call.
            apart: see `Call`.
            obstacle: why the call cannot be made coarse, if it cannot.
        """
        latent, value, timestep = _batch(given[self.names[0]]), given[self.time], None
        if value is not None:
            # As a Python number, it would make torch.compile recompile at each step.
            timestep = value if isinstance(value, Tensor) else torch.tensor([value])
            timestep = patch.timeline.falling(timestep.to(latent.device))
        call = Call(patch, patch.settings, size, timestep, apart=apart)
        if patch.settings.changes and value is not None:
            read_time(call, value, tokens, latent.shape[0], obstacle)
        return call

    def finish_call(self, call: Call) -> None:
        patch = call.patch
        if not torch.compiler.is_compiling():
            patch.decisions, patch.coarse = tuple(call.decisions), call.coarse
        merged = any(decision.remove > 0 for decision in call.decisions)
        if call.settings.active and call.ratio != 0 and not merged and not call.reuses:
            patch.warn_once(explain_nothing(call))


@dataclass(frozen=True)
class UNetRoot(_Root):
    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        scope = current_scope(patch)
        given = Given(self.names, args, kwargs)
        latent = given[self.names[0]]
        if scope is not None:  # already entered, through __call__ or by `describe`
            scope.call.fullness = fullness(latent.shape[0], kwargs)
            return inner(*args, **kwargs)
        (h, w), apart = latent.shape[-2:], torch.is_grad_enabled()
        obstacle = unet_obstacle(module, given) if patch.settings.coarse else ""
        call = self.start_call(patch, given, (h, w), h * w, apart, obstacle)
        call.fullness = fullness(latent.shape[0], kwargs)
        recall_guidance(call, latent)
        if call.coarse:
            output = self._run_coarse(call, given, inner)
        else:
            output = _run_model(Scope(call), inner, *args, **kwargs)
        note_guidance(call, output)
        self.finish_call(call)
        return output

    def _run_coarse(self, call: Call, given: Given, inner: Inner) -> Any:
        """Calls the model on a coarser latent, on which nothing merges or is reused."""
        call.size = (call.size[0] // SIDE, call.size[1] // SIDE)
        run = functools.partial(_run_model, Scope(call), inner)
        return coarse_unet(given, call.patch.timeline, self.time, run)


@dataclass(frozen=True)
class TransformerRoot(_Root):
    read: Callable[[Any, Given], Layout]
    """Reads the layout from the model's arguments."""
    between: tuple[str, ...]
    """Arguments that add something to all tokens between blocks, or that skip blocks."""
    lists: tuple[str, ...]
    """Attributes with the lists of blocks."""
    merging: int
    """Number of blocks that merge."""
    coarse: Coarse | None = None
    """How its arguments are made coarse; None if they cannot be."""

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        scope = current_scope(patch)
        if scope is not None and scope.decided is not None:  # already entered, through __call__
            return inner(*args, **kwargs)
        _refuse_split_sequences(module)
        given = Given(self.names, args, kwargs)
        layout = self.read(module, given)
        obstacle = self._coarse_obstacle(module, patch, given, layout)
        apart = self._needs_all_tokens(module, given)
        if scope is not None:  # `describe` has started the call
            call = scope.call
            call.coarse = call.coarse and not obstacle
            if apart:
                call.apart, call.moment = True, None
        else:
            if patch.settings.reuse is not None:  # a cache counts the steps that run a layer
                apart = apart or self._caches_attention(module)
            tokens = math.prod(layout.grid)
            call = self.start_call(patch, given, layout.size, tokens, apart, obstacle)
        if call.coarse:
            return self._run_coarse(call, given, layout, inner)
        return self._run_merged(call, module, given, layout, inner)

    def _run_merged(
        self, call: Call, module: nn.Module, given: Given, layout: Layout, inner: Inner
    ) -> Any:
        """Calls the model, whose blocks merge as is decided here."""
        latent = _batch(given[self.names[0]])
        call.fullness = fullness(latent.shape[0], given.kwargs)
        decision = decide_layout(call, layout, self.merging, latent)
        if decision.merges:
            expect_clean(call, layout.tokens_of(given[self.names[0]]))
        if decision.merges and call.settings.whole_blocks and self._caches_attention(module):
            decision.left_alone = "attention is cached"
        output = _run_model(Scope(call, decision), inner, *given.args, **given.kwargs)
        self.finish_call(call)
        return output

    def _coarse_obstacle(self, module: Any, patch: Patch, given: Given, layout: Layout) -> str:
        """Why a call cannot be made coarse; empty if it can, or if nobody asked for it."""
        if not patch.settings.coarse or self.coarse is None:
            return ""
        if self._caches_attention(module) or self._may_skip_blocks(module):
            return "a cache uses outputs that blocks had at other steps"
        return self.coarse.obstacle(module, given, layout, self.time)

    def _run_coarse(self, call: Call, given: Given, layout: Layout, inner: Inner) -> Any:
        """Calls the model on a coarser latent, on which nothing merges or is reused."""
        assert self.coarse is not None
        if call.settings.active:  # a later step may match on the image that two latents lead to
            expect_clean(call, layout.tokens_of(given[self.names[0]]))
        frames, h, w = layout.grid
        grid = (frames, halved(h), halved(w))
        level = level_of(layout.size, layout.grid[1:])
        decision = Decision(grid, 0, math.prod(grid), level=level)
        call.decisions.append(decision)
        run = functools.partial(_run_model, Scope(call, decision), inner)
        output = self.coarse.run(given, layout, call.patch.timeline, self.time, run)
        self.finish_call(call)
        return output

    def _blocks(self, module: nn.Module) -> list[nn.Module]:
        return [block for name in self.lists for block in getattr(module, name)]

    def _may_skip_blocks(self, module: nn.Module) -> bool:
        """Whether a cache may replace a block by the block's earlier output."""
        return any(not _PLAIN_HOOKS.issuperset(_hooks(block)) for block in self._blocks(module))

    def _needs_all_tokens(self, module: nn.Module, given: Given) -> bool:
        """Whether something needs the full token sequence after each block."""
        # With gradients, checkpointing may run a block again on its own, so it must not depend on
        # what another block has kept.
        if torch.is_grad_enabled() or any(given[name] is not None for name in self.between):
            return True
        return self._may_skip_blocks(module)

    def _caches_attention(self, module: nn.Module) -> bool:
        """Whether a cache may use a layer's output at another step."""
        # There are hundreds of layers: `children()`, or a function call for each, would be slow.
        layers = [layer for block in self._blocks(module) for layer in block._modules.values()]
        hooked = [x for x in layers if x is not None and "_diffusers_hook" in x.__dict__]
        return any(not _ATTENTION_CACHES.isdisjoint(_hooks(layer)) for layer in hooked)


def _run_model(scope: Scope, inner: Inner, *args: Any, **kwargs: Any) -> Any:
    try:
        return run_inside(scope, inner, *args, **kwargs)
    except BaseException:
        scope.patch.steps.restart()  # not all of its regions have kept what they gave
        raise


def fullness(batch: int, kwargs: dict) -> float:
    """How many times larger the batch would be with both halves of guidance in it.

    ComfyUI tells which halves a call has. Elsewhere, an even batch is taken to have both, as it has
    in most pipelines.
    """
    halves = (kwargs.get("transformer_options") or {}).get("cond_or_uncond")
    if halves:
        return 2 / len(halves)
    return 2 * ((batch + 1) // 2) / batch


def _refuse_split_sequences(module: nn.Module) -> None:
    config = getattr(module, "_parallel_config", None)
    if getattr(config, "context_parallel_config", None) is not None:
        raise RuntimeError(
            f"tomesd cannot merge the tokens of a {type(module).__name__} with context "
            "parallelism, under which each device has a part of them: disable it, or remove_patch()"
        )


# Hooks of diffusers that run a block unchanged, and those that keep outputs of attention.
_PLAIN_HOOKS = {"group_offloading", "layerwise_casting", "lazy_prefetch_group_offloading"}
_ATTENTION_CACHES = {"taylorseer_cache", "pyramid_attention_broadcast", "faster_cache_block"}


def _hooks(module: nn.Module) -> list[str]:
    """Names of the diffusers hooks on a module."""
    registry = module.__dict__.get("_diffusers_hook")
    return [] if registry is None else list(registry.hooks)


def _batch(latents: Any) -> Tensor:
    """The model's input, `[B, ...]`. Of a list of items, only the shape and the dtype are right."""
    if isinstance(latents, Tensor):
        return latents
    item = latents[0]
    while not isinstance(item, Tensor):
        item = item[0]
    return item.expand(len(latents), *item.shape)


@dataclass(frozen=True)
class Stack(Role):
    """A stack of blocks in a UNet."""

    input: str
    """The parameter that takes the feature map."""
    patch_size: int = 1
    """Side of the square of feature-map pixels in one token."""
    channels: int = 0
    """Channels of its tokens."""
    attention: str = ""
    """Attribute with the self-attention of its blocks."""
    unfused: tuple[str, ...] = ()
    """Class names of attention processors, or of attention, that write the scores to memory."""

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        features = args[0] if args else kwargs[self.input]
        h, w = (side // self.patch_size for side in features.shape[-2:])
        scope = current_scope(patch)
        if scope is None:
            refuse_outside(patch, module)
            scope = Scope(Call(patch, patch.settings, (h, w), apart=torch.is_grad_enabled()))
        blocks: Any = module.transformer_blocks
        heads = score_heads(blocks[0], self.attention, self.unfused)
        decision = decide(scope.call, (1, h, w), len(blocks), features, heads)
        if decision.left_alone == "pays in CUDA graphs only":
            channels = self.channels or features.shape[1]
            load_kernels(Scope(scope.call, decision), features, channels)
        return run_inside(Scope(scope.call, decision), inner, *args, **kwargs)


def score_heads(block: nn.Module, attention: str, unfused: tuple[str, ...]) -> int:
    """Heads of a block's self-attention if it writes scores to memory; 0 if fused or unknown."""
    layer = getattr(block, attention, None)
    worker = getattr(layer, "processor", layer)
    return getattr(layer, "heads", 0) if type(worker).__name__ in unfused else 0
