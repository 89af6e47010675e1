"""What a row of the table of diffusion transformers says."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn

from ..layout import Layout
from ..regions import Along, Coarse, Given, Tokens
from ..schedule import Timeline
from ..settings import Settings
from . import layouts, layouts_comfy
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


_OF_VIDEOS = (
    layouts.from_video,
    layouts.from_hunyuan_video,
    layouts.from_frames_first,
    layouts.from_channels_last,
    layouts.from_ltx,
    layouts_comfy.from_comfy_video,
)
_WITH_REFERENCES = (
    layouts.from_ids,
    layouts.from_flux2,
    layouts.from_flux3,
    layouts.from_qwen,
    layouts.from_bria_fibo2,
    layouts.from_joy_image_plus,
    layouts_comfy.from_comfy_image,
)


@dataclass(frozen=True)
class Blocks:
    """A list of blocks in a transformer; see `Tokens`."""

    path: str
    input: str = "hidden_states"
    output: int | None = None
    joint: bool = False
    text: Literal["before", "after", "ragged"] = "before"
    along: tuple[Along, ...] = ()
    other: str = "encoder_hidden_states"
    refused: tuple[str, ...] = ()
    tokens_first: bool = False
    after_with: str = ""
    alone: bool = False
    """Whether something needs all tokens between the blocks, so that each merges by itself."""
    anew: str = ""
    """The entry of the configuration that says how many blocks at the end begin with other tokens,
    and so are a run of their own."""
    attention: str = ""
    """Self-attention of a block, if it takes image tokens only, and can merge on its own."""
    keys: tuple[Along, ...] | None = None
    """Arguments of `attention` with a row for each key. None: it needs as many keys as queries."""
    in_place: bool = False
    names: tuple[str, ...] = ()
    """Parameters of a block, where its forward does not name them."""

    def tokens(self, block: nn.Module) -> Tokens:
        said = {field.name: getattr(self, field.name) for field in fields(Tokens)}
        return Tokens(**{**said, "names": self.names or tuple(parameters(block))})


@dataclass(frozen=True)
class Transformer:
    """What is to be known of one class of models."""

    name: str
    """Of the class."""
    lists: tuple[Blocks, ...] = ()
    layout: Callable[[Any, Given], Layout] = layouts.from_image
    timeline: Timeline | Callable[[Any], Timeline] | None = None
    """How its times run, for all models or for one. None: as the scheduler says."""
    time: str = "timestep"
    between: tuple[str, ...] = ()
    """Arguments that add something to all tokens between the blocks, or pass blocks by."""
    coarse: Coarse | None = None
    """How it is run on a coarser image, if that is known."""
    reason: str = ""
    """Why tokens cannot be merged in it."""

    @property
    def flow(self) -> bool:
        """Whether all models of the class are known to go straight from noise to image."""
        return isinstance(self.timeline, Timeline) and self.timeline.flow

    @property
    def targets(self) -> tuple[str, ...]:
        attention = any(part.attention for part in self.lists)
        keys = any(part.keys is not None for part in self.lists)
        return ("stack", "block", *["attn"] * attention, *["kv"] * keys)

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
        if settings.coarse and self.coarse is None:
            raise ValueError(f"coarse={settings.coarse!r}: means nothing on a {self.name}")
        if settings.metric == "keys":
            raise ValueError(f"metric='keys': means nothing on a {self.name}")
        if settings.metric == "clean" and (not self.flow):
            raise ValueError(f"metric='clean': a {self.name} is no rectified flow")
        if isinstance(settings.protect, str):
            raise ValueError(
                f"protect={settings.protect!r}: a {self.name} allows a mask [h, w] only"
            )
