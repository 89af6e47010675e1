"""Diffusion transformers of diffusers and ComfyUI: where their regions are, by rows of tables.

Blocks are never rewritten: their arguments are cut and their output is restored.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..regions import Block, Layer, Member, Role, Tokens, TransformerRoot
from ..settings import Settings
from .names import class_names, is_comfy, parameters
from .row import Blocks, Transformer
from .table import TRANSFORMERS
from .table_comfy import COMFY_TRANSFORMERS

__all__ = ["DEFAULTS", "find_row", "name_all", "sites"]

DEFAULTS: dict[str, Any] = {
    "target": "stack",
    "share": "level",
    "start": 0.0,
    "end": 0.5,
    "reuse_start": 0.5,
}
"""What options that depend on the kind of model are, unless they are given."""

_BY_NAME = {row.name: row for row in TRANSFORMERS}
_OF_COMFY = {row.name: row for row in COMFY_TRANSFORMERS}


def find_row(module: nn.Module) -> Transformer | None:
    rows = _OF_COMFY if is_comfy(module) else _BY_NAME
    return next((rows[name] for name in class_names(module) if name in rows), None)


def name_all() -> str:
    """The supported transformers, for people to read."""
    names = [row.name for row in TRANSFORMERS if not row.reason]
    short = [name.removesuffix("Model").removesuffix("Transformer2D") for name in names]
    short = [name.removesuffix("Transformer3D").removesuffix("Transformer") for name in short]
    comfy = [row.name for row in COMFY_TRANSFORMERS if not row.reason]
    return (
        f"diffusion transformers of Diffusers ({', '.join(short)}) and of ComfyUI "
        f"({', '.join(comfy)})"
    )


def sites(
    model: nn.Module, row: Transformer, settings: Settings
) -> Iterator[tuple[nn.Module, Role]]:
    """The blocks that merge and the model itself, with their roles."""
    runs = [(part, blocks) for part in row.lists for blocks in _runs(model, part)]
    chosen = _within(settings.depth, sum(len(blocks) for _, blocks in runs))
    before = 0
    for part, blocks in runs:
        run = [block for i, block in enumerate(blocks, before) if i in chosen]
        before += len(blocks)
        for block in run:
            alone = part.alone or settings.target == "block"
            first, last = block is run[0] or alone, block is run[-1] or alone
            yield from _block_sites(block, part, settings, first, last)
    names = tuple(parameters(model))
    paths = tuple(part.path for part in row.lists)
    root = TransformerRoot(names, row.time, row.layout, row.between, paths, len(chosen), row.coarse)
    yield model, root


def _runs(model: Any, part: Blocks) -> list[list[nn.Module]]:
    """The blocks of a list, in runs that hand their tokens on from one to the next."""
    blocks = list(getattr(model, part.path))
    end = len(blocks) - (model.config[part.anew] if part.anew else 0)
    return [run for run in (blocks[:end], blocks[end:]) if run]


def _within(depth: tuple[float, float] | None, blocks: int) -> range:
    """The blocks that a depth names; without one, all but the first and the last."""
    if depth is None:
        return range(1, blocks - 1) if blocks > 2 else range(blocks)
    inside = [i for i in range(blocks) if depth[0] * blocks <= i and i + 1 <= depth[1] * blocks]
    if not inside:
        raise ValueError(f"depth={depth!r}: holds none of the {blocks} blocks of this model")
    return range(inside[0], inside[-1] + 1)


def _block_sites(
    block: nn.Module, part: Blocks, settings: Settings, first: bool, last: bool
) -> Iterator[tuple[nn.Module, Role]]:
    tokens = part.tokens(block)
    if settings.whole_blocks:
        yield block, Member(tokens, first, last, reusable=True)
        return
    if part.attention:
        layer = getattr(block, part.attention)
        names = tuple(parameters(layer))
        along = tuple(a for a in part.along if a.name in names or "kwargs" in names)
        along = along if settings.target == "attn" else part.keys or ()
        inside = Tokens(names, names[0], along=along, refused=part.refused)
        yield layer, Layer(inside, "attn", "encoder_hidden_states")
        yield block, Block(tokens)
