"""MergePlan: an assignment of tokens to slots, with the operations it defines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from . import kernels


@dataclass
class MergePlan:
    """Puts each of N tokens into one of M <= N slots.

    Which slot is data, but how many slots there are is not: M depends on the settings and the grid
    alone, so that shapes are static and a plan can be compiled or captured into a CUDA graph.
    """

    slot: Tensor
    """Slot of each token, `[B, N]`, int64 in `[0, M)`. Every slot has at least one token."""

    order: Tensor
    """The tokens, those of a slot beside each other, its representative first, `[B, N]`, int32."""

    span: Tensor
    """Where each slot's tokens begin in `order`, and how many they are, `[B, M, 2]`, int32."""

    triton: bool = False
    """Whether the Triton kernels do the work."""

    shared: bool = False
    """Whether all items of the batch are known to have the same plan."""

    @classmethod
    def empty(
        cls, batch: int, n: int, slots: int, device: torch.device, triton: bool
    ) -> "MergePlan":
        """A plan to be filled in."""
        return cls(*kernels.Lists.empty(batch, n, slots, device), triton)

    @classmethod
    def identity(cls, batch: int, n: int, device: torch.device) -> "MergePlan":
        """A plan that leaves every token alone."""
        token = torch.arange(n, device=device)
        span = torch.stack([token, torch.ones_like(token)], dim=1).int()
        return cls(
            token.repeat(batch, 1),
            token.int().repeat(batch, 1),
            span.repeat(batch, 1, 1),
            shared=True,
        )

    @property
    def lists(self) -> kernels.Lists:
        """What a selector writes."""
        return kernels.Lists(self.slot, self.order, self.span)

    @property
    def size(self) -> Tensor:
        """Tokens in each slot, `[B, M]`."""
        return self.span[..., 1]

    @property
    def kept(self) -> Tensor:
        """The representative of each slot, `[B, M]`, int64: the token that others merge into.

        Found anew each time it is asked for: most plans never are.
        """
        return self.order.gather(1, self.span[..., 0].long()).long()

    def fits(self, x: Tensor) -> bool:
        """Whether `x` holds the tokens `[B, N, ...]` that this plan was made for."""
        here = x.device == self.slot.device  # a model can be split over several
        return here and x.ndim == 3 and x.shape[:2] == self.slot.shape

    def merge(self, x: Tensor) -> Tensor:
        """Mean of each slot's tokens: `[B, N, C]` to `[B, M, C]`."""
        return kernels.slot_mean(x, self.lists, self.triton)

    def rows(self, start: int | Tensor | None = None, length: int = 0) -> "Rows":
        """The rows that are left of what lies along the tokens, or, if they begin at `start` in a
        longer sequence, along that; see `placed`."""
        if isinstance(start, Tensor):
            return self.placed(start, length).rows()
        (batch, n), index = self.slot.shape, self.kept[:1] if self.shared else self.kept
        if start is None:
            return Rows(index, n, batch)
        token = torch.arange(length, device=index.device).expand(index.shape[0], -1)
        index = torch.cat([token[:, :start], index + start, token[:, start + n :]], dim=1)
        return Rows(index, length, batch)

    def pick(self, rows: Tensor, dim: int = 1, *, batched: bool = True) -> Tensor:
        """The representatives' rows of something that lies along the tokens; see `Rows.pick`."""
        return self.rows().pick(rows, dim, batched=batched)

    def placed(self, start: int | Tensor, length: int) -> "MergePlan":
        """The plan of a longer sequence that holds these tokens; it leaves the others alone.

        Args:
            start: where they begin in it, for all items of the batch or for each, `[B]`.
            length: tokens of the sequence.
        """
        (_, n), slots = self.slot.shape, self.span.shape[1]
        if not isinstance(start, Tensor):
            return self._placed(start, length)

        def spliced(own: Tensor, place: Tensor, others: Tensor | int) -> Tensor:
            """The plan's own values, `[B, K]`, at the places 0 to K - 1, and others elsewhere."""
            inside = (place >= 0) & (place < own.shape[1])
            found = own.gather(1, place.clamp(0, own.shape[1] - 1)).long()
            return torch.where(inside, found, others)

        # Tokens and slots are counted from where these tokens begin, until `start` is added. Behind
        # them, the number of a token's slot is lower by the tokens that are removed.
        start, removed = start[:, None], n - slots
        token = torch.arange(length, device=self.slot.device) - start
        number = token[:, : length - removed]  # of a slot
        slot = spliced(self.slot, token, torch.where(token < 0, token, token - removed)) + start
        order = spliced(self.order, token, token) + start
        first, size = self.span.unbind(2)
        first = spliced(first, number, torch.where(number < 0, number, number + removed)) + start
        span = torch.stack([first, spliced(size, number, 1)], dim=2)
        return MergePlan(slot, order.int(), span.int(), self.triton)

    def _placed(self, start: int, length: int) -> "MergePlan":
        """`placed` with one start for all, in as few kernels as there can be."""
        (batch, n), slots = self.slot.shape, self.span.shape[1]
        end = start + n
        token = torch.arange(length, device=self.slot.device).expand(batch, -1)
        number = token.int()
        parts = [token[:, :start], self.slot + start, token[:, start + slots : length - n + slots]]
        order = torch.cat([number[:, :start], self.order + start, number[:, end:]], dim=1)
        first, size = self.span.unbind(2)
        first = torch.cat([number[:, :start], first + start, number[:, end:]], dim=1)
        size = F.pad(size, (start, length - end), value=1)
        span = torch.stack([first, size], dim=2)
        return MergePlan(torch.cat(parts, dim=1), order, span, self.triton, self.shared)

    @property
    def unmerge(self) -> Callable[[Tensor], Tensor]:
        """Gives every token what its slot got: `[B, M, C]` to `[B, N, C]`.

        A function that does not hold on to what only merging needs.
        """
        return partial(kernels.slot_gather, slot=self.slot, triton=self.triton)

    def restore(self, x: Tensor, y: Tensor, merged: Tensor) -> Tensor:
        """Adds to every token what its slot gained: `x + unmerge(y - merged)`, in one pass.

        With `merged = merge(x)` and `y` what a layer with a residual of its own makes of it, tokens
        keep what tells them apart from the others of their slot.

        Args:
            x: tokens before merging, `[B, N, C]`.
            y: slots after the layer, `[B, M, C]`.
            merged: slots before it, `[B, M, C]`.
        """
        return kernels.slot_restore(x, y, merged, self.slot, self.triton)


