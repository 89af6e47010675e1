"""What a patched model knows while it runs.

`Patch` belongs to a model, `Call` to one call of it, and `Scope` says where in that call a thread
is. A scope is not changed once it is entered, but for the plans that layers take out and the region
that a run of blocks opens and closes. Scopes belong to threads, so threads can share a model; one
can be kept and entered again later, which is what gradient checkpointing needs.
"""

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .compiler import Named, around_graphs, constant_when_traced, find_named, outside_graphs
from .kept import Kept
from .outline import Outline
from .plan import MergePlan
from .proportional import Proportion
from .rule import LeftAlone, Verdict
from .schedule import Timeline
from .segments import Segment, tokens_removed
from .selectors import SELECTORS, Selector
from .settings import MergeWarning, Settings
from .steps import Moment, Steps

Grid = tuple[int, int, int]
"""Frames, rows and columns of tokens. An image has one frame."""


@dataclass(eq=False)
class Patch(Named):
    """What all patched modules of one model share."""

    settings: Settings
    """All that depends on the kind of model filled in."""
    asked: Settings
    """As the user gave them."""
    rooted: bool
    """Whether a model around the blocks notes image size and timestep."""
    timeline: Timeline = field(default_factory=Timeline)
    outline: Outline = field(default_factory=Outline)
    """What the model does, for the rule `when="if_faster"`."""
    selector: Selector | None = None
    """What groups tokens instead of what the settings name."""
    by_selector: dict[str, Settings] = field(init=False)
    """The settings with each of the selectors that the schedule names."""
    observer: "Callable[[Scope, nn.Module, MergePlan], None] | None" = None
    """Told about the plan of each block or region."""
    kept: Kept = field(default_factory=Kept)
    decisions: "tuple[Decision, ...]" = ()
    """Of the last call."""
    coarse: bool = False
    """Whether the last call ran on a coarser image."""
    known: dict[Any, Any] = field(default_factory=dict)
    """See `once`."""
    warned: set[str] = field(default_factory=set)
    steps: Steps = field(default_factory=Steps)

    def __post_init__(self) -> None:
        super().__init__()
        self.by_selector = {
            name: replace(self.settings, selector=name) for name in self.settings.selectors
        }

    def __reduce__(self) -> tuple[Any, ...]:
        own = (self.settings, self.asked, self.rooted, self.timeline, self.outline)
        return Patch, own

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returned when this key was first asked for."""
        with suppress(KeyError):
            return self.known[key]
        if len(self.known) >= 64:
            self.known.clear()
        found = self.known[key] = make()
        return found

    def warn_once(self, message: str) -> None:
        _warn_once(self.name, message)


@constant_when_traced  # so compiled models warn too
def _warn_once(name: str, message: str) -> None:
    patch: Patch = find_named(name)
    if message not in patch.warned:
        patch.warned.add(message)
        warnings.warn(message, MergeWarning, stacklevel=2)


@dataclass(eq=False)
class Decision:
    """What merges in the blocks that work on one grid, decided before the first of them runs."""

    grid: Grid
    blocks: int
    tokens: int
    """Image tokens: those of the grid, and of references."""
    segments: dict[tuple[str, ...], tuple[Segment, ...]] = field(default_factory=dict)
    """What they are made of and how many can go, by the kinds of layers that have a plan in
    common."""
    left_alone: LeftAlone = ""
    """Why nothing merges, although something could."""
    level: int = 1
    """How many times smaller than the latent the grid is."""
    first: int | None = 0
    """Tokens before those of the image that is made; None: nobody knows."""
    start: Tensor | None = None
    """Where the image's tokens begin in a joint sequence, `[B]`, if items differ in that."""
    number: int = 0
    """Of the decision in the call."""
    merging: int = 0
    """Blocks or regions that have begun to merge."""

    @property
    def merges(self) -> bool:
        return len(self.segments) > 0 and self.left_alone == ""

    @property
    def remove(self) -> int:
        """The most tokens that any layer removes."""
        if not self.merges:
            return 0
        return max([tokens_removed(parts) for parts in self.segments.values()])


@dataclass(eq=False)
class Cut:
    """Arguments of blocks that lie along the tokens, cut by a plan."""

    plan: MergePlan
    given: list[tuple[Any, Any]]
    """The `Along` of each argument, and its value before it was cut."""
    starts: list[int | Tensor | None]
    """Where the image's rows begin in each."""
    along: dict[str, Any]
    """See `OpenRegion`."""


