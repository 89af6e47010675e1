"""The parts that patched modules play. A role runs around the module's own forward.

    Root    the model: notes image size and timestep
      Stack   a stack of blocks: notes the grid
        Block   a transformer block: makes the plan from its input, and may run on merged tokens
          Norm    before self-attention: may merge what it gives, so that all of it is gone sooner
          Layer   attention or feed-forward: unmerge(layer(merge(x)))
            Projection   of attention: gets channels more for proportional attention

Roles are values: what they know of a module is the names and numbers in a host's table. They are
part of the generated class, so they can be pickled, and equal ones share a class.
"""

from .block import Block
from .layers import Layer, Norm, Projection
from .model import Root, Stack
from .role import Role, run_inside

__all__ = ["Block", "Layer", "Norm", "Projection", "Role", "Root", "Stack", "run_inside"]
