"""What tokens are compared by, where it is not the tokens themselves."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


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
