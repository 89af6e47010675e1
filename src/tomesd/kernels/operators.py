"""Operators of PyTorch that write plans. They take tensors and numbers, and nothing else."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .cells import Cells
from .draw import Draw
from .lists import Clock, Lists

__all__ = ["WRITTEN", "cells_and_remove", "flatten", "opaque_operator", "unflatten"]

WRITTEN = ("slot", "order", "span", "clock")
"""Arguments that these operators write to."""


def flatten(
    metric: Tensor, cells: Cells, remove: int, lists: Lists, draw: Draw, clock: Clock | None
) -> tuple[Any, ...]:
    """The arguments of an operator."""
    state, refresh = (None, 1) if clock is None else (clock.state, clock.refresh)
    numbers = [*cells.numbers, remove, draw.key, refresh]
    return (metric.detach(), draw.timestep, *lists, state, numbers)


def unflatten(
    metric: Tensor,
    timestep: Tensor | None,
    slot: Tensor,
    order: Tensor,
    span: Tensor,
    clock: Tensor | None,
    numbers: Sequence[int],
) -> tuple[Tensor, Cells, int, Lists, Draw, Clock | None]:
    """What `flatten` was given."""
    *sides, remove, key, refresh = numbers
    kept = None if clock is None else Clock(clock, refresh)
    return metric, Cells(*sides), remove, Lists(slot, order, span), Draw(timestep, key), kept


def cells_and_remove(numbers: Sequence[int]) -> tuple[Cells, int]:
    """Of the last argument of an operator."""
    return Cells(*numbers[:6]), numbers[6]


def opaque_operator(name: str, write: Callable[..., None]) -> Callable[..., None]:
    """`write` as an operator `tomesd::name`, which compilers take in as it is.

    Args:
        write: takes what `flatten` takes, and whether to use the Triton kernels.

    Returns:
        A function with the arguments of `write`.
    """

    def run(
        metric: Tensor,
        timestep: Tensor | None,
        slot: Tensor,
        order: Tensor,
        span: Tensor,
        clock: Tensor | None,
        numbers: Sequence[int],
        triton: bool,
    ) -> None:
        write(*unflatten(metric, timestep, slot, order, span, clock, numbers), triton)

    operator = torch.library.custom_op(f"tomesd::{name}", run, mutates_args=WRITTEN)
    operator.register_fake(lambda *_, **__: None)
    return lambda *args: operator(*flatten(*args[:-1]), args[-1])
