"""What tokens are compared by: what goes into a block, or what is known of the image besides."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compiler import outside_graphs
from .kept import Note
from .state import Call, Patch, Scope


def metric_of(scope: Scope, block: nn.Module, x: Tensor) -> Tensor:
    """What the similarity of tokens `x` `[B, N, C]` is measured on, `[B, N, ...]`."""
    kind, call, found = scope.settings.metric, scope.call, x.detach()
    if kind == "keys":
        found = _keys(scope.patch, block, found)
    elif kind == "mean":
        found = angle_to_mean(found)
    elif kind == "clean" and call.clean is not None and call.clean.shape[:2] == x.shape[:2]:
        found = call.clean.to(x.device)
    elif kind == "previous" and not x.requires_grad and call.timestep is not None:
        note = _note(call, f"block_{scope.place}", found)
        found = torch.where(note.is_from_step_before, note.value, found)
    return _protected(scope, found)


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
    # A norm of another kind also takes the timestep, which shifts all tokens alike.
    x = norm(x) if isinstance(norm, nn.LayerNorm) else F.layer_norm(x, x.shape[-1:])
    keys: Tensor = to_k(x)
    return keys


def _protected(scope: Scope, metric: Tensor) -> Tensor:
    """The metric with zeros, which match nothing, for tokens of the image to protect."""
    settings, call = scope.settings, scope.call
    first, unknown = scope.decision.first, settings.protect == "guidance" and call.guided is None
    if settings.protect is None or first is None or unknown:
        return metric
    mask = _mask(scope, metric)
    mask = F.pad(mask, (first, metric.shape[1] - first - mask.shape[1]))
    return metric.masked_fill(mask[..., None], 0.0)


def _mask(scope: Scope, x: Tensor) -> Tensor:
    """Tokens of the image to protect, `[1 or B, N]`, found once for each grid."""
    settings, call, grid = scope.settings, scope.call, scope.grid
    for known, mask in call.masks:
        if known == grid:
            return mask.to(x.device)
    if isinstance(settings.protect, Tensor):
        mask = mask_on_grid(settings.protect.to(x.device), grid[1:], x.shape[0])
        mask = mask.repeat(1, grid[0])  # in every frame
    else:
        assert call.guided is not None
        difference, same_image = call.guided
        mask = most_guided(difference, grid[1:], settings.protect_share) & same_image
        mask = mask.to(x.device)
    call.masks.append((grid, mask))
    return mask


def _note(call: Call, name: str, like: Tensor) -> Note:
    """The note of that name for a tensor `[B, ...]` of this shape, dtype and device."""
    times = call.times(like.shape[0])
    assert times is not None
    times = times.reshape(-1)
    return call.patch.kept.note(name, like.shape, like.dtype, like.device, times)


@outside_graphs
def note_output(call: Call, place: str, output: Any) -> None:
    """Keeps what the block at a place gave, `[B, N, C]`, if the next step is to match on it."""
    if call.settings.metric != "previous" or call.timestep is None:
        return
    if isinstance(output, Tensor) and not output.requires_grad:
        _note(call, f"block_{place}", output).write(output)


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
    last = _note(call, "latent", tokens)
    kept, now = call.patch.kept, last.now
    earlier = kept.note("earlier", tokens.shape, tokens.dtype, tokens.device, now)
    moved = (now != last.times).all()  # not the second call at one time
    earlier.value.copy_(torch.where(moved, last.value, earlier.value))
    earlier.times.copy_(torch.where(moved, last.times, earlier.times))
    last.write(tokens)
    # Times that stand still or rise begin another image, of which there is one latent only. No
    # time is below minus infinity, where they begin.
    share = torch.where(now < earlier.times, now / (earlier.times - now), 0.0).to(tokens.dtype)
    if share.numel() > 1:
        share = share.repeat_interleave(tokens.shape[0] // share.numel())
    share = share.view(-1, 1, 1)
    call.clean = tokens + share * torch.where(share > 0, tokens - earlier.value, 0.0)


def recall_guidance(call: Call, latent: Tensor) -> None:
    """Gives the call what the last one noted of guidance.

    Args:
        latent: `[B, ..., H, W]`.
    """
    if _is_guided(call, latent):
        note = _note(call, "guidance", latent.chunk(2)[0][:, 0].float())
        call.guided = note.value, note.is_from_step_before


def note_guidance(call: Call, output: Any) -> None:
    """Keeps where the prompt made a difference.

    Args:
        output: of the model: `[B, C, H, W]`, first without the prompt, then with it; or something
            that holds it.
    """
    if not isinstance(output, Tensor):
        output = output[0] if isinstance(output, tuple) else getattr(output, "sample", None)
    if isinstance(output, Tensor) and _is_guided(call, output):
        one, other = output.detach().float().chunk(2)
        difference = (one - other).abs().mean(dim=1)
        _note(call, "guidance", difference).write(difference)


def _is_guided(call: Call, batch: Tensor) -> bool:
    """Whether what guidance does is to be kept, and can be told from a batch."""
    if call.settings.protect != "guidance" or call.timestep is None:
        return False
    guided = batch.ndim == 4 and batch.shape[0] % 2 == 0
    if not guided:
        call.patch.warn_once(
            'tomesd protects nothing: protect="guidance" needs the predictions with and without '
            "the prompt in one batch of images"
        )
    return guided


def angle_to_mean(x: Tensor) -> Tensor:
    """How similar each token is to the mean token of its image, as a direction.

    Similarities are stretched over the range of the image and laid on a quarter of a circle, where
    the cosine of two directions falls with the difference of what they stand for.

    Args:
        x: tokens, `[B, N, C]`.

    Returns:
        `[B, N, 2]`, float32.
    """
    wide = x.float()
    similarity = F.cosine_similarity(wide, wide.mean(dim=1, keepdim=True), dim=2)
    low, high = similarity.amin(dim=1, keepdim=True), similarity.amax(dim=1, keepdim=True)
    angle = (similarity - low) / (high - low).clamp_min(1e-12) * (math.pi / 2)
    return torch.stack([angle.cos(), angle.sin()], dim=2)


def mask_on_grid(mask: Tensor, grid: tuple[int, int], batch: int) -> Tensor:
    """Which tokens a mask covers, be it in part.

    Args:
        mask: `[h, w]` or `[b, h, w]` of any size, not zero where it covers something.

    Returns:
        `[1 or batch, N]`, bool.
    """
    covered = (mask if mask.ndim == 3 else mask[None]) != 0
    tokens = F.adaptive_max_pool2d(covered.float(), grid).flatten(1) > 0
    images = tokens.shape[0]
    if batch % images:
        raise ValueError(f"protect: has masks for {images} images, and {batch} are made at once")
    # Guidance runs the images twice, one set after the other.
    return tokens.repeat(batch // images, 1) if images > 1 else tokens


def most_guided(difference: Tensor, grid: tuple[int, int], share: float) -> Tensor:
    """The tokens where guidance makes the most difference.

    Args:
        difference: of the predictions with and without the prompt, `[b, h, w]`.
        share: of the tokens to take.

    Returns:
        `[2 b, N]`, bool: for the one half of the batch and the other.
    """
    size = F.adaptive_avg_pool2d(difference, grid).flatten(1)
    count = round(share * size.shape[1])
    if count == 0:
        return torch.zeros_like(size, dtype=torch.bool).repeat(2, 1)
    least = size.topk(count, dim=1).values[:, -1:]
    return ((size >= least) & (size > 0)).repeat(2, 1)
