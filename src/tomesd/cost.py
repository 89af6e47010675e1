"""When changes pay: a model takes as long as its device or its host does, whichever is slower.

So merging is judged for the model as a whole: it pays where that time falls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .machine import Machine


@dataclass(frozen=True)
class Work:
    """What a part of a model takes in a call."""

    device: float = 0.0
    """Seconds."""
    launches: float = 0.0
    """What the host does, in what it takes to start one kernel of PyTorch."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.device + other.device, self.launches + other.launches)

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.device - other.device, self.launches - other.launches)

    def __mul__(self, share: float) -> "Work":
        return Work(share * self.device, share * self.launches)

    def seconds(self, machine: Machine) -> float:
        host = self.launches * machine.launch
        return max(self.device, host) if machine.apart else self.device + host


@dataclass(frozen=True)
class Verdict:
    """Where merging pays, and what is expected of it."""

    pays: tuple[bool, ...]
    before: float
    """Seconds of a call without merging."""
    after: float
    """With it, where it pays."""
    everywhere: float
    """With it, also where it does not pay."""

    @property
    def gain(self) -> float:
        """How many times as fast a call is expected to be."""
        return self.before / self.after


def compare(machine: Machine, model: Work, changes: Sequence[tuple[Work, Work]]) -> Verdict:
    """Which changes make a model faster, each on top of those before it.

    Args:
        model: all that it does unchanged.
        changes: for each, what a part of the model does without it and with it.
    """
    changed, pays = model, []
    for old, new in changes:
        more = changed + (new - old)
        pays.append(bool(more.seconds(machine) < changed.seconds(machine)))
        changed = more if pays[-1] else changed
    return expect(machine, model, changes, tuple(pays))


def expect(
    machine: Machine, model: Work, changes: Sequence[tuple[Work, Work]], pays: tuple[bool, ...]
) -> Verdict:
    """What is expected of a decision; see `compare`."""
    after = everywhere = model
    for (old, new), pay in zip(changes, pays, strict=True):
        everywhere += new - old
        after = after + (new - old) if pay else after
    works = (model, after, everywhere)
    return Verdict(pays, *[work.seconds(machine) for work in works])
