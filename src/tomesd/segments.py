"""The tokens of a sequence in segments, which are planned one by one by the selectors of images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import Cells
from .plan import MergePlan, join

Select = Callable[[Tensor, Cells, int, int], MergePlan]
"""Makes the plan of images from a metric `[B, N, C]`, their cells, the tokens to remove from each,
and the number of the segment. The groups of an item are images one after the other."""


@dataclass(frozen=True)
class Segment:
    """Tokens that follow each other: groups of frames, each with as many frames.

    No group merges with another. A group is planned as one image, `h` tokens high and `w * frames`
    wide, in which the frames of a place stand beside each other: a cell that is `frames` times as
    wide holds them all.
    """

    tokens: int
    cells: Cells | None = None
    """Of the image that stands for a group. None: the tokens are left alone."""
    groups: int = 1
    frames: int = 1
    """In each group."""
    remove: int = 0
    """Tokens to remove from each group."""

    def plan(self, metric: Tensor, select: Select, number: int) -> MergePlan:
        """The plan of its tokens, by a metric `[B, tokens, C]`."""
        if self.cells is None or self.remove == 0:
            return MergePlan.identity(metric.shape[0], self.tokens, metric.device)
        if self.groups == self.frames == 1:
            return select(metric, self.cells, self.remove, number)
        return self._unfold(select(self._fold(metric), self.cells, self.remove, number))

    def _fold(self, x: Tensor) -> Tensor:
        """Makes an image of each group: `[B, tokens, C]` to `[B * groups, N, C]`."""
        batch, _, channels = x.shape
        frames = x.reshape(batch * self.groups, self.frames, -1, channels)
        return frames.transpose(1, 2).reshape(batch * self.groups, -1, channels)

    def _unfold(self, plan: MergePlan) -> MergePlan:
        """The plan of the tokens `[B, tokens]`, from that of images `[B * groups, N]`.

        Its slots are numbered from group to group.
        """
        each, slots = plan.slot.shape[1], plan.span.shape[1]
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


def cut_grid(
    grid: tuple[int, int, int],
    sy: int,
    sx: int,
    st: int = 1,
    window: int = 0,
    removable: Callable[[Cells], int] = lambda _: 0,
) -> tuple[Segment, ...]:
    """Cuts a grid into groups of `st` frames, and these into cells of all of them.

    Where the frames are no multiple of `st`, the first ones, up to `st - 1`, are on their own: the
    first frame of a video is often encoded by itself.

    Args:
        grid: frames, rows and columns.
        sy, sx: height and width of a cell.
        st: frames that merge with each other.
        window: least side of a window in a frame; see `Cells.of`.
        removable: how many tokens to remove from a group.
    """
    t, h, w = grid
    cells = Cells.of(h, w, sy, sx, window)
    alone, groups = (t, 0) if st == 1 else (t % st, t // st)
    wide = Cells(h, w * st, cells.sy, cells.sx * st, cells.down, cells.across)
    return tuple(
        [
            Segment(number * each.tokens, each, number, frames, removable(each))
            for each, number, frames in ((cells, alone, 1), (wide, groups, st))
            if number > 0
        ]
    )


def tokens_removed(segments: Sequence[Segment]) -> int:
    return sum([segment.groups * segment.remove for segment in segments])


def plan_segments(metric: Tensor, segments: Sequence[Segment], select: Select) -> MergePlan:
    """The plan of a sequence, by a metric `[B, N, C]`."""
    plans, start = [], 0
    for number, segment in enumerate(segments):
        tokens = metric[:, start : start + segment.tokens] if len(segments) > 1 else metric
        start += segment.tokens
        plans.append(segment.plan(tokens, select, number))
    return join(plans)
