"""What some steps leave out in a UNet: the levels below its finest one, and attention there."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..reuse import keep, recall
from ..state import Patch, current_scope
from .role import Inner, Role


@dataclass(frozen=True)
class _BelowFinest(Role):
    """What lies below the finest level.

    At a step that reuses, none of it runs. The last module on the way up returns its output of an
    earlier step; the others return zeros of the right shapes, which only these modules receive.
    (Ma et al., DeepCache, 2023.)
    """

    last: bool = False

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        scope = current_scope(patch)
        if scope is None or scope.call.moment is None:
            return inner(*args, **kwargs)
        if not scope.call.reuses:
            output = inner(*args, **kwargs)
            if self.last:
                keep(scope.call, "deep", output)
            return output
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        if not self.last:
            return self.zeros(module, x, kwargs)
        shape = torch.Size([x.shape[0], _channels(module), *scope.call.size])
        return recall(scope.call, "deep", shape, x)

    @abstractmethod
    def zeros(self, module: Any, x: Tensor, kwargs: dict) -> Any:
        """Zeros in place of the module's output."""


@dataclass(frozen=True)
class DeepBlock(_BelowFinest):
    """A block of a UNet of diffusers: on the way down, in the middle, or on the way up."""

    way: Literal["down", "middle", "up"] = "up"

    def zeros(self, module: Any, x: Tensor, kwargs: dict) -> Any:
        """The output, and on the way down the skip connections too."""
        if self.way != "down":
            return x
        batch, _, h, w = x.shape
        channels = _channels(module)
        kept = [x.new_zeros(()).expand(batch, channels, h, w)] * len(module.resnets)
        down = x.new_zeros(batch, channels, h, w)
        if module.downsamplers is not None:
            down = x.new_zeros(batch, channels, -(-h // 2), -(-w // 2))
            kept.append(down)
        return down, tuple(kept)


@dataclass(frozen=True)
class DeepLayer(_BelowFinest):
    """A layer of a UNet of ldm, whose blocks are lists of layers."""

    way: Literal["down", "level", "up"] = "level"

    def zeros(self, module: Any, x: Tensor, kwargs: dict) -> Tensor:
        *_, h, w = x.shape
        if self.way == "down":
            h, w = -(-h // 2), -(-w // 2)
        elif self.way == "up":
            h, w = (kwargs.get("output_shape") or (2 * h, 2 * w))[-2:]
        return x.new_zeros(x.shape[0], _channels(module, x.shape[1]), h, w)


@dataclass(frozen=True)
class KeptAttention(Role):
    """Self-attention at the finest level, whose output the steps that leave out the rest use again.
    (Zhao et al., Real-Time Video Generation with Pyramid Attention Broadcast, 2024.)
    """

    name: str

    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        scope = current_scope(patch)
        if scope is None or scope.call.moment is None:
            return inner(*args, **kwargs)
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        if not scope.call.reuses:
            output = inner(*args, **kwargs)
            keep(scope.call, self.name, output.to(x.dtype))  # autocast makes it another one
            return output
        # The norm before it may have merged the tokens.
        plan = scope.plans.pop("attn", None)
        tokens = x.shape[1] if plan is None else plan.slot.shape[1]
        return recall(scope.call, self.name, torch.Size([x.shape[0], tokens, x.shape[2]]), x)


def _channels(module: Any, otherwise: int = 0) -> int:
    """Output channels of a block or layer."""
    layer = module.resnets[-1] if hasattr(module, "resnets") else module
    layer = getattr(layer, "spatial_res_block", layer)  # of video models
    return int(getattr(layer, "out_channels", otherwise))
