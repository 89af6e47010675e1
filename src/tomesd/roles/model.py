"""The model and its stacks of blocks: they note image size, timestep and grid."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..cost import find_launcher
from ..planning import note_guidance, recall_guidance
from ..policy import Call, Frame, current_frame
from ..settings import Settings
from ..shared import Patch
from .role import Inner, Role, refuse_outside, run_inside

__all__ = ["Root", "Stack"]


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
    reasons = [visit.left_alone for visit in call.visits]
    if "pays in CUDA graphs only" in reasons:
        return (
            "tomesd merged nothing: at this image and batch size, the host, which launches every "
            "kernel, is expected to take longer than merging saves; where CUDA graphs are "
            'replayed, as with torch.compile(mode="reduce-overhead"), merging pays. when="always" '
            "merges all the same"
        )
    if "not faster" in reasons:
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
            refuse_outside(patch, module)
            frame = Frame(patch, Call(grid), patch.settings)
        if frame.idle and grid in frame.idle:  # never when compiling, where a grid may be symbols
            return inner(*args, **kwargs)
        blocks = len(module.transformer_blocks)  # type: ignore[arg-type]
        return run_inside(frame.at_grid(grid, blocks), inner, *args, **kwargs)
