"""Makes the plans of blocks and regions, from what their call of the model knows."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import kernels
from .kernels import Cells, Clock, Draw, Request
from .metric import angle_to_mean, mask_on_grid, most_guided
from .plan import MergePlan, join
from .state import Call, Patch, Scope, Segment
from .volume import plan_tokens


def find_plan(
    scope: Scope, block: nn.Module, x: Tensor, segments: tuple[Segment, ...]
) -> MergePlan:
    """A plan for the image tokens `x` `[B, N, C]` of a block, made or found as `share` says."""
    plan = _shared_plan(scope, x, segments)
    if plan is None:
        # What is kept is written over later, when a backward pass might still need it.
        kept = scope.settings.share == "steps" and scope.call.timestep is not None
        keep = kept and not x.requires_grad and not scope.call.selector.fixed
        plan = make_plan(scope, block, x, segments, keep=keep)
        if scope.settings.share != "block":
            scope.call.plans.append((segments, plan))
    if scope.patch.observer is not None:
        scope.patch.observer(scope, block, plan)
    return plan


def _shared_plan(scope: Scope, x: Tensor, segments: tuple[Segment, ...]) -> MergePlan | None:
    """The plan that another block of this call has made."""
    if scope.settings.share != "block":
        for key, plan in scope.call.plans:
            if key == segments and plan.fits(x):
                return plan
    return None


def make_plan(
    scope: Scope,
    block: nn.Module,
    x: Tensor,
    segments: tuple[Segment, ...],
    *,
    keep: bool = False,
) -> MergePlan:
    """Makes the plan of each segment, in memory that stays if they are to be kept, and joins them.

    What is kept is made anew only when it is out of date.
    """
    metric, plans, start = _metric(scope, block, x), [], 0
    mask = _mask(scope, x)
    draw = Draw(_times(scope.call, x.shape[0]), _key(scope))
    for number, segment in enumerate(segments):
        tokens = metric[:, start : start + segment.tokens] if len(segments) > 1 else metric
        start += segment.tokens
        if segment.volume is None or segment.remove == 0:
            plans.append(MergePlan.identity(x.shape[0], segment.tokens, x.device))
            continue
        if mask is not None and segment.tokens == mask.shape[1]:  # not a reference
            tokens, mask = tokens.masked_fill(mask[..., None], 0.0), None

        def select(metric: Tensor, cells: Cells, remove: int, number: int = number) -> MergePlan:
            return _select(scope, metric, cells, remove, draw, number if keep else None)

        plans.append(plan_tokens(select, tokens, segment.volume, segment.removes))
    return join(plans)


def _select(
    scope: Scope, metric: Tensor, cells: Cells, remove: int, draw: Draw, number: int | None
) -> MergePlan:
    """The plan of an image, or of a group of frames in each of a batch."""
    settings, selector = scope.settings, scope.call.selector
    if number is None:
        return selector(
            metric, cells, remove, backend=settings.backend, timestep=draw.timestep, key=draw.key
        )
    triton = kernels.use_triton(settings.backend, metric)
    assert draw.timestep is not None
    sizes = (cells.h, cells.w, remove, number, draw.timestep.numel())
    kept, state = _memory(scope, metric, triton, sizes)
    selector.write(kept, metric, Request(cells, remove, draw, Clock(state, settings.refresh)))
    return kept


def _memory(
    scope: Scope, x: Tensor, triton: bool, sizes: tuple[int, int, int, int, int]
) -> tuple[MergePlan, Tensor]:
    """A plan that stays, and its clock; see `kernels.Clock`.

    Args:
        sizes: height and width of the grid, tokens to remove, number of the segment, timesteps.
    """
    (batch, n, _), (_, _, remove, _, times) = x.shape, sizes
    name = "_".join(["plan", *(str(int(size)) for size in (*sizes, batch)), str(triton)])
    tensor = scope.patch.kept.tensor
    plan = MergePlan(
        tensor(f"{name}_slot", (batch, n), torch.int64, x.device),
        tensor(f"{name}_order", (batch, n), torch.int32, x.device),
        tensor(f"{name}_span", (batch, n - remove, 2), torch.int32, x.device),
        triton,
    )
    # No time is below minus infinity, so the first call makes the plan.
    clock = tensor(f"{name}_clock", (2 + times,), torch.float32, x.device, fill=float("-inf"))
    return plan, clock


def _times(call: Call, batch: int) -> Tensor | None:
    """The timesteps to draw by: one for all items of the batch, or one for each."""
    timestep = call.timestep
    if timestep is not None and batch % timestep.numel():
        return timestep.reshape(-1)[:1]
    return timestep


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
    elif kind == "clean" and scope.call.clean is not None:
        fits = scope.call.clean.shape[:2] == x.shape[:2]
        found = scope.call.clean if fits else found
    elif kind == "previous" and not x.requires_grad and scope.call.timestep is not None:
        note = _Note(scope.call, f"block_{scope.place}", found.shape, found.dtype)
        output, same_image = note.recall(x.device)
        found = torch.where(same_image, output, found)
    return found


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
    """Tokens of the image to protect, `[1 or B, N]`; what matches nothing is merged last."""
    settings, call, grid = scope.settings, scope.call, scope.grid
    if settings.protect is None or (settings.protect == "guidance" and call.guided is None):
        return None
    for known, mask in call.masks:
        if known == grid:
            return mask
    if isinstance(settings.protect, Tensor):
        mask = mask_on_grid(settings.protect.to(x.device), grid[1:], x.shape[0])
        mask = mask.repeat(1, grid[0])  # in every frame
    else:
        assert call.guided is not None
        difference, same_image = call.guided
        mask = most_guided(difference, grid[1:], settings.protect_share) & same_image
    call.masks.append((grid, mask))
    return mask


def load_kernels(scope: Scope, features: Tensor, channels: int) -> None:
    """Merges some tokens once, where eager mode leaves them alone but a CUDA graph would not.

    No kernel can be loaded while a graph is captured.

    Args:
        features: `[B, C, H, W]`, on a GPU.
    """
    assert scope.decision is not None
    patch, tokens = scope.patch, scope.decision.tokens
    shape = (features.shape[0], tokens, channels)
    if torch.compiler.is_compiling() or (shape, features.dtype) in patch.loaded:
        return
    patch.loaded.append((shape, features.dtype))
    x = features.new_zeros(shape)
    for segments in scope.decision.segments.values():
        plan = make_plan(scope, nn.Identity(), x, segments)
        merged = plan.merge(x)
        plan.restore(x, plan.merge(plan.unmerge(merged)), merged)


def note_output(call: Call, place: str, output: Any) -> None:
    """Keeps what the block at a place gave, `[B, N, C]`, if the next step is to match on it."""
    if call.settings.metric != "previous" or call.timestep is None:
        return
    if isinstance(output, Tensor) and not output.requires_grad:
        _Note(call, f"block_{place}", output.shape, output.dtype).write(output)


@torch.no_grad()
def expect_clean(call: Call, tokens: Tensor) -> None:
    """Notes the image that the last two latents of a rectified flow lead to.

    A latent is `(1 - s) image + s noise`, and a step goes straight on, so two latents tell the
    image: the same for both halves of guidance, in one batch or in two calls.

    Args:
        tokens: of the latent, `[B, N, C]`.
    """
    if call.settings.metric != "clean" or call.timestep is None:
        return
    shape, tensor = tuple(int(side) for side in tokens.shape), call.patch.kept.tensor
    names = "_".join(map(str, shape))
    now = _times(call, shape[0])
    assert now is not None
    now = now.reshape(-1).float()
    times = [
        tensor(f"{name}_{names}_time", tuple(now.shape), now.dtype, tokens.device, fill=-math.inf)
        for name in ("latent", "earlier")
    ]
    last, earlier = (
        tensor(name, shape, tokens.dtype, tokens.device) for name in ("latent", "earlier")
    )
    moved = (now != times[0]).all()  # not the second call at one time
    earlier.copy_(torch.where(moved, last, earlier))
    times[1].copy_(torch.where(moved, times[0], times[1]))
    last.copy_(tokens)
    times[0].copy_(now)
    # Times that stand still or rise begin another image, of which there is one latent only. No
    # time is below minus infinity, where they begin.
    share = torch.where(now < times[1], now / (times[1] - now), 0.0).to(tokens.dtype)
    if share.numel() > 1:
        share = share.repeat_interleave(shape[0] // share.numel())
    share = share.view(-1, 1, 1)
    call.clean = tokens + share * torch.where(share > 0, tokens - earlier, 0.0)


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
