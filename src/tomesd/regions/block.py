"""Transformer blocks: as members of a run on merged tokens, or making plans for their layers."""

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..compiler import around_graphs, outside_graphs
from ..metric import note_output
from ..plan import MergePlan
from ..planning import find_plan
from ..policy import decide
from ..reuse import use_or_keep
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
from .item_rows import ItemRows
from .role import Inner, Role
from .tokens import Tokens


@dataclass(frozen=True)
class _AnyBlock(Role):
    tokens: Tokens

    def scope_at(self, module: nn.Module, patch: Patch, x: Tensor) -> Scope:
        """The scope that the block runs in."""
        scope = current_scope(patch)
        if scope is None or scope.decided is None:
            refuse_outside(patch, module)
            scope = _square_scope(patch, x)
        return scope

    def can_merge(
        self, scope: Scope, module: nn.Module, x: Tensor, refused: str | None = None
    ) -> bool:
        """Whether a block that should merge can. If not, a warning says why.

        Args:
            refused: name of an argument that was passed and cannot be cut.
        """
        tokens, (frames, h, w), got = scope.decision.tokens, scope.grid, x.shape[1]
        if got < tokens or (got > tokens and not self.tokens.joint):
            size = f"{h}x{w}" if frames == 1 else f"{frames}x{h}x{w}"
            reason = f"it got {got} tokens, not {size}, the size of its feature map"
        elif refused is not None:
            reason = f"{refused} is given, and has one row per unmerged token"
        else:
            return True
        scope.patch.warn_once(f"tomesd left a {type(module).__name__} alone: {reason}")
        return False


@dataclass(frozen=True)
class Block(_AnyBlock):
    """A block whose layers merge separately."""

    norm: str = ""
    """Attribute with the norm before self-attention."""
    attention: str = ""
    """Attribute with self-attention."""
    code: str = ""
    """Python module of a forward known to pass the norm's output to self-attention only; empty if
    there is none."""

    @around_graphs
    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        scope = self._enter(module, patch, inner, args, kwargs)
        if scope is None:
            return inner(*args, **kwargs)
        output = run_inside(scope, inner, *args, **kwargs)
        note_output(scope.call, scope.place, output)
        return output

    @outside_graphs
    def _enter(
        self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict
    ) -> Scope | None:
        """The scope that its layers run in, with their plans; None if nothing merges."""
        x = self.tokens.take(args, kwargs)
        scope = self.scope_at(module, patch, x)
        if not scope.decision.merges or not self.can_merge(scope, module, x):
            return None
        decision = scope.decision
        scope = Scope(scope.call, decision, place=scope.next_place())
        for kinds, segments in decision.segments.items():
            # The plan gets no local name, so that it is freed once its layers have popped it.
            scope.plans.update(dict.fromkeys(kinds, find_plan(scope, module, x, segments)))
        scope.early = self._can_merge_early(scope, module, inner, args, kwargs)
        return scope

    def _can_merge_early(
        self, scope: Scope, module: nn.Module, inner: Inner, args: tuple, kwargs: dict
    ) -> bool:
        """Whether self-attention is the only consumer of the norm's output."""
        if torch.compiler.is_compiling():  # the compiler frees unused tensors itself
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
    """Whether a hook may read or change the module's input or output."""
    hooks = bool(module._forward_pre_hooks) or bool(module._forward_hooks)
    return hooks or "forward" in module.__dict__


