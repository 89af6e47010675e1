"""What a row of the table of diffusion transformers says."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ..policy import Layout
from ..regions import Along, Given, Tokens
from ..schedule import Timeline
from ..settings import Settings
from .layouts import (
    from_cogvideox,
    from_flux2,
    from_hunyuan_video,
    from_ids,
    from_image,
    from_ltx,
    from_qwen,
    from_video,
)
from .layouts_comfy import from_comfy_image, from_comfy_video
from .names import parameters

__all__ = ["Blocks", "Transformer"]

_UNET_OPTIONS = (
    ("max_downsample", None),
    ("merge_attn", True),
    ("merge_crossattn", False),
    ("merge_mlp", False),
    ("proportional", False),
    ("level_ratios", None),
    ("kind_ratios", None),
)
"""Options that mean nothing on a transformer, and what they are when they are not used."""


_OF_VIDEOS = (from_video, from_hunyuan_video, from_cogvideox, from_ltx, from_comfy_video)
_WITH_REFERENCES = (from_ids, from_flux2, from_qwen, from_comfy_image)


@dataclass(frozen=True)
class Blocks:
    """A list of blocks in a transformer; see `Tokens`."""

    path: str
    input: str = "hidden_states"
    output: int | None = None
    joint: bool = False
    text: Literal["before", "after", "ragged"] = "before"
    along: tuple[Along, ...] = ()
    refused: tuple[str, ...] = ()
    alone: bool = False
    """Whether something needs all tokens between the blocks, so that each merges by itself."""
    attention: str = ""
    """Self-attention of a block, if it takes image tokens only, and can merge on its own."""
    in_place: bool = False
    names: tuple[str, ...] = ()
    """Parameters of a block, where its forward does not name them."""

    def tokens(self, block: nn.Module) -> Tokens:
        names = self.names or tuple(parameters(block))
        return Tokens(
            names,
            self.input,
            self.output,
            self.joint,
            self.text,
            self.along,
            self.refused,
            self.in_place,
        )


@dataclass(frozen=True)
class Transformer:
    """What is to be known of one class of models."""

    name: str
    """Of the class."""
    lists: tuple[Blocks, ...] = ()
    layout: Callable[[Any, Given], Layout] = from_image
    timeline: Timeline | None = None
    """How its times run. None: as the scheduler says."""
    time: str = "timestep"
    between: tuple[str, ...] = ()
    """Arguments that add something to all tokens between the blocks, or pass blocks by."""
    reason: str = ""
    """Why tokens cannot be merged in it."""

    @property
    def targets(self) -> tuple[str, ...]:
        attention = any(part.attention for part in self.lists)
        return ("stack", "block", "attn") if attention else ("stack", "block")

    def check_options(self, settings: Settings) -> None:
        """Refuses options that mean nothing on this model."""
        for name, unused in _UNET_OPTIONS:
            value = getattr(settings, name)
            if value != unused:
                raise ValueError(f"{name}={value!r}: means nothing on a {self.name}")
        if settings.target not in (None, *self.targets):
            allowed = ", ".join(map(repr, self.targets))
            raise ValueError(f"target={settings.target!r}: a {self.name} allows one of {allowed}")
        if settings.st not in (None, 1) and self.layout not in _OF_VIDEOS:
            raise ValueError(
                f"st={settings.st!r}: means nothing on a {self.name}: it has no frames"
            )
        if settings.reference_ratio is not None and self.layout not in _WITH_REFERENCES:
            raise ValueError(
                f"reference_ratio={settings.reference_ratio!r}: means nothing on a {self.name}: it "
                "takes no reference images"
            )
        if settings.metric == "keys":
            raise ValueError(f"metric='keys': a {self.name} allows 'input', 'mean' or 'previous'")
        if isinstance(settings.protect, str):
            raise ValueError(
                f"protect={settings.protect!r}: a {self.name} allows a mask [h, w] only"
            )
