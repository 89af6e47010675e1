"""A call of a model in which only shapes matter, and the tensors for it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PIXELS_PER_LATENT = 8

Rule = str | Callable[["Example"], Any]
"""How to make an argument: the shape of a data tensor (see `Example.data`), or a function."""


@dataclass(frozen=True)
class Example:
    """A call. Its sizes and the entries of the model's configuration are attributes."""

    module: Any
    batch: int
    height: int  # in latent pixels, like width
    width: int
    frames: int
    text: int  # tokens of text

    def __getattr__(self, name: str) -> Any:
        """The entry of the model's configuration with this name; None if there is none."""
        return self.module.config.get(name)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens of 2x2 latent pixels, as in all models whose rules use it."""
        return self.height // 2, self.width // 2

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width of the image, in pixels."""
        return self.height * _PIXELS_PER_LATENT, self.width * _PIXELS_PER_LATENT

    @property
    def tokens(self) -> int:
        """Tokens of one frame."""
        return math.prod(self.grid)

    @property
    def sequence(self) -> int:
        """Tokens of the text and the image together."""
        return self.text + self.tokens

    @property
    def frames_of_tokens(self) -> int:
        return -(-self.frames // (self.patch_size_t or 1))

    @property
    def whole_frames(self) -> int:
        """The frames, rounded up to a multiple of the temporal patch size."""
        return self.frames_of_tokens * (self.patch_size_t or 1)

    @property
    def video_tokens(self) -> int:
        """Tokens of a video in models where each latent pixel is one."""
        return self.frames * self.height * self.width

    @property
    def visual_channels(self) -> int:
        """Channels of the latent and, if the model takes one, of a given image and its mask."""
        return self.in_visual_dim * 2 + 1 if self.visual_cond else self.in_visual_dim

    def make(self, rule: Rule) -> Any:
        """The value that a rule gives; None if it does not apply to the model."""
        return self.data(rule) if isinstance(rule, str) else rule(self)

    def data(self, shape: str) -> Tensor | None:
        """A data tensor `[B, ...]`; None if the model lacks one of the axes.

        Args:
            shape: the axes after the batch, as numbers or names of attributes. "a|b" is the first
                of them that the model has. "text cap_feat_dim" gives `[B, text, cap_feat_dim]`.
        """
        sizes = [self._size(axis) for axis in shape.split()]
        return None if None in sizes else self.tensor(*sizes)

    def _size(self, axis: str) -> Any:
        if axis.isdecimal():
            return int(axis)
        size = next((size for name in axis.split("|") if (size := getattr(self, name))), None)
        return size[0] if isinstance(size, tuple | list) else size  # one entry per level

    def tensor(self, *shape: Any) -> Tensor:
        """A data tensor `[B, ...]`."""
        return self.zeros(self.batch, *shape)

    def zeros(self, *shape: int) -> Tensor:
        like = next(p for p in self.module.parameters() if p.is_floating_point())
        # The model's own `dtype` is preferred: single parameters may stay in full precision.
        dtype = getattr(self.module, "dtype", None) or like.dtype
        return torch.zeros(shape, device=like.device, dtype=dtype)

    def whole(self, *shape: int, value: int = 0) -> Tensor:
        """An integer tensor `[B, ...]`."""
        device = next(self.module.parameters()).device
        return torch.full((self.batch, *shape), value, device=device, dtype=torch.int64)

    def known(self, values: Any) -> Tensor:
        """A tensor whose values a model can read, even where it runs on shapes alone."""
        return torch.tensor(values, device=next(self.module.parameters()).device)

    def mask(self, tokens: int) -> Tensor:
        """A mask `[B, tokens]` that hides nothing."""
        return self.known([[True] * tokens] * self.batch)

    def count(self, stop: int, start: int = 0) -> Tensor:
        """The integers from `start` to `stop - 1`."""
        return self.known(list(range(start, stop)))

    def counts(self, stop: int, start: int = 0) -> Tensor:
        """The same for each batch item, `[B, stop - start]`."""
        return self.count(stop, start).expand(self.batch, -1)
