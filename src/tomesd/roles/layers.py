"""What is inside a block: the layers, which merge and put back, and what helps them."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..plan import MergePlan
from ..policy import Frame, current_frame
from ..proportional import Part, proportion_of
from ..shared import Patch
from .role import Inner, Role, run_inside

__all__ = ["Layer", "Norm", "Projection"]


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
        unmerge = plan.unmerge
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
