"""Tokens in time: the frames of a video are planned in groups, by the selectors of images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import Cells
from .plan import MergePlan, join


@dataclass(frozen=True)
class FrameGroups:
    """Groups of frames that follow each other, each with as many frames. None merges with another.

    A group is planned as one image, `h` tokens high and `w * frames` wide, in which the frames of
    a place stand beside each other: a cell that is `frames` times as wide holds them all.
    """

    groups: int
    frames: int
    """In each group."""
    cells: Cells
    """Of the image that stands for a group."""

    @property
    def tokens(self) -> int:
        return self.groups * self.cells.tokens

    def fold(self, x: Tensor) -> Tensor:
        """Makes an image of each group: `[B, tokens, C]` to `[B * groups, cells.tokens, C]`."""
        batch, _, channels = x.shape
        frames = x.reshape(batch * self.groups, self.frames, -1, channels)
        return frames.transpose(1, 2).reshape(batch * self.groups, -1, channels)

    def unfold(self, plan: MergePlan) -> MergePlan:
        """The plan of the tokens `[B, tokens]`, from that of images `[B * groups, ...]`.

        Its slots are numbered from group to group.
        """
        each, slots = self.cells.tokens, plan.span.shape[1]
        places = each // self.frames
        group = torch.arange(self.groups, device=plan.slot.device, dtype=torch.int32)[:, None]
        slot = plan.slot.view(-1, self.groups, places, self.frames).transpose(2, 3)
        slot = slot.reshape(-1, self.groups, each) + group * slots
        order = plan.order.view(-1, self.groups, each)
        order = order % self.frames * places + order // self.frames + group * each
        first, size = plan.span.view(-1, self.groups, slots, 2).unbind(3)
        span = torch.stack([first + group * each, size], dim=3)
        return MergePlan(
            slot.flatten(1), order.flatten(1), span.flatten(1, 2), plan.triton, plan.shared
        )


@dataclass(frozen=True)
class Volume:
    """`t` frames of `h x w` tokens, the first frame first."""

    parts: tuple[FrameGroups, ...]
    """One after the other."""

    @classmethod
    def of(
        cls, grid: tuple[int, int, int], sy: int, sx: int, st: int = 1, window: int = 0
    ) -> "Volume":
        """Cuts `t x h x w` tokens into groups of `st` frames, and these into cells of all of them.

        Where the frames are no multiple of `st`, the first ones, up to `st - 1`, are on their own:
        the first frame of a video is often encoded by itself.

        Args:
            grid: t, h and w.
            sy, sx: height and width of a cell.
            st: frames that merge with each other.
            window: least side of a window in a frame; see `Cells.of`.
        """
        t, h, w = grid
        cells = Cells.of(h, w, sy, sx, window)
        alone, groups = (t, 0) if st == 1 else (t % st, t // st)
        wide = Cells(h, w * st, cells.sy, cells.sx * st, cells.down, cells.across)
        parts = (FrameGroups(alone, 1, cells), FrameGroups(groups, st, wide))
        return cls(tuple(part for part in parts if part.groups > 0))

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def slots(self, removes: Sequence[int]) -> int:
        """Tokens that are left, where so many are removed from each group of each part."""
        pairs = zip(self.parts, removes, strict=True)
        return sum(part.groups * (part.cells.tokens - remove) for part, remove in pairs)


def plan_tokens(
    select: Callable[[Tensor, Cells, int], MergePlan],
    metric: Tensor,
    volume: Volume,
    removes: Sequence[int],
) -> MergePlan:
    """A plan of the tokens of a video, or of an image: one frame.

    Args:
        select: makes the plan of images from a metric `[B, N, C]`, their cells, and the tokens to
            remove from each. All groups of frames are images to it, the groups of an item one
            after the other.
        metric: what similarity is measured on, `[B, volume.tokens, C]`.
        removes: tokens to remove from each group, for each part of the volume.
    """
    plans, start = [], 0
    for part, remove in zip(volume.parts, removes, strict=True):
        tokens = metric[:, start : start + part.tokens] if len(volume.parts) > 1 else metric
        start += part.tokens
        if remove == 0:
            plans.append(MergePlan.identity(metric.shape[0], part.tokens, metric.device))
        elif part.groups == part.frames == 1:
            plans.append(select(tokens, part.cells, remove))
        else:
            plans.append(part.unfold(select(part.fold(tokens), part.cells, remove)))
    return join(plans)
