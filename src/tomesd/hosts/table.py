"""What a row of a host's table says."""

from dataclasses import dataclass

__all__ = ["Family"]


@dataclass(frozen=True)
class Family:
    """A code base, by the names of its classes. Subclasses of a named class count as it."""

    name: str
    """As users know it."""
    stacks: dict[str, str | None]
    """Classes that hold the blocks: name to where they keep the side of the patch that becomes a
    token (None: each pixel of the feature map is one). They take the feature map as their first
    argument, and their `transformer_blocks` work on image tokens."""
    layers: dict[str, str]
    """Layers of a block: attribute to kind."""
    aligned: dict[str, tuple[str, ...]]
    """Arguments of a layer that line up with its tokens: kind to names."""
    block: str = "BasicTransformerBlock"
