"""The parts that patched modules play. A role runs around the module's own forward.

    Root    the model: notes image size and timestep
      Stack   a stack of blocks: notes the grid
        Block   a transformer block: makes the plan from its input
          Layer   attention or feed-forward: unmerge(layer(merge(x)))

Roles are values: what they know of a module is the names and numbers in a host's table. They are
part of the generated class, so they can be pickled, and equal ones share a class.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .policy import Call, Frame, Patch, current_frame, enter_frame
from .settings import Settings

__all__ = ["Block", "Layer", "Role", "Root", "Stack", "run_inside"]

Inner = Callable[..., Any]


@dataclass(frozen=True)
class Role(ABC):
    """Base of the roles. `first` names the first parameter of the module's forward."""

    first: str

    def input(self, args: tuple, kwargs: dict) -> Tensor:
        return args[0] if args else kwargs[self.first]

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
        timestep = self._timestep(args, kwargs, latent.device)
        call = Call((latent.shape[-2], latent.shape[-1]), timestep)
        output = run_inside(Frame(patch, call, patch.settings), inner, *args, **kwargs)
        if patch.settings.active and not call.merged:
            patch.warn_once(_nothing_merged(patch.settings, call))
        return output

    def _timestep(self, args: tuple, kwargs: dict, device: torch.device) -> Tensor | None:
        value = args[self.position] if len(args) > self.position else kwargs.get(self.timestep)
        if value is None:
            return None
        # As a number, it would make torch.compile start anew at each step.
        return value.to(device) if isinstance(value, Tensor) else torch.tensor([value]).to(device)


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
    return (
        f"tomesd merged nothing {where}: max_downsample={settings.max_downsample}, "
        f"ratio={settings.ratio:g} and {settings.sx}x{settings.sy} cells leave nothing to merge"
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
        blocks = len(module.transformer_blocks)  # type: ignore[arg-type]
        return run_inside(frame.at_grid(grid, blocks), inner, *args, **kwargs)


@dataclass(frozen=True)
class Block(Role):
    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        frame = current_frame(patch)
        if frame is not None and frame.grid is not None and frame.remove == 0:
            return inner(*args, **kwargs)
        x = self.input(args, kwargs)
        if frame is None or frame.grid is None:
            _refuse_outside(patch, module)
            frame = _square_frame(patch, x)
        if not frame.merges(x):
            return inner(*args, **kwargs)
        if x.shape[1] != frame.grid[0] * frame.grid[1]:  # type: ignore[index]
            patch.warn_once(
                f"tomesd left a {type(module).__name__} alone: it got {x.shape[1]} tokens, "
                f"not the {frame.grid[0]}x{frame.grid[1]} of its feature map"  # type: ignore[index]
            )
            return inner(*args, **kwargs)
        return run_inside(frame.with_plan(x), inner, *args, **kwargs)


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
class Layer(Role):
    kind: str
    """"attn", "crossattn" or "mlp"."""
    aligned: tuple[str, ...] = ()
    """Arguments that line up with the tokens: where one is given, nothing can be merged."""

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        frame = current_frame(patch)
        if frame is None or frame.plan is None or not frame.settings.merges[self.kind]:
            return inner(*args, **kwargs)
        plan = frame.plan
        x = self.input(args, kwargs)
        reason = self._reason_to_skip(plan.fits(x), kwargs)
        if reason:
            patch.warn_once(f"tomesd left {self.kind} layers alone: {reason}")
            return inner(*args, **kwargs)
        merged = plan.merge(x)
        if args:
            args = (merged, *args[1:])
        else:
            kwargs = {**kwargs, self.first: merged}
        return plan.unmerge(inner(*args, **kwargs))

    def _reason_to_skip(self, fits: bool, kwargs: dict) -> str | None:
        if not fits:
            return "they run on a part of the tokens at a time (chunked)"
        for name in self.aligned:
            if kwargs.get(name) is not None:
                return f"{name} is given, and is laid out for unmerged tokens"
        return None


def _refuse_outside(patch: Patch, module: nn.Module) -> None:
    if patch.rooted:
        raise RuntimeError(
            f"a {type(module).__name__} patched by tomesd ran outside its model's forward, where "
            "image size and timestep are unknown; call the model, or remove_patch() first"
        )
