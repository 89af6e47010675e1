"""Operators of PyTorch that write plans. They take tensors and numbers, and nothing else."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .lists import Lists
from .request import Request

WRITTEN = ("slot", "order", "span", "clock")
"""Arguments that these operators write to."""


def flatten(metric: Tensor, request: Request, lists: Lists) -> tuple[Any, ...]:
    """The arguments of an operator."""
    state = None if request.clock is None else request.clock.state
    return (metric.detach(), request.draw.timestep, *lists, state, request.numbers)


def opaque_operator(
    name: str, write: Callable[[Tensor, Request, Lists, bool], None]
) -> Callable[[Tensor, Request, Lists, bool], None]:
    """`write` as an operator `tomesd::name`, which compilers take in as it is.

    Args:
        write: takes the metric, what is wanted, the lists to write to, and whether to use the
            Triton kernels.
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
        request = Request.of_numbers(numbers, timestep, clock)
        write(metric, request, Lists(slot, order, span), triton)

    operator = torch.library.custom_op(f"tomesd::{name}", run, mutates_args=WRITTEN)
    operator.register_fake(lambda *_, **__: None)
    return lambda metric, request, lists, triton: operator(*flatten(metric, request, lists), triton)
