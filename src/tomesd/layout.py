"""Where a transformer has its image tokens: the hosts read it, and the policy decides by it."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .state import Grid


@dataclass(frozen=True)
class LayoutPart:
    tokens: int
    grid: Grid | None = None
    """None: not on a grid, and so left alone."""
    reference: bool = False
    """Whether it is a reference image, whose output is discarded."""

    @classmethod
    def on(cls, grid: Grid, reference: bool = False) -> "LayoutPart":
        """The tokens of a whole grid."""
        return cls(math.prod(grid), grid, reference)


@dataclass(frozen=True)
class Layout:
    """What a transformer's sequence of image tokens is made of."""

    size: tuple[int, int]
    """Height and width of the latent."""
    grid: Grid
    """Of the image or video that is made."""
    parts: tuple[LayoutPart, ...]
    start: Tensor | None = None
    """Where they begin in a joint sequence, `[B]`, if items differ in that."""
    axes: tuple[int, ...] | None = None
    """How to turn what the model gets into `[B, C, F, H, W]`, if it is not that."""

    @property
    def tokens(self) -> int:
        return sum([part.tokens for part in self.parts])

    @property
    def first(self) -> int | None:
        """Tokens before those of the grid; None: they are left alone."""
        before = 0
        for part in self.parts:
            if part.grid == self.grid:
                return before
            before += part.tokens
        return None

    def left_alone(self) -> "Layout":
        """The same for a call in which no token may merge."""
        return replace(self, parts=(LayoutPart(self.tokens),))

    def tokens_of(self, latent: Any) -> Tensor:
        """What the model makes tokens of, in their order: `[B, N, C]`.

        Args:
            latent: `[B, N, C]`, `[B, C, H, W]` or `[B, C, F, H, W]`; or a list of its items.
                Tokens that are not in it are zeros.
        """
        if not isinstance(latent, Tensor):
            latent = torch.stack(list(latent))
        if latent.ndim in (3, 6):  # packed: tokens, or patches [B, N, C, 1, 2, 2]
            return latent.flatten(2)
        if self.axes is not None:
            latent = latent.permute(self.axes)
        if latent.ndim == 4:
            latent = latent.unsqueeze(2)
        (batch, channels, *sides), (t, h, w) = latent.shape, self.grid
        made = sum([part.tokens for part in self.parts if not part.reference])
        if made % (h * w) == 0:  # frames that are given count too
            t = made // (h * w)
        # Sides of a patch, rounded: models leave out pixels that are over, or pad missing ones.
        counts = (t, h, w)
        patch = [max(1, (2 * s + n) // (2 * n)) for s, n in zip(sides, counts, strict=True)]
        missing = [n * p - s for s, n, p in zip(sides, counts, patch, strict=True)]
        latent = F.pad(latent, [x for side in reversed(missing) for x in (0, side)])
        shape = [side for pair in zip(counts, patch, strict=True) for side in pair]
        patches = latent.reshape(batch, channels, *shape)
        tokens = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, t * h * w, -1)
        return F.pad(tokens, (0, 0, 0, self.tokens - t * h * w))