@dataclass(frozen=True)
class Member(_AnyBlock):
    """A block in a run of blocks that all work on the same merged tokens.

    The run is a region: its first block opens it, its last one closes it. At steps that reuse the
    region, none of its blocks runs.
    """

    first: bool = True
    last: bool = True
    reusable: bool = False
    """Whether steps may leave out the run."""

    @around_graphs
    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        args, kwargs, reuses, to_close = self._enter(module, patch, args, kwargs)
        output = self.tokens.unchanged(args, kwargs) if reuses else inner(*args, **kwargs)
        return output if to_close is None else self._close(*to_close, output)

    @outside_graphs
    def _enter(
        self, module: nn.Module, patch: Patch, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict, bool, tuple[Scope, OpenRegion] | None]:
        """Opens a region, or goes on with the one that is open.

        Returns:
            The arguments of the block, on merged tokens; whether to leave it out; and if a region
            ends with it, its scope and the region.
        """
        x, now = self.tokens.take(args, kwargs), current_scope(patch)
        if now is not None and now.region is not None:
            if now.region.x.device != x.device:  # a model can be split over several
                now.region = _moved(now.region, x.device)
            if not self.last and not self._reuses(now):
                # Fast path: most blocks are in the middle, and CPU time per block is scarce.
                return *self.tokens.replaced(now.region.along, args, kwargs), False, None
        scope = self.scope_at(module, patch, x)
        region, reuses = scope.region, self._reuses(scope)
        if region is None:
            region = self._open(scope, module, args, kwargs)
            if region is None:
                return args, kwargs, False, None
            merged = region.merged.clone() if self.tokens.in_place else region.merged
            args, kwargs = self.tokens.given(merged, args, kwargs)
            scope.region = region if self.first and not scope.call.apart else None
        if not reuses:
            args, kwargs = self.tokens.replaced(region.along, args, kwargs)
        if scope.region is not None and not self.last:
            return args, kwargs, reuses, None
        scope.region = None
        return args, kwargs, reuses, (scope, region)

    def _reuses(self, scope: Scope) -> bool:
        return self.reusable and scope.call.reuses

    def _open(
        self, scope: Scope, module: nn.Module, args: tuple, kwargs: dict
    ) -> OpenRegion | None:
        """Opens a region, unless there is nothing to merge, keep or reuse."""
        x = self.tokens.take(args, kwargs)
        merges = scope.decision.merges and not self._reuses(scope)
        if merges:
            refused = self.tokens.given_refused(args, kwargs)
            merges = self.can_merge(scope, module, x, refused)
        keeps = self.reusable and scope.call.moment is not None
        if not merges and not keeps:
            return None
        place = scope.next_place()
        if merges:
            here = Scope(scope.call, scope.decision, place=place)
            region = self._merge(here, module, args, kwargs)
        else:
            region = OpenRegion(None, x, x, {}, place)
        if keeps:
            region.other = self.tokens.take_other(args, kwargs)
            if self.tokens.in_place and region.other is not None:
                region.other = region.other.clone()
        return region

    def _merge(self, scope: Scope, module: nn.Module, args: tuple, kwargs: dict) -> OpenRegion:
        """Opens a region on merged tokens."""
        decision, x = scope.decision, self.tokens.take(args, kwargs)
        cuts = scope.call.cuts_in_common
        (segments,) = decision.segments.values()
        start, image = None, x
        if self.tokens.joint:
            start = self.tokens.start(x.shape[1], decision, args, kwargs)
            image = _part(x, start, decision.tokens)
        plan = find_plan(scope, module, image, segments)
        along = self.tokens.cut_along(plan, decision, args, kwargs, cuts)
        if start is not None:
            plan = plan.placed(start, x.shape[1])
        return OpenRegion(plan, x, plan.merge(x), along, scope.place)

    @outside_graphs
    def _close(self, scope: Scope, region: OpenRegion, output: Any) -> Any:
        """Adds to each token what its slot gained, or what the token gained at an earlier step."""
        call, y = scope.call, self.tokens.result(output)
        if region.plan is not None:
            y = region.plan.restore(region.x, y, region.merged)
        if not (self.first and self.last):
            call.cuts.clear()  # the blocks after a run need no rows of merged tokens
        other = _alone(self.tokens.result_other(output))
        if self.reusable and call.moment is not None:
            y = use_or_keep(call, f"{region.place}_image", region.x, y)
            if other is not None and region.other is not None:
                other = use_or_keep(call, f"{region.place}_text", region.other, other)
        note_output(call, region.place, y)
        return self.tokens.with_results(y, other, output)


def _moved(value: Any, device: torch.device) -> Any:
    """A region, or a part of one, on another device."""
    if isinstance(value, Tensor | ItemRows):
        return value.to(device)
    if isinstance(value, OpenRegion | MergePlan):
        parts = {part.name: _moved(getattr(value, part.name), device) for part in fields(value)}
        return type(value)(**parts)
    if isinstance(value, dict):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([_moved(part, device) for part in value])
    return value


def _alone(x: Tensor | None) -> Tensor | None:
    """The same numbers, in no more memory than they need: text may be a view of a sequence with all
    merged tokens, which would stay in memory with it."""
    if x is None or torch.compiler.is_compiling() or type(x) is not Tensor:
        return x
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def _part(x: Tensor, start: int | Tensor, length: int) -> Tensor:
    """`length` tokens of a sequence `[B, S, C]`, from a start that may differ between items."""
    if not isinstance(start, Tensor):
        return x[:, start : start + length]
    places = start[:, None] + torch.arange(length, device=x.device)
    return x.take_along_dim(places[..., None], dim=1)


def _square_scope(patch: Patch, x: Tensor) -> Scope:
    """The scope of a block patched on its own, without a model that knows the grid."""
    side = math.isqrt(x.shape[1])
    call = Call(patch, patch.settings, (side, side))
    if side * side == x.shape[1]:
        return Scope(call, decide(call, (1, side, side), 1, x))
    patch.warn_once(
        f"tomesd merged nothing: {x.shape[1]} tokens are not a square, and a block patched "
        "on its own cannot know their grid; patch the model around it"
    )
    return Scope(call, Decision((1, side, side), 1, side * side))
