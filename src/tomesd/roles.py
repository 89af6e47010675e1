"""The parts that patched modules play. A role runs around the module's own forward.

    Root    the model: notes image size and timestep
      Stack   a stack of blocks: notes the grid
        Block   a transformer block: makes the plan from its input, and may run on merged tokens
          Norm    before self-attention: may merge what it gives, so that all of it is gone sooner
          Layer   attention or feed-forward: unmerge(layer(merge(x)))
            Projection   of attention: gets channels more for proportional attention

Roles are values: what they know of a module is the names and numbers in a host's table. They are
part of the generated class, so they can be pickled, and equal ones share a class.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .cost import find_launcher
from .plan import MergePlan
from .planning import note_guidance, note_output, recall_guidance
from .policy import Call, Frame, Run, Visit, current_frame, enter_frame
from .proportional import Part, proportion_of
from .settings import Settings
from .shared import Patch

__all__ = ["Block", "Layer", "Norm", "Projection", "Role", "Root", "Stack", "run_inside"]

Inner = Callable[..., Any]


@dataclass(frozen=True)
class Role(ABC):
    """Base of the roles. `first` names the first parameter of the module's forward."""

    first: str

    def input(self, args: tuple, kwargs: dict) -> Tensor:
        return args[0] if args else kwargs[self.first]

    def with_input(self, x: Tensor, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with another input."""
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, self.first: x})

    @abstractmethod
    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        """Calls `inner`, the module's own method, with what it was given or something merged."""


def run_inside(frame: Frame | None, function: Inner, *args: Any, **kwargs: Any) -> Any:
    """Calls `function` with `frame` as the current one, whichever thread this is."""
    before = enter_frame(frame)
    try:
        return function(*args, **kwargs)
    finally:
        enter_frame(before)


@dataclass(frozen=True)
class Root(Role):
    timestep: str
    position: int
    """Place of the timestep among the positional arguments."""

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        if current_frame(patch) is not None:  # entered through __call__ already
            return inner(*args, **kwargs)
        latent = self.input(args, kwargs)
        value = args[self.position] if len(args) > self.position else kwargs.get(self.timestep)
        call = Call((latent.shape[-2], latent.shape[-1]), _on_device(value, latent.device))
        if patch.settings.changes and value is not None:
            call.ratio = patch.ratio_at(value)
        recall_guidance(patch, call, latent)
        kind = _kind_of(call, latent)
        idle = patch.known_idle(kind) if kind is not None else None
        frame = Frame.of_idle(patch, call, idle) if idle else Frame(patch, call, patch.settings)
        output = run_inside(frame, inner, *args, **kwargs)
        note_guidance(patch, call, output)
        if idle is None and not call.merged:
            if kind is not None and (noted := call.as_idle()) is not None:
                patch.idle[kind] = noted
            if patch.settings.active and call.ratio != 0:
                patch.warn_once(_nothing_merged(patch.settings, call))
        return output


def _kind_of(call: Call, latent: Tensor) -> Any:
    """Equal for calls that go the same way, as far as the model as a whole can tell."""
    if torch.compiler.is_compiling():
        return None
    launcher = find_launcher(latent.device)
    gradients = torch.is_grad_enabled()
    return (latent.shape, latent.dtype, latent.device, launcher, call.ratio, gradients)


def _on_device(timestep: Any, device: torch.device) -> Tensor | None:
    if timestep is None:
        return None
    # As a number, it would make torch.compile start anew at each step.
    return (timestep if isinstance(timestep, Tensor) else torch.tensor([timestep])).to(device)


def _nothing_merged(settings: Settings, call: Call) -> str:
    if any(visit.too_small for visit in call.visits):
        return (
            "tomesd merged nothing: at this image and batch size, finding out what to merge takes "
            'longer than merging saves; when="always" merges all the same'
        )
    if torch.compiler.is_compiling():  # numbers may be symbols there, and cannot be told
        return "tomesd merged nothing: the settings leave nothing to merge at this image size"
    where = f"at latent size {call.size[0]}x{call.size[1]}"
    if call.visits:
        h, w = call.visits[0].grid
        where += f", where the finest attention has {h}x{w} tokens"
    ratio = settings.ratio if call.ratio is None else call.ratio
    return (
        f"tomesd merged nothing {where}: max_downsample={settings.max_downsample}, "
        f"ratio={ratio:g} and {settings.sx}x{settings.sy} cells leave nothing to merge"
    )


@dataclass(frozen=True)
class Stack(Role):
    patch_size: int = 1
    """Side of the square of latent pixels that becomes one token."""

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        features = self.input(args, kwargs)
        grid = (features.shape[-2] // self.patch_size, features.shape[-1] // self.patch_size)
        frame = current_frame(patch)
        if frame is None:
            _refuse_outside(patch, module)
            frame = Frame(patch, Call(grid), patch.settings)
        if frame.idle and grid in frame.idle:  # never when compiling, where a grid may be symbols
            return inner(*args, **kwargs)
        blocks = len(module.transformer_blocks)  # type: ignore[arg-type]
        return run_inside(frame.at_grid(grid, blocks), inner, *args, **kwargs)


@dataclass(frozen=True)
class Block(Role):
    opens: bool = True
    """Whether the block before it, if any, hands its tokens to something else first."""
    closes: bool = True
    """Whether it hands its own to something else than the next block."""
    aligned: tuple[str, ...] = ()
    """Arguments that line up with the tokens: where one is given, nothing can be merged."""
    names: tuple[str, ...] = ()
    """Its parameters, in order."""
    attention: str = ""
    """Where it keeps its self-attention."""
    unfused: tuple[str, ...] = ()
    """Processors of self-attention, or classes of it, that write its scores to memory."""
    norm: str = ""
    """Where it keeps the norm that gives self-attention its input."""
    code: str = ""
    """The module with the code that hands what the norm gives to self-attention alone."""

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        frame = current_frame(patch)
        x = self.input(args, kwargs)
        if frame is None or frame.grid is None:
            _refuse_outside(patch, module)
            frame = _square_frame(patch, x)
        if frame.visit is not None and frame.visit.run is not None:
            return self._go_on(frame.visit.run, frame.visit, inner, args, kwargs)
        if not frame.merges(x, partial(self._score_heads, module)):
            return inner(*args, **kwargs)
        aligned = self._given_aligned(args, kwargs)
        reason = self._reason_to_skip(frame, x, aligned)
        if reason:
            patch.warn_once(f"tomesd left a {type(module).__name__} alone: {reason}")
            return inner(*args, **kwargs)
        frame = frame.in_block(module, x)
        if frame.settings.whole_blocks:
            return self._run_merged(frame, inner, x, args, kwargs)
        frame.early = aligned is None and self._can_merge_early(frame, module, inner)
        output = run_inside(frame, inner, *args, **kwargs)
        note_output(frame, output)
        return output

    def _score_heads(self, module: nn.Module) -> int:
        """Heads of its self-attention, 0 if that is fused or unknown."""
        attention = getattr(module, self.attention, None)
        worker = getattr(attention, "processor", attention)
        return getattr(attention, "heads", 0) if type(worker).__name__ in self.unfused else 0

    def _given_aligned(self, args: tuple, kwargs: dict) -> str | None:
        """The first argument given that lines up with the tokens."""
        known = min(len(self.names), len(args))  # PyTorch 2.8 compiles no zip of unequal lengths
        given = {**dict(zip(self.names[:known], args[:known], strict=True)), **kwargs}
        given.update(given.get("cross_attention_kwargs") or {})
        for name in self.aligned:
            if given.get(name) is not None:
                return name
        return None

    def _reason_to_skip(self, frame: Frame, x: Tensor, aligned: str | None) -> str | None:
        assert frame.grid is not None
        if x.shape[1] != frame.grid[0] * frame.grid[1]:
            return f"it got {x.shape[1]} tokens, not the {frame.grid[0]}x{frame.grid[1]} of its map"
        if frame.settings.whole_blocks and aligned is not None:
            return f"{aligned} is given, and is laid out for unmerged tokens"
        return None

    def _can_merge_early(self, frame: Frame, module: nn.Module, inner: Inner) -> bool:
        """Whether nothing but self-attention will see what its norm gives."""
        if torch.compiler.is_compiling():  # it frees what is not used any more by itself
            return False
        return (
            bool(self.code)
            and inner.__module__ == self.code
            and frame.settings.target == "attn"
            and "attn" in frame.plans
            and not _is_hooked(getattr(module, self.norm))
            and not _is_hooked(getattr(module, self.attention))
        )

    def _run_merged(
        self, frame: Frame, inner: Inner, x: Tensor, args: tuple, kwargs: dict
    ) -> Tensor:
        """Runs the block on merged tokens, alone or as the first of several."""
        assert frame.visit is not None
        plan = frame.plans["attn"]
        run = Run(frame, plan, x, plan.merge(x))
        args, kwargs = self.with_input(run.merged, args, kwargs)
        output: Tensor = run_inside(frame, inner, *args, **kwargs)
        if frame.visit.together and self.opens and not self.closes:
            frame.visit.run = run
            return output
        return _restore(run, output)

    def _go_on(self, run: Run, visit: Visit, inner: Inner, args: tuple, kwargs: dict) -> Tensor:
        """Runs a block whose input is merged already."""
        output: Tensor = inner(*args, **kwargs)
        if not self.closes:
            return output
        visit.run = None
        return _restore(run, output)


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody else looks at, or changes, what goes in or out."""
    hooks = bool(module._forward_pre_hooks) or bool(module._forward_hooks)
    return hooks or "forward" in module.__dict__


def _restore(run: Run, output: Tensor) -> Tensor:
    """Gives each token what its group changed by: `[B, M, C]` to `[B, N, C]`."""
    restored: Tensor = run.plan.restore(run.x, output, run.merged)
    note_output(run.frame, restored)
    return restored


def _square_frame(patch: Patch, x: Tensor) -> Frame:
    """The frame of a block patched on its own, with nothing around it that knows the grid."""
    side = math.isqrt(x.shape[1])
    frame = Frame(patch, Call((side, side)), patch.settings)
    if side * side == x.shape[1]:
        return frame.at_grid((side, side), blocks=1)
    patch.warn_once(
        f"tomesd merged nothing: {x.shape[1]} tokens are not a square, and a block patched "
        "on its own cannot know their grid; patch the model around it"
    )
    return frame


@dataclass(frozen=True)
class Norm(Role):
    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        frame = current_frame(patch)
        output = inner(*args, **kwargs)
        return frame.plans["attn"].merge(output) if frame is not None and frame.early else output


@dataclass(frozen=True)
class Layer(Role):
    kind: str
    """"attn", "crossattn" or "mlp"."""
    aligned: tuple[str, ...] = ()
    """Arguments that line up with the tokens: where one is given, nothing can be merged."""

    context: str = ""
    """Of attention: the second parameter, what it attends to; nothing is itself."""

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        frame = current_frame(patch)
        # It is needed once, and the layers that follow may need the memory.
        plan = frame.plans.pop(self.kind, None) if frame is not None else None
        if frame is None or plan is None:
            return inner(*args, **kwargs)
        x = self.input(args, kwargs)
        keys_only = self.kind == "attn" and frame.settings.target == "kv"
        fits = plan.fits(x)
        # A norm that took the place of the patched one has merged nothing.
        is_merged = self.kind == "attn" and frame.early and not fits
        reason = self._reason_to_skip(fits or is_merged, kwargs)
        other_keys = self._other_keys(args, kwargs)
        if keys_only and not reason:
            reason = other_keys or _reason_for_full_keys(module)
        if reason:
            patch.warn_once(f"tomesd left {self.kind} layers alone: {reason}")
            return inner(*args, **kwargs)
        if frame.settings.proportional and self.kind == "attn" and not other_keys:
            frame = _with_proportion(frame, module, plan)
        merged = x if is_merged else plan.merge(x)
        if keys_only:
            args = (args[0], merged, *args[2:]) if len(args) > 1 else args
            kwargs = kwargs if len(args) > 1 else {**kwargs, self.context: merged}
            return run_inside(frame, inner, *args, **kwargs)
        args, kwargs = self.with_input(merged, args, kwargs)
        unmerge = plan.way_back
        del plan  # the layer may need the memory
        return unmerge(run_inside(frame, inner, *args, **kwargs))

    def _reason_to_skip(self, fits: bool, kwargs: dict) -> str | None:
        if not fits:
            return "they run on a part of the tokens at a time (chunked)"
        for name in self.aligned:
            if kwargs.get(name) is not None:
                return f"{name} is given, and is laid out for unmerged tokens"
        return None

    def _other_keys(self, args: tuple, kwargs: dict) -> str | None:
        """What attention attends to, if that is not its input alone."""
        context = args[1] if len(args) > 1 else kwargs.get(self.context)
        if context is not None:
            return "they attend to something else than the image"
        if kwargs.get("additional_tokens") is not None:  # of sgm
            return "they attend to additional tokens"
        return None


def _reason_for_full_keys(module: nn.Module) -> str | None:
    if getattr(module, "fused_projections", False):
        return 'their projections are fused, and target="kv" needs them apart'
    return None


def _with_proportion(frame: Frame, module: nn.Module, plan: MergePlan) -> Frame:
    """The frame inside an attention layer, where a merged token counts for all that are in it."""
    proportion = proportion_of(module, plan.size)
    if isinstance(proportion, str):
        frame.patch.warn_once(f"tomesd: attention is not proportional in a layer: {proportion}")
        return frame
    return frame.in_attention(proportion)


@dataclass(frozen=True)
class Projection(Role):
    part: Part

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        frame = current_frame(patch)
        if frame is None or frame.proportion is None:
            return inner(*args, **kwargs)
        return frame.proportion.project(self.part, inner, *args, **kwargs)


def _refuse_outside(patch: Patch, module: nn.Module) -> None:
    if patch.rooted:
        raise RuntimeError(
            f"a {type(module).__name__} patched by tomesd ran outside its model's forward, where "
            "image size and timestep are unknown; call the model, or remove_patch() first"
        )
