"""The layers inside a block, which merge and unmerge separately, and their helpers."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..plan import MergePlan
from ..proportional import Part, proportion_of
from ..state import Patch, Scope, current_scope, run_inside
from .role import Inner, Role
from .tokens import Tokens


@dataclass(frozen=True)
class Norm(Role):
    """The norm before self-attention. It may merge its own output, so that the unmerged tokens are
    freed before attention runs, which is when a step needs the most memory."""

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        scope = current_scope(patch)
        output = inner(*args, **kwargs)
        return scope.plans["attn"].merge(output) if scope is not None and scope.early else output


@dataclass(frozen=True)
class Layer(Role):
    tokens: Tokens
    kind: str
    """"attn", "crossattn" or "mlp"."""
    context: str = ""
    """Attention's second parameter, which takes the keys' tokens; None means self-attention."""

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        scope = current_scope(patch)
        # Popped, not read: the plan is needed once, and later layers may need the memory.
        plan = scope.plans.pop(self.kind, None) if scope is not None else None
        if scope is None or plan is None:
            return inner(*args, **kwargs)
        x = self.tokens.take(args, kwargs)
        is_self_attention = self.kind == "attn"
        keys_only = is_self_attention and scope.settings.target == "kv"
        fits = plan.fits(x)
        # The norm has merged them by now, unless somebody has put another in place of ours.
        is_merged = is_self_attention and scope.early and not fits
        obstacle = self._obstacle(module, args, kwargs, fits or is_merged, keys_only)
        if obstacle:
            patch.warn_once(f"tomesd left {self.kind} layers alone: {obstacle}")
            return inner(*args, **kwargs)
        is_proportional = scope.settings.proportional and is_self_attention
        if is_proportional and not self._other_keys(args, kwargs):
            scope = _with_proportion(scope, module, plan)
        merged = x if is_merged else plan.merge(x)
        cuts = scope.call.cuts_in_common
        along = self.tokens.cut_along(plan, scope.decision, args, kwargs, cuts)
        if keys_only:
            changes = {**along, self.context: merged}
            args, kwargs = self.tokens.replaced(changes, args, kwargs)
            return run_inside(scope, inner, *args, **kwargs)
        unmerge = plan.unmerge
        del plan  # frees memory for the layer
        args, kwargs = self.tokens.given(merged, *self.tokens.replaced(along, args, kwargs))
        return unmerge(run_inside(scope, inner, *args, **kwargs))

    def _obstacle(
        self, module: nn.Module, args: tuple, kwargs: dict, fits: bool, keys_only: bool
    ) -> str:
        """Why the layer cannot run on merged tokens; empty if it can."""
        if not fits:
            return "they run on a part of the tokens at a time (chunked)"
        for name in self.tokens.refused:
            if kwargs.get(name) is not None:
                return f"{name} is given, and has one row per unmerged token"
        other_keys = self._other_keys(args, kwargs)
        if keys_only and not other_keys and getattr(module, "fused_projections", False):
            return 'their projections are fused, and target="kv" needs them apart'
        return other_keys if keys_only else ""

    def _other_keys(self, args: tuple, kwargs: dict) -> str:
        """Why the keys are not those of the layer's input alone; empty if they are."""
        context = args[1] if len(args) > 1 else kwargs.get(self.context)
        if context is not None:
            return "they attend to something else than the image"
        if kwargs.get("additional_tokens") is not None:  # of sgm
            return "they attend to additional tokens"
        return ""


def _with_proportion(scope: Scope, module: nn.Module, plan: MergePlan) -> Scope:
    """The scope inside an attention layer in which each token weighs as much as its slot holds."""
    proportion = proportion_of(module, plan.size)
    if isinstance(proportion, str):
        scope.patch.warn_once(f"tomesd: attention is not proportional in a layer: {proportion}")
        return scope
    return Scope(scope.call, scope.decision, proportion=proportion)


@dataclass(frozen=True)
class Projection(Role):
    part: Part

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        scope = current_scope(patch)
        if scope is None or scope.proportion is None:
            return inner(*args, **kwargs)
        return scope.proportion.project(self.part, inner, *args, **kwargs)
