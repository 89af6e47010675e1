"""Transformer blocks: alone or in a run on merged tokens, or making the plans of their layers."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..planning import find_plan, note_output
from ..policy import Work, decide
from ..state import (
    Call,
    Decision,
    OpenRegion,
    Patch,
    Scope,
    current_scope,
    refuse_outside,
    run_inside,
)
from .role import Inner, Role
from .tokens import Tokens

__all__ = ["Block", "Member"]


@dataclass(frozen=True)
class _AnyBlock(Role):
    tokens: Tokens

    def scope_at(self, module: nn.Module, patch: Patch, x: Tensor) -> Scope:
        """Where the block is."""
        scope = current_scope(patch)
        if scope is None or scope.decision is None:
            refuse_outside(patch, module)
            scope = _square_scope(patch, x)
        return scope

    def reason_to_skip(self, scope: Scope, x: Tensor, refused: str | None) -> str | None:
        """Why a block that could merge must not."""
        assert scope.decision is not None
        tokens, (frames, h, w) = scope.decision.tokens, scope.grid
        got = x.shape[1]
        if got < tokens or (got > tokens and not self.tokens.joint):
            size = f"{h}x{w}" if frames == 1 else f"{frames}x{h}x{w}"
            return f"it got {got} tokens, not the {size} of its map"
        if scope.settings.whole_blocks and refused is not None:
            return f"{refused} is given, and is laid out for unmerged tokens"
        return None


@dataclass(frozen=True)
class Block(_AnyBlock):
    """A block whose layers merge each by itself."""

    norm: str = ""
    """Where it keeps the norm that gives self-attention its input."""
    attention: str = ""
    """Where it keeps self-attention."""
    code: str = ""
    """The module with the code that hands what the norm gives to self-attention alone."""

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        x = self.tokens.take(args, kwargs)
        scope = self.scope_at(module, patch, x)
        assert scope.decision is not None
        if not scope.decision.merges:
            return inner(*args, **kwargs)
        reason = self.reason_to_skip(scope, x, None)
        if reason:
            patch.warn_once(f"tomesd left a {type(module).__name__} alone: {reason}")
            return inner(*args, **kwargs)
        decision = scope.decision
        scope = Scope(scope.call, decision, place=scope.next_place())
        for kinds, segments in decision.segments.items():
            # No name for the plan: it has to be gone when its layers have taken it.
            scope.plans.update(dict.fromkeys(kinds, find_plan(scope, module, x, segments)))
        scope.early = self._can_merge_early(scope, module, inner, args, kwargs)
        output = run_inside(scope, inner, *args, **kwargs)
        note_output(scope.call, scope.place, output)
        return output

    def _can_merge_early(
        self, scope: Scope, module: nn.Module, inner: Inner, args: tuple, kwargs: dict
    ) -> bool:
        """Whether nothing but self-attention will see what its norm gives."""
        if torch.compiler.is_compiling():  # it frees what is not used any more by itself
            return False
        return (
            bool(self.code)
            and inner.__module__ == self.code
            and scope.settings.target == "attn"
            and "attn" in scope.plans
            and self.tokens.given_refused(args, kwargs) is None
            and not _is_hooked(getattr(module, self.norm))
            and not _is_hooked(getattr(module, self.attention))
        )


def _is_hooked(module: nn.Module) -> bool:
    """Whether somebody else looks at, or changes, what goes in or out."""
    hooks = bool(module._forward_pre_hooks) or bool(module._forward_hooks)
    return hooks or "forward" in module.__dict__


@dataclass(frozen=True)
class Member(_AnyBlock):
    """A block in a run of blocks that all work on the same merged tokens."""

    first: bool = True
    last: bool = True

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        x = self.tokens.take(args, kwargs)
        scope = self.scope_at(module, patch, x)
        region = scope.region
        if region is not None:
            output = self.tokens.call(inner, region.along, args, kwargs)
            if not self.last:
                return output
            scope.region = None
            return self._close(scope, region, output)
        assert scope.decision is not None
        if not scope.decision.merges:
            return inner(*args, **kwargs)
        reason = self.reason_to_skip(scope, x, self.tokens.given_refused(args, kwargs))
        if reason:
            patch.warn_once(f"tomesd left a {type(module).__name__} alone: {reason}")
            return inner(*args, **kwargs)
        region = self._open(scope, module, args, kwargs)
        merged = region.merged.clone() if self.tokens.in_place else region.merged
        args, kwargs = self.tokens.replaced({self.tokens.input: merged}, args, kwargs)
        output = self.tokens.call(inner, region.along, args, kwargs)
        if self.first and not self.last and not scope.call.apart:
            scope.region = region
            return output
        return self._close(scope, region, output)

    def _open(self, scope: Scope, module: nn.Module, args: tuple, kwargs: dict) -> OpenRegion:
        assert scope.decision is not None
        decision, x = scope.decision, self.tokens.take(args, kwargs)
        place = scope.next_place()
        inside = Scope(scope.call, decision, place=place)
        (segments,) = decision.segments.values()
        if not self.tokens.joint:
            plan = find_plan(inside, module, x, segments)
            along = self.tokens.cut_along(plan, decision, args, kwargs)
            return OpenRegion(plan, x, plan.merge(x), along, place)
        start = self.tokens.start(x.shape[1], decision)
        plan = find_plan(inside, module, _part(x, start, decision.tokens), segments)
        along = self.tokens.cut_along(plan, decision, args, kwargs)
        plan = plan.placed(start, x.shape[1])
        return OpenRegion(plan, x, plan.merge(x), along, place)

    def _close(self, scope: Scope, region: OpenRegion, output: Any) -> Any:
        """Gives each token what its slot gained."""
        y = self.tokens.result(output)
        restored = region.plan.restore(region.x, y, region.merged)
        note_output(scope.call, region.place, restored)
        return self.tokens.with_result(restored, output)


def _part(x: Tensor, start: int | Tensor, length: int) -> Tensor:
    """`length` tokens of a sequence `[B, S, C]`, from a place that may differ between items."""
    if not isinstance(start, Tensor):
        return x[:, start : start + length]
    places = start[:, None] + torch.arange(length, device=x.device)
    return x.take_along_dim(places[..., None], dim=1)


def _square_scope(patch: Patch, x: Tensor) -> Scope:
    """The scope of a block patched on its own, with nothing around it that knows the grid."""
    side = math.isqrt(x.shape[1])
    call = Call(patch, patch.settings, (side, side))
    work = Work(x.device, x.element_size(), x.shape[0], x.shape[2], 1, patch.blocks)
    if side * side == x.shape[1]:
        return Scope(call, decide(call, (1, side, side), work))
    patch.warn_once(
        f"tomesd merged nothing: {x.shape[1]} tokens are not a square, and a block patched "
        "on its own cannot know their grid; patch the model around it"
    )
    return Scope(call, Decision((1, side, side), 1, side * side))
