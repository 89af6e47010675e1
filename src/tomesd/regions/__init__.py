"""Regions: the stretches of a model that run on fewer tokens.

A patched module plays a role, which runs around its own forward:

    UNetRoot, TransformerRoot   the model: reads image size and time, and makes the call's scope
      Stack       of a UNet: reads the grid, and decides what merges in its blocks
      Deep        of a UNet: a part below the finest level, which steps can leave out
        Member      a block in a run of blocks on merged tokens: the first opens the region, the
                    last closes it
        Block       a block whose layers merge each by itself: makes their plans
          Norm        before self-attention: may merge what it gives, so that it is gone sooner
          Layer       attention or feed-forward: unmerge(layer(merge(x)))
            Projection   of attention: gets channels more for proportional attention

Roles are values: what they know of a module is the names and numbers in a host's table. They are
part of the generated class, so they can be pickled, and equal ones share a class.
"""

from .block import Block, Member
from .coarse import Coarse
from .deep import Deep
from .layers import Layer, Norm, Projection
from .model import Stack, TransformerRoot, UNetRoot
from .role import Given, Role
from .tokens import Along, Tokens

__all__ = [
    "Along",
    "Block",
    "Coarse",
    "Deep",
    "Given",
    "Layer",
    "Member",
    "Norm",
    "Projection",
    "Role",
    "Stack",
    "Tokens",
    "TransformerRoot",
    "UNetRoot",
]
