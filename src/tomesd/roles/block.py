"""A transformer block: makes the plan from its input, and may run on merged tokens."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..planning import note_output
from ..policy import Call, Frame, Run, Visit, current_frame
from ..shared import Patch
from .role import Inner, Role, refuse_outside, run_inside

__all__ = ["Block"]


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
            refuse_outside(patch, module)
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
