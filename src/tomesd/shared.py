"""What all patched modules of one model share, from one call of the model to the next."""

import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .kept import Kept
from .schedule import Noise, ratio_at
from .settings import MergeWarning, Settings

__all__ = ["Idle", "LeftAlone", "Patch", "Planner", "ScoreHeads"]

Planner = Callable[[Any, Tensor, int], Any]
"""Makes a plan of a block from its frame, its input `[B, N, C]` and the tokens to remove."""

LeftAlone = Literal["", "not faster", "pays in CUDA graphs only"]
"""Why blocks are not merged that could be: merging costs more than it saves, or does so because the
host has to launch the kernels. Empty: they are merged."""

ScoreHeads = Callable[[], int]
"""Tells how many heads a block's self-attention has, 0 if it is fused."""


@dataclass(frozen=True)
class Idle:
    """What made a call merge nothing, so that others like it need not find that out again."""

    grids: frozenset[tuple[int, int]]
    """Of its stacks: one that was passed by may merge next time."""
    asked: tuple[tuple[ScoreHeads, int], ...]
    """What blocks told about their attention, which may be exchanged."""


_patches: "WeakValueDictionary[str, Patch]" = WeakValueDictionary()


@dataclass(eq=False)
class Patch:
    """What all patched modules of one model share."""

    settings: Settings
    rooted: bool
    """Whether a model around the blocks notes image size and timestep."""
    planner: Planner
    noise: Noise = field(default_factory=Noise)
    blocks: int = 1
    """Transformer blocks in the model."""
    kept: Kept = field(default_factory=Kept)
    known: dict[Any, Any] = field(default_factory=dict)
    """What has been found out about shapes: tokens to remove, and why not to."""
    idle: dict[Any, Idle] = field(default_factory=dict)
    """Calls of the model that merged nothing, by what they were like."""
    warned: set[str] = field(default_factory=set)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """By which functions find it that are constant to the compiler, and take constants alone."""

    def __post_init__(self) -> None:
        _patches[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Patch, (self.settings, self.rooted, self.planner, self.noise, self.blocks)

    def warn_once(self, message: str) -> None:
        _warn_once(self.name, message)

    @property
    def pays(self) -> bool | None:
        """Whether merging pays in any block that has run so far; None if nobody has asked yet."""
        reasons = [known for known in self.known.values() if isinstance(known, str)]
        return "" in reasons if reasons else None

    def known_idle(self, kind: Any) -> Idle | None:
        """What is known of calls of this kind, if they merge nothing."""
        idle = self.idle.get(kind)
        if idle is None or any(heads() != told for heads, told in idle.asked):
            return None
        return idle

    def ratio_at(self, timestep: Any) -> float:
        """What the ratio is at a timestep: a number, or a tensor `[]` or `[T]`."""
        return float(_ratio_at(self.name, timestep))


def _warn_once(name: str, message: str) -> None:
    patch = _patches[name]
    if message not in patch.warned:
        patch.warned.add(message)
        warnings.warn(message, MergeWarning, stacklevel=2)


# Constant to the compiler, so that it runs when the model is traced: compiled models warn too.
# See kept.py.
_warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _ratio_at(name: str, timestep: Any) -> str:
    patch = _patches[name]
    if isinstance(timestep, Tensor):
        if timestep.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "schedule, start, end, tau: how many tokens are merged depends on the timestep, "
                "which a CUDA graph cannot read; capture a graph for each ratio"
            )
        timestep = timestep.float().mean().item()
    return repr(ratio_at(float(timestep), patch.settings, patch.noise))


# The compiler does not look into it, and compiles what follows for each ratio, which comes as a
# word because numbers that change would become variables. This is torch.compiler.disable.
_ratio_at._torchdynamo_disable = True  # type: ignore[attr-defined]
