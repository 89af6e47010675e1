"""Makes the plans of blocks and regions, from what their call of the model knows."""

from operator import index

import torch
from torch import Tensor, nn

from . import kernels
from .kernels import Cells, Clock, Draw, Request
from .metric import metric_of
from .plan import MergePlan
from .segments import Segment, plan_segments
from .state import Scope


def find_plan(
    scope: Scope, block: nn.Module, x: Tensor, segments: tuple[Segment, ...]
) -> MergePlan:
    """A plan for the image tokens `x` `[B, N, C]` of a block, made or found as `share` says."""
    share, call = scope.settings.share, scope.call
    # Plans that other blocks of this call have made.
    plans = [plan for key, plan in call.plans if key == segments and plan.fits(x)]
    if plans:
        plan = plans[0]
    else:
        # What is kept is written over later, when a backward pass might still need it.
        keep = share == "steps" and call.timestep is not None and not x.requires_grad
        plan = make_plan(scope, block, x, segments, keep=keep and not call.selector.fixed)
        if share != "block":
            call.plans.append((segments, plan))
    if scope.patch.observer is not None:
        scope.patch.observer(scope, block, plan)
    return plan


def make_plan(
    scope: Scope, block: nn.Module, x: Tensor, segments: tuple[Segment, ...], *, keep: bool = False
) -> MergePlan:
    """Makes a plan, in memory that stays if it is to be kept; then only if it is out of date."""
    settings, selector = scope.settings, scope.call.selector
    key = kernels.draw_key(settings.seed, scope.decision.level) if settings.use_rand else -1
    times = scope.call.times(x.shape[0])
    draw = Draw(None if times is None else times.to(x.device), key)

    def select(metric: Tensor, cells: Cells, remove: int, number: int) -> MergePlan:
        if not keep:
            backend = settings.backend
            return selector(
                metric, cells, remove, backend=backend, timestep=draw.timestep, key=draw.key
            )
        assert draw.timestep is not None
        plan, clock = _memory(scope, metric, cells, remove, number, draw.timestep.numel())
        selector.write(plan, metric, Request(cells, remove, draw, clock))
        return plan

    return plan_segments(metric_of(scope, block, x), segments, select)


def _memory(
    scope: Scope, x: Tensor, cells: Cells, remove: int, segment: int, times: int
) -> tuple[MergePlan, Clock]:
    """A plan that stays, of a metric `[B, N, C]`, and its clock.

    Args:
        segment: its number.
        times: how many timesteps there are.
    """
    batch, n, _ = x.shape
    triton, kept = kernels.use_triton(scope.settings.backend, x), scope.patch.kept
    sizes = (cells.h, cells.w, remove, segment, times, batch)
    name = "_".join(["plan", *(str(index(size)) for size in sizes), str(triton)])
    plan = MergePlan(
        kept.tensor(f"{name}_slot", (batch, n), torch.int64, x.device),
        kept.tensor(f"{name}_order", (batch, n), torch.int32, x.device),
        kept.tensor(f"{name}_span", (batch, n - remove, 2), torch.int32, x.device),
        triton,
    )
    return plan, Clock(kept.time(name, (2 + times,), x.device), scope.settings.refresh)


def load_kernels(scope: Scope, features: Tensor, channels: int) -> None:
    """Merges some tokens once, where eager mode leaves them alone but a CUDA graph would not.

    No kernel can be loaded while a graph is captured.

    Args:
        features: `[B, C, H, W]`, on a GPU.
    """
    shape = (features.shape[0], scope.decision.tokens, channels)

    def load() -> None:
        x = features.new_zeros(shape)
        for segments in scope.decision.segments.values():
            plan = make_plan(scope, nn.Identity(), x, segments)
            merged = plan.merge(x)
            plan.restore(x, plan.merge(plan.unmerge(merged)), merged)

    if not torch.compiler.is_compiling():
        scope.patch.once(("kernels", shape, features.dtype), load)
