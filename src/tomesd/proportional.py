"""Proportional attention: a merged token counts as many times as there are tokens in it.

That is adding log(size) to the logits of its key. A mask would do, but no flash kernel takes one.
So each head gets channels more: 1 in the queries, the logarithm in the keys, 0 in the values, and
they are cut off again before the output projection. (Bolya et al., Token Merging, 2022, section 3.)
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .compiler import constant_when_traced

Part = Literal["to_q", "to_k", "to_v", "to_out"]

# Flash kernels want a head's channels to be a multiple of it.
_EXTRA = 8

# Where attention takes the scale of its logits from: the width of what it is given, or its own
# `scale`. Processors of diffusers, and classes of those that have no processor.
_SCALED_BY_WIDTH = {
    "AttnProcessor2_0": True,
    "AttnProcessor": False,
    "XFormersAttnProcessor": False,
}


@dataclass(frozen=True)
class Proportion:
    """What the projections of one attention add."""

    log_size: Tensor
    """Of each key's slot, `[B, M]`."""
    heads: int
    by_width: bool
    """Whether the logits are scaled by the width of a head, which grows here."""

    def project(self, part: Part, module_forward: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs a projection on `x` `[B, N, C]` with the channels that are added."""
        if part == "to_out":
            return module_forward(self._narrow(x), *args, **kwargs)
        return self._widen(part, module_forward(x, *args, **kwargs))

    def _narrow(self, x: Tensor) -> Tensor:
        return self._heads(x)[..., :-_EXTRA].flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1)

    def _widen(self, part: Part, x: Tensor) -> Tensor:
        heads = self._heads(x)
        extra = heads.new_zeros(*heads.shape[:2], 1, _EXTRA)
        if part == "to_q":
            extra[..., 0] = 1
        elif part == "to_k":
            width = heads.shape[3]
            scale = (width + _EXTRA if self.by_width else width) ** -0.5
            heads = heads * (width**-0.5 / scale)  # not the queries: there may be more of them
            extra[..., 0] = (self.log_size / scale)[..., None].to(extra.dtype)
        return torch.cat([heads, extra.expand(-1, -1, self.heads, -1)], dim=3).flatten(2)


def proportion_of(attention: nn.Module, size: Tensor) -> "Proportion | str":
    """What to add in an attention layer whose keys stand for `size` `[B, M]` tokens.

    Returns:
        Or why that cannot be done.
    """
    heads = getattr(attention, "heads", None)
    if not isinstance(heads, int) or not all(
        isinstance(getattr(attention, name, None), nn.Module)
        for name in ("to_q", "to_k", "to_v", "to_out")
    ):
        return "its projections are not to_q, to_k, to_v and to_out"
    if getattr(attention, "fused_projections", False):
        return "its projections are fused"
    if getattr(attention, "norm_q", None) is not None:
        return "it normalises its queries"
    if "MemoryEfficientCrossAttention" in [cls.__name__ for cls in type(attention).__mro__]:
        return "its heads have a fixed width"
    processor = getattr(attention, "processor", None)
    if processor is not None:
        name = type(processor).__name__
        if name not in _SCALED_BY_WIDTH:
            return f"its processor is a {name}"
        by_width = _SCALED_BY_WIDTH[name]
    else:
        by_width = getattr(attention, "scale", None) is None or _is_fused(attention)
    if not by_width:
        width = _linear(attention.to_q).out_features // heads
        if not math.isclose(attention.scale, width**-0.5):  # type: ignore[arg-type]
            return "the scale of its logits is its own"
    return Proportion(size.float().log(), heads, by_width)


@constant_when_traced
def _is_fused(attention: nn.Module) -> bool:
    """Whether the layer's own code calls PyTorch's attention, which scales by width."""
    for cls in type(attention).__mro__:
        forward = cls.__dict__.get("forward")
        # Ours, around it, wraps the one that it runs.
        forward = getattr(forward, "__wrapped__", forward)
        if forward is not None:
            return "scaled_dot_product_attention" in forward.__code__.co_names
    return False


def _linear(module: Any) -> Any:
    """The linear layer in an adapter around one."""
    return getattr(module, "base_layer", module)