@dataclass(eq=False)
class Call:
    """One call of the model."""

    patch: Patch
    settings: Settings
    size: tuple[int, int]
    """Height and width of the latent."""
    timestep: Tensor | None = None
    """`[]` or `[T]`, falling from noise to image."""
    ratio: float | None = None
    """The ratio of this call, if it changes from call to call; 0: nothing merges."""
    moment: Moment | None = None
    """Whether this call runs its regions or reuses what they gave; None if they keep nothing."""
    coarse: bool = False
    """Whether the model runs on a coarser image."""
    apart: bool = False
    """Whether every block has to give all tokens back, because something else wants them."""
    fullness: float = 1.0
    """How many times as many items the call would have with both halves of guidance in it."""
    verdict: Verdict | None = None
    """What the rule expects of merging in this call."""
    left_alone: dict[int, LeftAlone] | None = None
    """What the rule says about each level of a UNet."""
    decisions: list[Decision] = field(default_factory=list)
    plans: list[tuple[Any, MergePlan]] = field(default_factory=list)
    """Plans made so far, with what they are for."""
    cuts: list[Cut] = field(default_factory=list)
    """Arguments cut so far."""
    masks: list[tuple[Any, Tensor]] = field(default_factory=list)
    """Tokens to protect, by grid."""
    clean: Tensor | None = None
    """Tokens of the image that the last step led to expect, `[B, N, C]`."""
    guided: tuple[Tensor, Tensor] | None = None
    """Where the prompt made a difference at the step before `[b, h, w]`, and whether that was a
    step of the same image `[]`."""

    @property
    def selector(self) -> Selector:
        """What groups tokens in this call."""
        return self.patch.selector or SELECTORS[self.settings.selector]

    @property
    def cuts_in_common(self) -> list[Cut] | None:
        """`cuts`, where a block may depend on what was cut for another."""
        return None if self.apart or torch.compiler.is_compiling() else self.cuts

    @property
    def reuses(self) -> bool:
        """Whether the regions of this call do not run."""
        return self.moment is not None and self.moment.reuses

    def times(self, batch: int) -> Tensor | None:
        """The timesteps of a batch: one for all of its items, or one for each."""
        if self.timestep is not None and batch % self.timestep.numel():
            return self.timestep.reshape(-1)[:1]
        return self.timestep


@dataclass(eq=False)
class OpenRegion:
    """A run of blocks, between its first and its last."""

    plan: MergePlan | None
    """How its tokens are merged; None: they are not, and it is open to keep what it gives."""
    x: Tensor
    """The tokens that came in, `[B, N, C]`."""
    merged: Tensor
    """The same merged, `[B, M, C]`."""
    along: dict[str, Any]
    """Arguments of the blocks that have a row for each token, cut, by name."""
    place: str
    other: Tensor | None = None
    """The tokens of the text that came in, `[B, T, C]`, if the blocks change them."""


@dataclass(eq=False)
class Scope:
    """Where in a call of the model a thread is."""

    call: Call
    decided: Decision | None = None
    """Inside a stack of blocks: what was decided for it."""
    plans: dict[str, MergePlan] = field(default_factory=dict)
    """Inside a block: what its layers merge by, kind to plan; each layer takes out its own."""
    place: str = ""
    """Of the block in the model."""
    early: bool = False
    """Whether the norm before self-attention merges, so that the layer itself need not."""
    region: OpenRegion | None = None
    """The region that is open now."""
    proportion: Proportion | None = None
    """Inside attention, if it is proportional."""

    @property
    def patch(self) -> Patch:
        return self.call.patch

    @property
    def settings(self) -> Settings:
        return self.call.settings

    @property
    def decision(self) -> Decision:
        """What was decided for the blocks that it is in."""
        assert self.decided is not None
        return self.decided

    @property
    def grid(self) -> Grid:
        return self.decision.grid

    def next_place(self) -> str:
        """Names the block or region that begins to merge, the same at every step."""
        self.decision.merging += 1
        return f"{self.decision.number}_{self.decision.merging - 1}"


class _Thread(threading.local):
    def __init__(self) -> None:  # runs once in each thread
        self.scope: Scope | None = None


_thread = _Thread()


def current_scope(patch: Patch) -> Scope | None:
    """Where this thread is, if that is in a model with this patch."""
    scope = _thread.scope
    return scope if scope is not None and scope.call.patch is patch else None


@outside_graphs
def is_idle(patch: Patch) -> bool:
    """Whether this thread is in blocks that merge nothing. Quick: most layers ask."""
    scope = _thread.scope
    if scope is None or scope.decided is None:
        return False
    idle = not scope.decided.merges and scope.call.moment is None
    return idle and scope.call.patch is patch


@around_graphs
def run_inside(scope: Scope | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `function` with `scope` as the current one, whichever thread this is."""
    before = _thread.scope
    _thread.scope = scope
    try:
        return function(*args, **kwargs)
    finally:
        _thread.scope = before


def refuse_outside(patch: Patch, module: nn.Module) -> None:
    """Raises an error if a model around `module` should have noted where it is."""
    if patch.rooted:
        raise RuntimeError(
            f"a {type(module).__name__} patched by tomesd ran outside its model's forward, where "
            "image size and timestep are unknown; call the model, or remove_patch() first"
        )
