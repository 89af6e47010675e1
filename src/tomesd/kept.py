"""Tensors that outlive the call of the model they were made in."""

import sys
import threading
import uuid
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .compiler import constant_when_traced

MOST = 1024
"""Tensors that a thread keeps; of more, those go that were not used for longest."""

_all_kept: "WeakValueDictionary[str, Kept]" = WeakValueDictionary()


class Kept:
    """Tensors by name; every thread has its own, so that threads can share a model."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.captured: list[Tensor] = []
        """What CUDA graphs write to, which must stay as long as they may be replayed."""
        self.name = uuid.uuid4().hex
        _all_kept[self.name] = self

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
        numbers = "_".join(str(int(number)) for number in shape)
        kind = str(dtype).removeprefix("torch.")  # the compiler wants no dot in an attribute
        name = f"{name}_{numbers}_{kind}_{device}"
        _allocate(self.name, name, tuple(int(n) for n in shape), dtype, device, fill)
        return getattr(self.local, name)

    def forget(self, prefix: str) -> None:
        """Lets go of the tensors of this thread whose names begin so."""
        tensors = vars(self.local)
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]


@constant_when_traced  # hence the name, by which it finds the owner
def _allocate(
    kept: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    fill: float,
) -> None:
    owner = _all_kept[kept]
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
