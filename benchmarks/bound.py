"""The bound: a transformer whose blocks run on the tokens that are left, with nothing matched.

The same blocks as in a patched model get the first M of N tokens, and the rows that lie along
them. Afterwards the other tokens are put back as they were. No way of choosing tokens can be
faster. Nothing of the library runs in a call but the reading of arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
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

__all__ = ["apply_bound"]


@dataclass
class _Region:
    """What the first block of a run leaves for the others."""

    decision: Decision
    plan: FreePlan
    x: Tensor | None = None
    """The tokens that came in, `[B, N, C]`."""
    first: int = 0
    """Tokens of the sequence up to the last one that is kept."""
    end: int = 0
    """Tokens of the sequence up to the last one of the image."""
    along: dict[str, Any] = field(default_factory=dict)
    """Arguments that lie along the tokens, cut."""


def apply_bound(model: nn.Module, patched: nn.Module) -> None:
    """Makes `model` leave out as many tokens as `patched` did in its last call.

    Args:
        patched: the same model with a patch; it has been called.
    """
    [found] = find_models(model)
    patch = patch_of(find_models(patched)[0].module)
    assert patch is not None
    decision = patch.decisions[-1]
    [segments] = decision.segments.values()
    kept = decision.tokens - tokens_removed(segments)
    region = _Region(decision, FreePlan(decision.tokens, kept, {}))
    for module, role in found.sites(patch.settings):
        if isinstance(role, Member):
            module.forward = partial(_run_member, region, role, module.forward)
        elif isinstance(role, Layer):
            keys_only = patch.settings.target == "kv"
            module.forward = partial(_run_layer, region, role, keys_only, module.forward)


def _run_member(
    region: _Region, role: Member, inner: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    tokens = role.tokens
    if role.first:
        plan: Any = region.plan
        decision = region.decision
        x = region.x = tokens.take(args, kwargs)
        region.along = tokens.cut_along(plan, decision, args, kwargs)
        start: Any = tokens.start(x.shape[1], decision, args, kwargs) if tokens.joint else 0
        region.first, region.end = start + plan.kept, start + decision.tokens
        if tokens.joint:
            plan = plan.placed(start, x.shape[1])
        args, kwargs = tokens.given(plan.pick(x), args, kwargs)
    if region.along:
        args, kwargs = tokens.replaced(region.along, args, kwargs)
    output = inner(*args, **kwargs)
    if not role.last:
        return output
    y, before = tokens.result(output), region.x
    assert before is not None
    parts = [y[:, : region.first], before[:, region.first : region.end], y[:, region.first :]]
    region.x = None
    return tokens.with_results(torch.cat(parts, dim=1), tokens.result_other(output), output)


def _run_layer(
    region: _Region,
    role: Layer,
    keys_only: bool,
    inner: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    tokens, plan = role.tokens, region.plan
    x = tokens.take(args, kwargs)
    along = tokens.cut_along(plan, region.decision, args, kwargs)
    args, kwargs = tokens.replaced(along, args, kwargs)
    if keys_only:
        return inner(*args, **{**kwargs, role.context: plan.pick(x)})
    args, kwargs = tokens.given(plan.pick(x), args, kwargs)
    return torch.cat([inner(*args, **kwargs), x[:, plan.kept :]], dim=1)
