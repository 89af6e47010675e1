"""The bound: a transformer whose blocks run on the tokens that are left, with nothing matched.

The same blocks as in a patched model get the first M of N tokens, and the rows that lie along
them. Afterwards the other tokens are put back as they were. No way of choosing tokens can be
faster. Nothing of the library runs in a call but the reading of arguments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tomesd.bench.contenders import FreePlan
from tomesd.hosts import find_models
from tomesd.patch import patch_of
from tomesd.regions import Layer, Member
from tomesd.segments import tokens_removed
from tomesd.state import Decision


def apply_bound(model: nn.Module, patched: nn.Module) -> None:
    """Makes `model` leave out as many tokens as `patched` did in its last call.

    Args:
        patched: the same model with a patch; it has been called.
    """
    [found] = find_models(model)
    patch = patch_of(find_models(patched)[0].module)
    bound = _Bound(patch.decisions[-1], keys_only=patch.settings.target == "kv")
    for module, role in found.sites(patch.settings):
        # What has been compiled stays as it is, so that its graphs serve all blocks of a kind.
        name = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        inner = getattr(module, name)
        if isinstance(role, Member):
            setattr(module, name, partial(bound.run_member, role, inner))
        elif isinstance(role, Layer):
            setattr(module, name, partial(bound.run_layer, role, inner))


class _Bound:
    """What stands in for the blocks and layers of a model, and what the first leaves for others."""

    def __init__(self, decision: Decision, keys_only: bool):
        [segments] = decision.segments.values()
        kept = decision.tokens - tokens_removed(segments)
        self.decision, self.keys_only = decision, keys_only
        self.plan = FreePlan(decision.tokens, kept, {})
        self.x: Tensor | None = None  # the tokens that came in, [B, N, C]
        self.along: dict[str, Any] = {}  # arguments that lie along the tokens, cut
        # Tokens of the sequence up to the last one that is kept, and to the last of the image.
        self.first = self.end = 0

    def run_member(self, role: Member, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tokens, decision = role.tokens, self.decision
        if role.first:
            x = self.x = tokens.take(args, kwargs)
            self.along = tokens.cut_along(self.plan, decision, args, kwargs)
            start: Any = tokens.start(x.shape[1], decision, args, kwargs) if tokens.joint else 0
            self.first, self.end = start + self.plan.kept, start + decision.tokens
            plan = self.plan.placed(start, x.shape[1]) if tokens.joint else self.plan
            args, kwargs = tokens.given(plan.pick(x), args, kwargs)
        if self.along:
            args, kwargs = tokens.replaced(self.along, args, kwargs)
        output = inner(*args, **kwargs)
        if not role.last:
            return output
        y, before = tokens.result(output), self.x
        parts = [y[:, : self.first], before[:, self.first : self.end], y[:, self.first :]]
        self.x = None
        return tokens.with_results(torch.cat(parts, dim=1), tokens.result_other(output), output)

    def run_layer(self, role: Layer, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tokens, plan = role.tokens, self.plan
        x = tokens.take(args, kwargs)
        along = tokens.cut_along(plan, self.decision, args, kwargs)
        args, kwargs = tokens.replaced(along, args, kwargs)
        if self.keys_only:
            return inner(*args, **{**kwargs, role.context: plan.pick(x)})
        args, kwargs = tokens.given(plan.pick(x), args, kwargs)
        return torch.cat([inner(*args, **kwargs), x[:, plan.kept :]], dim=1)
