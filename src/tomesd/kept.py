"""Tensors that outlive the call of the model they were made in."""

import sys
import threading
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from .compiler import Named, constant_when_traced, find_named

MOST = 1024
"""How many tensors a thread keeps; beyond that, the least recently used ones go."""


class Kept(Named):
    """Tensors by name; every thread has its own, so that threads can share a model."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.times = threading.local(), threading.local()
        self.captured: list[Tensor] = []
        """What CUDA graphs write to, which must stay as long as they may be replayed."""

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The tensor of that name, shape, dtype and device; zeros when first asked for.

        It keeps its address, so that a CUDA graph can write to it.
        """
        return self._found("local", name, shape, dtype, device)

    def time(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The same for times at which something was written, minus infinity before the first of an
        image: no time is below."""
        return self._found("times", name, shape, torch.float32, device)

    def _found(
        self,
        store: str,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        shape = tuple(index(side) for side in shape)  # numbers where the compiler has symbols
        kind = str(dtype).removeprefix("torch.")  # the compiler wants no dot in an attribute
        name = "_".join([name, *map(str, shape), kind, str(device)])
        _allocate(self.name, store, name, shape, dtype, device)
        found: Tensor = getattr(getattr(self, store), name)
        return found

    def note(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        times: Tensor,
    ) -> "Note":
        """The note of that name, shape, dtype and device, at these times, `[T]`."""
        value = self.tensor(name, shape, dtype, device)
        now = times.to(device, torch.float32)
        name = "_".join([name, *(str(index(side)) for side in shape)])
        return Note(value, self.time(name, now.shape, device), now)

    def begin_image(self) -> None:
        """Makes notes and plans of this thread count as never written: they are of another image.

        Their times would tell, too, if they were written at every step.
        """
        for tensor in vars(self.times).values():
            tensor.fill_(float("-inf"))

    def forget(self, prefix: str) -> None:
        """Lets go of the tensors of this thread whose names begin so."""
        tensors = vars(self.local)
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]


@dataclass(frozen=True)
class Note:
    """A tensor that is kept for the next step of the same image."""

    value: Tensor
    times: Tensor
    """When it was written, `[T]`; minus infinity before the first time."""
    now: Tensor
    """`[T]`, float32."""

    @property
    def is_from_step_before(self) -> Tensor:
        """Whether it was written at a step of this image, `[]`.

        Time that stands still or rises is a new image.
        """
        return (self.now < self.times).all()

    def write(self, value: Tensor) -> None:
        self.value.copy_(value)
        self.times.copy_(self.now)


@constant_when_traced
def _allocate(
    kept: str,
    store: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    owner: Kept = find_named(kept)
    tensors, fill = vars(getattr(owner, store)), float("-inf") if store == "times" else 0.0
    tensor = tensors.pop(name, None)
    if tensor is None:
        with torch.inference_mode(False):  # what inference mode makes can only be used there
            tensor = torch.full(shape, fill, dtype=dtype, device=device)
    tensors[name] = tensor  # behind those that were used less lately
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        owner.captured.append(tensor)
    for oldest in list(tensors)[: max(0, len(tensors) - MOST)]:
        del tensors[oldest]
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:
        # Lets a compiled model replay CUDA graphs that write to it.
        compiler.mark_static_address(tensor)
