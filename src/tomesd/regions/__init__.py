"""Regions: the stretches of a model that run on fewer tokens.

A patched module plays a role, which runs around the module's own forward:

    UNetRoot, TransformerRoot   the whole model: reads image size and timestep, starts the call
      Stack       blocks of a UNet on one grid: reads the grid, decides what merges in them
      DeepBlock, DeepLayer   a part of a UNet below its finest level, which some steps leave out
        Member      a block in a run of blocks on merged tokens: the first one opens the region, the
                    last one closes it
        Block       a block whose layers merge separately: makes their plans
          Norm        the norm before self-attention: may merge its output early, to save memory
          Layer       attention or feed-forward: unmerge(layer(merge(x)))
            Projection   a linear layer of attention: adds channels for proportional attention
          KeptAttention   attention at the finest level, which some steps use again

Roles are immutable values made of names and numbers from a host's table, which can be pickled. They
are kept on the modules: those that play roles of one kind share a generated class.
"""

from .block import Block, Member
from .coarse import Coarse
from .deep import DeepBlock, DeepLayer, KeptAttention
from .layers import Layer, Norm, Projection
from .model import Stack, TransformerRoot, UNetRoot
from .role import Given, Role
from .tokens import Along, Tokens
