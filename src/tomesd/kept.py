"""Tensors that outlive the call of the model they were made in."""

import sys
import threading
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from .compiler import Named, constant_when_traced, find_named

MOST = 1024
"""Tensors that a thread keeps; of more, those go that were not used for longest."""


class Kept(Named):
    """Tensors by name; every thread has its own, so that threads can share a model."""

    def __init__(self) -> None:
        super().__init__()
        self.local = threading.local()
        self.captured: list[Tensor] = []
        """What CUDA graphs write to, which must stay as long as they may be replayed."""

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        fill: float = 0.0,
    ) -> Tensor:
        """The tensor of that name, shape, dtype and device; made and filled when first asked for.

        It keeps its address, so that a CUDA graph can write to it.
        """
        shape = tuple(index(side) for side in shape)  # numbers where the compiler has symbols
        kind = str(dtype).removeprefix("torch.")  # the compiler wants no dot in an attribute
        name = "_".join([name, *map(str, shape), kind, str(device)])
        _allocate(self.name, name, shape, dtype, device, fill)
        return getattr(self.local, name)

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
        name = "_".join([name, *(str(index(side)) for side in shape), "time"])
        last = self.tensor(name, now.shape, torch.float32, device, fill=float("-inf"))
        return Note(value, last, now)

    def begin_image(self) -> None:
        """Makes notes and plans of this thread count as never written: they are of another image.

        Their times would tell, too, if they were written at every step.
        """
        for name, tensor in vars(self.local).items():
            if "_time_" in name or "_clock_" in name:
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
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    fill: float,
) -> None:
    owner: Kept = find_named(kept)
    tensors = vars(owner.local)
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
