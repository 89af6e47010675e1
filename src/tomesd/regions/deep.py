"""What lies below the finest level of a UNet, which steps can leave out."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..reuse import keep, recall
from ..state import Patch, current_scope
from .role import Inner, Role


@dataclass(frozen=True)
class Deep(Role):
    """A part of the way down, to the middle, and up again to the finest level.

    At a step that reuses it, none of these parts runs. The last one, at the top, gives what it gave
    before. The others give zeros of the right shapes, which nothing but parts of it receive.
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
    """What a part of the way down hands on, and what it keeps for the way up."""
    batch, _, h, w = x.shape
    channels = _channels(module)
    kept = [x.new_zeros(()).expand(batch, channels, h, w)] * len(module.resnets)
    down = x.new_zeros(batch, channels, h, w)
    if module.downsamplers is not None:
        down = x.new_zeros(batch, channels, -(-h // 2), -(-w // 2))
        kept.append(down)
    return down, tuple(kept)


def _channels(module: Any) -> int:
    """Of what a part of a UNet gives."""
    layer = module.resnets[-1]
    layer = getattr(layer, "spatial_res_block", layer)  # in models of video
    return int(layer.out_channels)
