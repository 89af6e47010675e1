"""Makes the plans of blocks and regions, from what their call of the model knows."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import kernels
from .metric import angle_to_mean, mask_on_grid, most_guided
from .plan import MergePlan, join
from .state import Call, Patch, Scope, Segment, tokens_removed
from .volume import plan_tokens

__all__ = ["find_plan", "make_plan", "note_guidance", "note_output", "recall_guidance"]


def find_plan(
    scope: Scope, block: nn.Module, x: Tensor, segments: tuple[Segment, ...]
) -> MergePlan:
    """A plan for the image tokens `x` `[B, N, C]` of a block, made or found as `share` says."""
    settings, call = scope.settings, scope.call
    if settings.share == "block":
        return make_plan(scope, block, x, segments)
    for key, plan in call.plans:
        if key == segments and plan.fits(x):
            return plan
    # What is kept is written over later, when a backward pass might still need it.
    keep = settings.share == "steps" and call.timestep is not None and not x.requires_grad
    plan = (_keep_plan if keep else make_plan)(scope, block, x, segments)
    call.plans.append((segments, plan))
    return plan


def make_plan(
    scope: Scope, block: nn.Module, x: Tensor, segments: tuple[Segment, ...]
) -> MergePlan:
    metric, plans, start = _metric(scope, block, x), [], 0
    for segment in segments:
        tokens = metric[:, start : start + segment.tokens] if len(segments) > 1 else metric
        start += segment.tokens
        if segment.volume is None or segment.remove == 0:
            plans.append(MergePlan.identity(x.shape[0], segment.tokens, x.device))
            continue
        plan = plan_tokens(
            scope.patch.selector,
            tokens,
            segment.volume,
            segment.removes,
            backend=scope.settings.backend,
            timestep=scope.call.timestep,
            key=_key(scope),
        )
        plans.append(plan)
    return join(plans)


def _keep_plan(
    scope: Scope, block: nn.Module, x: Tensor, segments: tuple[Segment, ...]
) -> MergePlan:
    """As `make_plan`, in memory that stays, and only if the plan there is out of date."""
    settings, timestep = scope.settings, scope.call.timestep
    assert timestep is not None
    triton = kernels.use_triton(settings.backend, x)
    kept, clock = _memory(scope, x, tokens_removed(segments), triton)
    (first, *others) = segments
    assert first.volume is not None
    if settings.selector == "bipartite" and not others and scope.grid[0] == 1:
        kernels.match_tokens(
            _metric(scope, block, x),
            first.volume.parts[0].cells,
            first.remove,
            (kept.slot, kept.order, kept.span),
            timestep=timestep,
            key=_key(scope),
            clock=clock,
            refresh=settings.refresh,
            triton=triton,
        )
        return kept
    made = make_plan(scope, block, x, segments)
    time = timestep.reshape(-1).to(clock)
    keep = (time < clock[2:]).all() & (clock[1] < settings.refresh)
    clock[1] = torch.where(keep, clock[1] + 1, 1.0)
    clock[2:] = time
    for old, new in ((kept.slot, made.slot), (kept.order, made.order), (kept.span, made.span)):
        old.copy_(torch.where(keep, old, new))
    return kept


def _memory(scope: Scope, x: Tensor, remove: int, triton: bool) -> tuple[MergePlan, Tensor]:
    """A plan that stays, and its clock; see `kernels.match_tokens`."""
    assert scope.call.timestep is not None
    batch, n, _ = x.shape
    name = "_".join(["plan", *(str(int(side)) for side in scope.grid), str(int(remove))])
    name = f"{name}_{triton}"
    tensor = scope.patch.kept.tensor
    plan = MergePlan(
        tensor(f"{name}_slot", (batch, n), torch.int64, x.device),
        tensor(f"{name}_order", (batch, n), torch.int32, x.device),
        tensor(f"{name}_span", (batch, n - remove, 2), torch.int32, x.device),
        triton,
    )
    times = scope.call.timestep.numel()
    # No time is below minus infinity, so the first call makes the plan.
    clock = tensor(
        f"{name}_{batch}_clock", (2 + times,), torch.float32, x.device, fill=float("-inf")
    )
    return plan, clock


def _key(scope: Scope) -> int:
    """Key of the draw at this level."""
    assert scope.decision is not None
    settings = scope.settings
    return kernels.draw_key(settings.seed, scope.decision.level) if settings.use_rand else -1


def _metric(scope: Scope, block: nn.Module, x: Tensor) -> Tensor:
    """What similarity is measured on, `[B, N, ...]`."""
    kind = scope.settings.metric
    found = x.detach()
    if kind == "keys":
        found = _keys(scope.patch, block, found)
    elif kind == "mean":
        found = angle_to_mean(found)
    elif kind == "previous" and not x.requires_grad and scope.call.timestep is not None:
        note = _Note(scope.call, f"block_{scope.place}", found.shape, found.dtype)
        output, same_image = note.recall(x.device)
        found = torch.where(same_image, output, found)
    mask = _mask(scope, x)
    return found if mask is None else found.masked_fill(mask[..., None], 0.0)


@torch.no_grad()
def _keys(patch: Patch, block: nn.Module, x: Tensor) -> Tensor:
    """The keys of a block's self-attention, `[B, N, C']`."""
    to_k = getattr(getattr(block, "attn1", None), "to_k", None)
    if to_k is None:
        patch.warn_once(
            f'tomesd: a {type(block).__name__} has no attn1.to_k, so metric="keys" compares what '
            "goes into it"
        )
        return x
    norm = getattr(block, "norm1", None)
    if not isinstance(norm, nn.LayerNorm):
        norm = _plain_norm  # its own also takes the timestep, which shifts all tokens alike
    keys: Tensor = to_k(norm(x))
    return keys


def _plain_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _mask(scope: Scope, x: Tensor) -> Tensor | None:
    """Tokens to protect, `[1 or B, N]`; what matches nothing is merged last."""
    settings, call, grid = scope.settings, scope.call, scope.grid
    if settings.protect is None or (settings.protect == "guidance" and call.guided is None):
        return None
    for known, mask in call.masks:
        if known == grid:
            return mask
    if isinstance(settings.protect, Tensor):
        mask = mask_on_grid(settings.protect.to(x.device), grid[1:], x.shape[0])
    else:
        assert call.guided is not None
        difference, same_image = call.guided
        mask = most_guided(difference, grid[1:], settings.protect_share) & same_image
    call.masks.append((grid, mask))
    return mask


def note_output(call: Call, place: str, output: Any) -> None:
    """Keeps what the block at a place gave, `[B, N, C]`, if the next step is to match on it."""
    if call.settings.metric != "previous" or call.timestep is None:
        return
    if isinstance(output, Tensor) and not output.requires_grad:
        _Note(call, f"block_{place}", output.shape, output.dtype).write(output)


def recall_guidance(call: Call, latent: Tensor) -> None:
    """Gives the call what the last one noted of guidance.

    Args:
        latent: `[B, ..., H, W]`.
    """
    if call.settings.protect != "guidance" or call.timestep is None:
        return
    if _is_guided(call.patch, latent):
        shape = (latent.shape[0] // 2, *latent.shape[-2:])
        call.guided = _Note(call, "guidance", shape, torch.float32).recall(latent.device)


def note_guidance(call: Call, output: Any) -> None:
    """Keeps where the prompt made a difference.

    Args:
        output: of the model: `[B, C, H, W]`, first without the prompt, then with it; or something
            that holds it.
    """
    if call.settings.protect != "guidance" or call.timestep is None:
        return
    if not isinstance(output, Tensor):
        output = output[0] if isinstance(output, tuple) else getattr(output, "sample", None)
    if isinstance(output, Tensor) and _is_guided(call.patch, output):
        one, other = output.detach().float().chunk(2)
        difference = (one - other).abs().mean(dim=1)
        _Note(call, "guidance", difference.shape, torch.float32).write(difference)


def _is_guided(patch: Patch, batch: Tensor) -> bool:
    guided = batch.ndim == 4 and batch.shape[0] % 2 == 0
    if not guided:
        patch.warn_once(
            'tomesd protects nothing: protect="guidance" needs the predictions with and without '
            "the prompt in one batch of images"
        )
    return guided


@dataclass(frozen=True)
class _Note:
    """Something that is kept for the next step of the same image."""

    call: Call
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def recall(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What was written at the step before, and whether that was one of the same image `[]`."""
        value, last = self._tensors(device)
        # Time that stands still or rises is a new image.
        return value, (self._time(last) < last).all()

    def write(self, value: Tensor) -> None:
        kept, last = self._tensors(value.device)
        kept.copy_(value)
        last.copy_(self._time(last))

    def _time(self, last: Tensor) -> Tensor:
        assert self.call.timestep is not None
        return self.call.timestep.reshape(-1).to(last)

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        assert self.call.timestep is not None
        shape = tuple(int(side) for side in self.shape)
        value = self.call.patch.kept.tensor(self.name, shape, self.dtype, device)
        name = "_".join([self.name, *map(str, shape), "time"])
        times = (self.call.timestep.numel(),)
        last = self.call.patch.kept.tensor(name, times, torch.float32, device, fill=float("-inf"))
        return value, last
