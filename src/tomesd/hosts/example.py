"""One call of a model that only its shapes matter of, and tensors for it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Example", "Rule"]

_PIXELS_PER_LATENT = 8

Rule = str | Callable[["Example"], Any]
"""What to give for an argument: data of a shape (see `Example.data`), or what a function says."""


@dataclass(frozen=True)
class Example:
    """A call, whose sizes are attributes, as are the entries of the model's configuration."""

    module: Any
    batch: int
    height: int  # in latent pixels, as width
    width: int
    frames: int
    text: int  # tokens of text

    def __getattr__(self, name: str) -> Any:
        """An entry of the model's configuration; None if it has none."""
        return self.module.config.get(name)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens, of 2x2 pixels in all models that ask."""
        return self.height // 2, self.width // 2

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width of the picture."""
        return self.height * _PIXELS_PER_LATENT, self.width * _PIXELS_PER_LATENT

    @property
    def tokens(self) -> int:
        """Tokens of one frame."""
        return math.prod(self.grid)

    @property
    def sequence(self) -> int:
        """Tokens of a text and a picture."""
        return self.text + self.tokens

    @property
    def frames_of_tokens(self) -> int:
        return -(-self.frames // (self.patch_size_t or 1))

    @property
    def whole_frames(self) -> int:
        """As many frames as make whole tokens."""
        return self.frames_of_tokens * (self.patch_size_t or 1)

    @property
    def video_tokens(self) -> int:
        """Where each latent pixel is a token."""
        return self.frames * self.height * self.width

    @property
    def visual_channels(self) -> int:
        """Behind the channels, those of a picture that is given and of where it is."""
        return self.in_visual_dim * 2 + 1 if self.visual_cond else self.in_visual_dim

    def make(self, rule: Rule) -> Any:
        """What a rule says; None if the model has no such thing."""
        return self.data(rule) if isinstance(rule, str) else rule(self)

    def data(self, shape: str) -> Tensor | None:
        """Data `[B, ...]`; None if the model has no such axis.

        Args:
            shape: the axes after the first, which are numbers or names of attributes. "a|b" is the
                first of them that there is. "text cap_feat_dim" gives `[B, text, cap_feat_dim]`.
        """
        sizes = [self._size(axis) for axis in shape.split()]
        return None if None in sizes else self.tensor(*sizes)

    def _size(self, axis: str) -> Any:
        if axis.isdecimal():
            return int(axis)
        size = next((size for name in axis.split("|") if (size := getattr(self, name))), None)
        return size[0] if isinstance(size, tuple | list) else size  # one for each level

    def tensor(self, *shape: Any) -> Tensor:
        """Data `[B, ...]`."""
        return self.zeros(self.batch, *shape)

    def zeros(self, *shape: int) -> Tensor:
        like = next(p for p in self.module.parameters() if p.is_floating_point())
        # Models of diffusers know better: a few of their parameters may stay in full precision.
        dtype = getattr(self.module, "dtype", None) or like.dtype
        return torch.zeros(shape, device=like.device, dtype=dtype)

    def whole(self, *shape: int, value: int = 0) -> Tensor:
        """Integers `[B, ...]`."""
        device = next(self.module.parameters()).device
        return torch.full((self.batch, *shape), value, device=device, dtype=torch.int64)

    def known(self, values: Any) -> Tensor:
        """A tensor whose values a model can read even when it runs on shapes without data."""
        return torch.tensor(values, device=next(self.module.parameters()).device)

    def mask(self, tokens: int) -> Tensor:
        """A mask `[B, tokens]` that hides nothing."""
        return self.known([[True] * tokens] * self.batch)

    def count(self, stop: int, start: int = 0) -> Tensor:
        """start ... stop - 1."""
        return self.known(list(range(start, stop)))

    def counts(self, stop: int, start: int = 0) -> Tensor:
        """The same for each item, `[B, stop - start]`."""
        return self.count(stop, start).expand(self.batch, -1)
