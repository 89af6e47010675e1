"""What a row of a host's table says."""

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "ALIGNED",
    "ATTENTION",
    "BLOCK",
    "CONTEXT",
    "INTERLEAVED",
    "LAYERS",
    "NORM",
    "PROJECTIONS",
    "UNFUSED",
    "Family",
]

# All families descend from one transformer block, and agree on its names.
BLOCK = "BasicTransformerBlock"

ATTENTION, NORM = "attn1", "norm1"
"""Self-attention of a block, and the norm before it."""

LAYERS = {ATTENTION: "attn", "attn2": "crossattn", "ff": "mlp"}
"""Layers of a block: attribute to kind."""

ALIGNED = {"attn": ("attention_mask", "mask"), "crossattn": ("ip_adapter_masks",)}
"""Arguments of a layer that line up with its tokens: kind to names."""

CONTEXT = ("encoder_hidden_states", "context")
"""What attention calls the parameter with what it attends to."""

UNFUSED = ("AttnProcessor", "SlicedAttnProcessor", "CustomDiffusionAttnProcessor")
"""Processors of attention that write its scores to memory."""

PROJECTIONS = ("to_q", "to_k", "to_v", "to_out")
"""Linear layers of attention, or what holds them."""

INTERLEAVED = "temporal_transformer_blocks"
"""Where a stack keeps blocks that run between the others, on the frames of a video."""


@dataclass(frozen=True)
class Family:
    """A code base, by the names of its classes. Subclasses of a named class count as it."""

    name: str
    """As users know it."""
    stacks: dict[str, str | None]
    """Classes that hold the blocks: name to where they keep the side of the patch that becomes a
    token (None: each pixel of the feature map is one). They take the feature map as their first
    argument, and their `transformer_blocks` work on image tokens."""
    direct: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Code of blocks that hands what `norm1` gives to `attn1` and to nothing else: the module that
    it is in, to the attributes that blocks have for which this is so."""
