"""The levels of UNets, in diffusers and in ldm."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..regions import DeepBlock, DeepLayer, Role
from .names import class_names

LEVELLED = (
    "UNet2DConditionModel",
    "UNetMotionModel",
    "UNet3DConditionModel",
    "UNetSpatioTemporalConditionModel",
)
"""Models of diffusers whose levels are in `down_blocks`, `mid_block` and `up_blocks`."""


def has_levels(module: Any) -> bool:
    """Whether it is a UNet, of diffusers or ldm, with more than one level."""
    if any(name in LEVELLED for name in class_names(module)):
        return len(module.up_blocks) > 1
    if not hasattr(module, "output_blocks"):  # not even a UNet
        return False
    return any(_is_named(layer, "Downsample") for layer in _layers(module.input_blocks))


def deep_sites(module: Any) -> Iterator[tuple[nn.Module, Role]]:
    """The parts of a UNet below its finest level, which `reuse` lets steps leave out."""
    if hasattr(module, "input_blocks"):
        yield from _deep_layers(module)
        return
    for block in module.down_blocks[1:]:
        yield block, DeepBlock(way="down")
    if module.mid_block is not None:
        yield module.mid_block, DeepBlock(way="middle")
    *deeper, top = module.up_blocks[:-1]
    for block in deeper:
        yield block, DeepBlock()
    yield top, DeepBlock(last=True)


def _deep_layers(module: Any) -> Iterator[tuple[nn.Module, Role]]:
    """The same for UNets of ldm. In each of their blocks, layers run one after the other."""
    way_down, way_up = _layers(module.input_blocks), _layers(module.output_blocks)
    first = next(i for i, layer in enumerate(way_down) if _is_named(layer, "Downsample"))
    top = max(i for i, layer in enumerate(way_up) if _is_named(layer, "Upsample"))
    for layer in (*way_down[first:], *(module.middle_block or ()), *way_up[:top]):
        down, up = _is_named(layer, "Downsample"), _is_named(layer, "Upsample")
        yield layer, DeepLayer(way="down" if down else "up" if up else "level")
    yield way_up[top], DeepLayer(last=True)


def _layers(blocks: Any) -> list[nn.Module]:
    return [layer for block in blocks for layer in block]


def _is_named(module: nn.Module, name: str) -> bool:
    return name in class_names(module)
