"""Which steps of an image run a region, and which use what it gave before."""

import threading
from dataclasses import dataclass, field

from .settings import Settings

MOST_CALLS = 8
"""Calls at one time that are told apart. If there are more, they make other images, as with models
that take a single step, or parts of one image, such as the views of a panorama."""

_ROUNDING = 0.02
"""How far a part of the way may be off, as a share of it: times may be in half precision."""

_LONGER = 1.3
"""How many times as long as the one before it the last step may be: few steps of LCM are uneven."""


@dataclass(frozen=True)
class Moment:
    """A call of the model, as one of the calls that make an image."""

    nth: int = 0
    """Of the calls at the same time. Guidance may make two, with and without the prompt."""
    reuses: bool = False
    """Whether regions are left out, and their tokens get what they gained before."""
    first: bool = True
    """Whether no region has run for this image yet."""


@dataclass
class Steps(threading.local):
    """The calls of a model in the order they come, told apart by their times alone.

    Times fall while an image is made: a time that rises begins another. Each thread counts its own.
    """

    time: float = float("-inf")
    """Of the last call; minus infinity before the first."""
    progress: float = 0.0
    """Of the last call, 0 (noise) to 1 (image)."""
    ends: bool = False
    """Whether this may be the last step: another one, a little longer than the one before, would be
    past the image."""
    number: int = 0
    """Of the step in the image."""
    nth: int = 0
    too_many: bool = False
    """Whether there are more calls at this time than are told apart, so that nothing is reused."""
    ran: dict[int, tuple[int, float]] = field(default_factory=dict)
    """The last step that ran regions, and its progress, by the first, second ... call of a step."""
    begins: bool = True
    """Whether the last call was the first one of an image."""
    size: tuple[int, ...] = ()
    """Of the latents, items first."""

    def enter(self, time: float, progress: float, size: tuple[int, ...]) -> bool:
        """Notes the next call. Returns whether what was kept is of another size, and useless."""
        again = time == self.time  # another call of the same step, as split guidance makes
        self.begins, resized = time > self.time, size != self.size
        if self.too_many and not again:
            self.ran, self.too_many = {}, False
        crowded = again and self.nth + 1 == MOST_CALLS
        self.too_many |= crowded
        if self.begins or resized or crowded:
            self.number, self.nth, self.ran, self.ends = 0, 0, {}, False
        elif again:
            self.nth += 1
        else:
            self.number, self.nth = self.number + 1, 0
            length = progress - self.progress
            self.ends = progress + _LONGER * length >= 1
        self.time, self.progress, self.size = time, progress, size
        return resized

    def restart(self) -> None:
        """Makes the next call the first one of an image."""
        self.time, self.ran = float("-inf"), {}

    def moment(self, settings: Settings) -> Moment:
        """What the call does, where the settings have a `reuse`.

        Regions run at the last step too, which nothing after it could mend.
        """
        last = self.ran.get(self.nth)
        reuses = last is not None and not self.ends and self._is_soon_after(*last, settings)
        if not reuses:
            self.ran[self.nth] = self.number, self.progress
        return Moment(self.nth, reuses, last is None)

    def _is_soon_after(self, number: int, progress: float, settings: Settings) -> bool:
        """Whether what a step gave can be used at this one."""
        within = settings.reuse_within
        soon = within is None or self.progress - progress < within + _ROUNDING * within
        every = settings.reuse_every(progress)
        return soon and settings.may_reuse(self.progress) and self.number - number < every

    @property
    def reused(self) -> bool:
        """Whether the last step left regions out."""
        return bool(self.ran) and all(number != self.number for number, _ in self.ran.values())
