"""Makes the plans of a block, from what its call of the model knows."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import kernels
from .metric import angle_to_mean, mask_on_grid, most_guided
from .plan import MergePlan
from .policy import Call, Frame
from .selectors import SELECTORS
from .shared import Patch

__all__ = ["make_plan", "note_guidance", "note_output", "recall_guidance", "shared_plan"]


def shared_plan(frame: Frame, x: Tensor, remove: int) -> MergePlan:
    """A plan of a block with input `x` `[B, N, C]`, made or found as `share` says."""
    settings, call = frame.settings, frame.call
    if settings.share == "block":
        return make_plan(frame, x, remove)
    for key, plan in call.plans:
        if key == (frame.grid, remove) and plan.fits(x):
            return plan
    # What is kept is written over later, when a backward pass might still need it.
    keep = settings.share == "steps" and call.timestep is not None and not x.requires_grad
    keep = keep and not SELECTORS[settings.selector].fixed
    plan = _keep_plan(frame, x, remove) if keep else make_plan(frame, x, remove)
    call.plans.append(((frame.grid, remove), plan))
    return plan


def make_plan(frame: Frame, x: Tensor, remove: int) -> MergePlan:
    return SELECTORS[frame.settings.selector](
        _metric(frame, x),
        frame.cells,
        remove,
        backend=frame.settings.backend,
        timestep=frame.call.timestep,
        key=_key(frame),
    )


def _keep_plan(frame: Frame, x: Tensor, remove: int) -> MergePlan:
    """As `make_plan`, in memory that stays, and only if the plan there is out of date."""
    settings, timestep = frame.settings, frame.call.timestep
    assert timestep is not None
    triton = kernels.use_triton(settings.backend, x)
    kept, state = _memory(frame, x, remove, triton)
    draw, clock = kernels.Draw(timestep, _key(frame)), kernels.Clock(state, settings.refresh)
    selector = SELECTORS[settings.selector]
    selector.write(kept, _metric(frame, x), frame.cells, remove, draw, clock)
    return kept


def _memory(frame: Frame, x: Tensor, remove: int, triton: bool) -> tuple[MergePlan, Tensor]:
    """A plan that stays, and its clock; see `kernels.Clock`."""
    assert frame.grid is not None and frame.call.timestep is not None
    (h, w), (batch, n, _) = frame.grid, x.shape
    name = f"plan_{int(h)}_{int(w)}_{int(remove)}_{triton}"
    tensor = frame.patch.kept.tensor
    plan = MergePlan(
        tensor(f"{name}_slot", (batch, n), torch.int64, x.device),
        tensor(f"{name}_order", (batch, n), torch.int32, x.device),
        tensor(f"{name}_span", (batch, n - remove, 2), torch.int32, x.device),
        triton,
    )
    times = frame.call.timestep.numel()
    # No time is below minus infinity, so the first call makes the plan.
    clock = tensor(
        f"{name}_{batch}_clock", (2 + times,), torch.float32, x.device, fill=float("-inf")
    )
    return plan, clock


def _key(frame: Frame) -> int:
    """Key of the draw at this level."""
    return kernels.draw_key(frame.settings.seed, frame.level) if frame.settings.use_rand else -1


def _metric(frame: Frame, x: Tensor) -> Tensor:
    """What similarity is measured on, `[B, N, ...]`."""
    kind = frame.settings.metric
    found = x.detach()
    if kind == "keys":
        found = _keys(frame.patch, frame.block, found)
    elif kind == "mean":
        found = angle_to_mean(found)
    elif kind == "previous" and not x.requires_grad and frame.call.timestep is not None:
        note = _Note(frame.patch, frame.call, f"block_{frame.place}", found.shape, found.dtype)
        output, same_image = note.recall(x.device)
        found = torch.where(same_image, output, found)
    mask = _mask(frame, x)
    return found if mask is None else found.masked_fill(mask[..., None], 0.0)


@torch.no_grad()
def _keys(patch: Patch, block: nn.Module | None, x: Tensor) -> Tensor:
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


def _mask(frame: Frame, x: Tensor) -> Tensor | None:
    """Tokens to protect, `[1 or B, N]`; what matches nothing is merged last."""
    settings, call, grid = frame.settings, frame.call, frame.grid
    assert grid is not None
    if settings.protect is None or (settings.protect == "guidance" and call.guided is None):
        return None
    for known, mask in call.masks:
        if known == grid:
            return mask
    if isinstance(settings.protect, Tensor):
        mask = mask_on_grid(settings.protect.to(x.device), grid, x.shape[0])
    else:
        assert call.guided is not None
        difference, same_image = call.guided
        mask = most_guided(difference, grid, settings.protect_share) & same_image
    call.masks.append((grid, mask))
    return mask


def note_output(frame: Frame, output: Any) -> None:
    """Keeps what a block gave, `[B, N, C]`, if the next step is to match on it."""
    call = frame.call
    if frame.settings.metric != "previous" or call.timestep is None:
        return
    if isinstance(output, Tensor) and not output.requires_grad:
        name = f"block_{frame.place}"
        _Note(frame.patch, call, name, output.shape, output.dtype).write(output)


def recall_guidance(patch: Patch, call: Call, latent: Tensor) -> None:
    """Gives the call what the last one noted of guidance.

    Args:
        latent: `[B, ..., H, W]`.
    """
    if patch.settings.protect != "guidance" or call.timestep is None:
        return
    if _is_guided(patch, latent):
        shape = (latent.shape[0] // 2, *latent.shape[-2:])
        call.guided = _Note(patch, call, "guidance", shape, torch.float32).recall(latent.device)


def note_guidance(patch: Patch, call: Call, output: Any) -> None:
    """Keeps where the prompt made a difference.

    Args:
        output: of the model: `[B, C, H, W]`, first without the prompt, then with it; or something
            that holds it.
    """
    if patch.settings.protect != "guidance" or call.timestep is None:
        return
    if not isinstance(output, Tensor):
        output = output[0] if isinstance(output, tuple) else getattr(output, "sample", None)
    if isinstance(output, Tensor) and _is_guided(patch, output):
        one, other = output.detach().float().chunk(2)
        difference = (one - other).abs().mean(dim=1)
        _Note(patch, call, "guidance", difference.shape, torch.float32).write(difference)


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

    patch: Patch
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
        value = self.patch.kept.tensor(self.name, shape, self.dtype, device)
        name = "_".join([self.name, *map(str, shape), "time"])
        times = (self.call.timestep.numel(),)
        last = self.patch.kept.tensor(name, times, torch.float32, device, fill=float("-inf"))
        return value, last