@dataclass(frozen=True)
class Rows:
    """The rows of representatives: what is left of something that lies along tokens."""

    index: Tensor
    """`[1 or B, M]`, int64; one for all if the items of the batch share their plan."""
    tokens: int
    batch: int

    def pick(self, rows: Tensor, dim: int = 1, *, batched: bool = True) -> Tensor:
        """What is left of something that lies along the tokens, such as positions.

        Args:
            rows: its axis `dim` has size N. Its axis 0 is the batch, of size B, or of size 1 if all
                items have the same rows; unless `dim` is 0 or `batched` is False.

        Returns:
            `rows` with M in place of N. Where the items have the same rows but plans of their own,
            axis 0 has size B; rows without a batch axis get one, in front of all others.

        Raises:
            ValueError: `rows` has another number of tokens or items.
        """
        dim = dim % rows.ndim
        batched = batched and dim > 0
        if rows.shape[dim] != self.tokens or (batched and rows.shape[0] not in (1, self.batch)):
            raise ValueError(
                f"rows of shape {tuple(rows.shape)} do not lie along {self.batch} x {self.tokens} "
                "tokens"
            )
        if self.index.shape[0] == 1:
            return rows.index_select(dim, self.index[0])
        if not batched:
            rows, dim = rows[None], dim + 1
        shape = [1] * rows.ndim
        shape[0], shape[dim] = self.batch, -1
        return rows.take_along_dim(self.index.view(shape), dim)


def join(plans: Sequence[MergePlan]) -> MergePlan:
    """The plan of a sequence of segments, such as text and image, from the plans of each.

    Args:
        plans: of the segments in their order, `[B, N_1, ...]`, `[B, N_2, ...]` and so on. Those
            that are left alone have a `MergePlan.identity`.

    Returns:
        A plan of `N_1 + N_2 + ...` tokens. Its slots are numbered from segment to segment.
    """
    if len(plans) > 1:
        plans = [plan for plan in plans if plan.slot.shape[1] > 0]
    if len(plans) == 1:
        return plans[0]
    slot, order, span = (
        torch.cat(parts, dim=1) for parts in zip(*(plan.lists for plan in plans), strict=True)
    )
    tokens = slots = 0  # in the segments before
    for plan in plans:
        n, m = plan.slot.shape[1], plan.span.shape[1]
        slot[:, tokens : tokens + n] += slots
        order[:, tokens : tokens + n] += tokens
        span[:, slots : slots + m, 0] += tokens
        tokens, slots = tokens + n, slots + m
    triton, shared = any(plan.triton for plan in plans), all(plan.shared for plan in plans)
    return MergePlan(slot, order, span, triton, shared)
