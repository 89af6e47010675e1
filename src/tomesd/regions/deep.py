"""The levels of a UNet below its finest one, which some steps leave out."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..reuse import keep, recall
from ..state import Patch, current_scope
from .role import Inner, Role


@dataclass(frozen=True)
class Deep(Role):
    """A block on the way down, in the middle, or on the way up, below the finest level.

    At a step that reuses, none of them runs. The topmost one on the way up returns its output of an
    earlier step; the others return zeros of the right shapes, which only these blocks receive.
    (Ma et al., DeepCache, 2023.)
    """

    way: Literal["down", "middle", "up"]
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
        if self.way == "down":
            return _zeros_down(module, x)
        if not self.last:
            return x
        shape = torch.Size([x.shape[0], _channels(module), *scope.call.size])
        return recall(scope.call, "deep", shape, x)


def _zeros_down(module: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Zeros in place of a down block's output and of its skip connections."""
    batch, _, h, w = x.shape
    channels = _channels(module)
    kept = [x.new_zeros(()).expand(batch, channels, h, w)] * len(module.resnets)
    down = x.new_zeros(batch, channels, h, w)
    if module.downsamplers is not None:
        down = x.new_zeros(batch, channels, -(-h // 2), -(-w // 2))
        kept.append(down)
    return down, tuple(kept)


def _channels(module: Any) -> int:
    """Output channels of a block."""
    layer = module.resnets[-1]
    layer = getattr(layer, "spatial_res_block", layer)  # of video models
    return int(layer.out_channels)
