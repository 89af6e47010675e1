"""Diffusion transformers: the rows of their tables, and the modules that a row names.

Blocks are never rewritten: their arguments are cut and their output is restored.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from ..layout import Layout
from ..regions import Along, Block, Coarse, Given, Layer, Member, Role, Tokens, TransformerRoot
from ..schedule import Timeline
from ..settings import Settings
from .layouts import LATENTS, from_image
from .names import parameters

DEFAULTS: dict[str, Any] = {
    "target": "stack",
    "share": "level",
    "start": 0.0,
    "end": 0.5,
    "reuse_start": 0.5,
}
"""Defaults of the options whose default depends on the kind of model."""

_UNET_OPTIONS = (
    *("max_downsample", "merge_attn", "merge_crossattn", "merge_mlp", "proportional"),
    *("level_ratios", "kind_ratios", "reuse_attention"),
)
"""Options that have no meaning on a transformer."""


@dataclass(frozen=True)
class Blocks(Tokens):
    """A list of blocks in a transformer, and how they get their tokens. `names` are the parameters
    of a block's forward if its signature does not name them."""

    path: str = ""
    """The model's attribute with the list."""
    alone: bool = False
    """Whether the model needs all tokens between the blocks, so that each merges by itself."""
    anew: str = ""
    """The configuration entry for how many blocks at the end begin with other tokens, and so form a
    run of their own."""
    attention: str = ""
    """A block's attribute with self-attention on image tokens only, which can merge alone."""
    keys: tuple[Along, ...] | None = None
    """Arguments of `attention` with a row for each key. None: it needs as many keys as queries."""

    def tokens(self, block: nn.Module) -> Tokens:
        said = {field.name: getattr(self, field.name) for field in fields(Tokens)}
        return Tokens(**{**said, "names": self.names or tuple(parameters(block))})

    def runs(self, model: Any) -> list[list[nn.Module]]:
        """The blocks of the list, in runs within which each passes its tokens to the next."""
        blocks = list(getattr(model, self.path))
        end = len(blocks) - (model.config[self.anew] if self.anew else 0)
        return [run for run in (blocks[:end], blocks[end:]) if run]

    def sites(
        self, block: nn.Module, settings: Settings, first: bool, last: bool
    ) -> Iterator[tuple[nn.Module, Role]]:
        """A block, or a layer in it and the block, with their roles.

        Args:
            first, last: whether it is the first or last block of its run on merged tokens.
        """
        tokens = self.tokens(block)
        if settings.whole_blocks:
            alone = self.alone or settings.target == "block"
            yield block, Member(tokens, first or alone, last or alone, reusable=True)
        elif self.attention:
            layer = getattr(block, self.attention)
            names = tuple(parameters(layer))
            along = tuple(a for a in self.along if a.name in names or "kwargs" in names)
            along = along if settings.target == "attn" else self.keys or ()
            inside = Tokens(names, names[0], along=along, refused=self.refused)
            yield layer, Layer(inside, "attn", "encoder_hidden_states")
            yield block, Block(tokens)


@dataclass(frozen=True)
class Transformer:
    """A row of the table, for one class of models."""

    name: str
    """The name of the class."""
    lists: tuple[Blocks, ...] = ()
    layout: Callable[[Any, Given], Layout] = from_image
    timeline: Timeline | Callable[[Any], Timeline] | None = None
    """Its timeline, or a function of the model that returns it. None: the scheduler's."""
    time: str = "timestep"
    between: tuple[str, ...] = ()
    """Arguments that add something to all tokens between the blocks, or skip blocks."""
    coarse: Coarse | None = None
    """How to run it on a coarser image, if that is known."""
    text: int = 512
    """Text tokens that its pipeline makes, for example inputs."""
    reason: str = ""
    """Why tokens cannot be merged in it; empty if they can."""

    @property
    def flow(self) -> bool:
        """Whether all models of the class are known to be rectified flows."""
        return isinstance(self.timeline, Timeline) and self.timeline.flow

    @property
    def targets(self) -> tuple[str, ...]:
        attention = any(part.attention for part in self.lists)
        keys = any(part.keys is not None for part in self.lists)
        return ("stack", "block", *["attn"] * attention, *["kv"] * keys)

    def check_options(self, settings: Settings) -> None:
        """Refuses options that have no meaning on this model."""
        latent = LATENTS[self.layout]
        settings.refuse(_UNET_OPTIONS, self.name)
        if settings.target not in (None, *self.targets):
            allowed = ", ".join(map(repr, self.targets))
            raise ValueError(f"target={settings.target!r}: a {self.name} allows one of {allowed}")
        if settings.st != 1 and not latent.frames:
            settings.refuse(["st"], self.name, ": its blocks see single images")
        if not latent.references:
            settings.refuse(["reference_ratio"], self.name, ": it takes no reference images")
        if settings.coarse and self.coarse is None:
            settings.refuse(["coarse"], self.name)
        if settings.metric == "keys":
            settings.refuse(["metric"], self.name)
        if settings.metric == "clean" and not self.flow:
            raise ValueError(
                f"metric='clean': a {self.name} is no rectified flow that is told its noise level"
            )
        if isinstance(settings.protect, str):
            raise ValueError(
                f"protect={settings.protect!r}: a {self.name} allows a mask [h, w] only"
            )

    def sites(self, model: nn.Module, settings: Settings) -> Iterator[tuple[nn.Module, Role]]:
        """The blocks that merge and the model itself, with their roles."""
        runs = [(part, run) for part in self.lists for run in part.runs(model)]
        chosen = _within(settings.depth, sum(len(run) for _, run in runs))
        before = 0
        for part, blocks in runs:
            run = [block for i, block in enumerate(blocks, before) if i in chosen]
            before += len(blocks)
            for block in run:
                yield from part.sites(block, settings, block is run[0], block is run[-1])
        yield (
            model,
            TransformerRoot(
                names=tuple(parameters(model)),
                time=self.time,
                read=self.layout,
                between=self.between,
                lists=tuple(part.path for part in self.lists),
                merging=len(chosen),
                coarse=self.coarse,
            ),
        )


def _within(depth: tuple[float, float] | None, blocks: int) -> range:
    """The blocks within a depth; without one, all but the first and the last."""
    if depth is None:
        return range(1, blocks - 1) if blocks > 2 else range(blocks)
    first, end = (round(share * blocks, 6) for share in depth)  # (1 / 49) * 49 is less than 1
    inside = [i for i in range(blocks) if first <= i and i + 1 <= end]
    if not inside:
        raise ValueError(f"depth={depth!r}: holds none of the {blocks} blocks of this model")
    return range(inside[0], inside[-1] + 1)
