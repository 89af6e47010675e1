"""Which implementation runs: the Triton kernels, where they can, or plain PyTorch."""

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..compiler import constant_when_traced
from .cells import Cells, Draw
from .request import Lists, Request

# The compute capability that NVIDIA's GPUs need for each dtype.
_NEEDED = {torch.float16: (7, 0), torch.bfloat16: (8, 0), torch.float32: (7, 0)}


def use_triton(backend: str, x: Tensor) -> bool:
    """Whether the Triton kernels are to work on `x`.

    With "auto", they are tried out first, once for each device and dtype. If that fails, as it does
    without a C compiler, there is a warning, and they are not used.

    Raises:
        RuntimeError: `backend` is "triton", and they cannot.
    """
    kind, index, dtype = x.device.type, x.device.index, x.dtype
    # The interpreter, which runs the kernels on a CPU, is for those who ask for it: it is slow.
    if backend == "reference" or (backend == "auto" and kind == "cpu"):
        return False
    reason = _why_not(kind, index, dtype)
    if backend == "triton":
        if reason is not None:
            raise RuntimeError(f'backend="triton" cannot be used here: {reason}')
        return True
    return reason is None and _works(kind, index, dtype, type(x) is Tensor)


@functools.lru_cache(maxsize=64)
def _find_reason(kind: str, index: int | None, dtype: torch.dtype, interpreted: bool) -> str | None:
    if kind != "cuda" and not (interpreted and kind == "cpu"):
        return f"it needs a CUDA or ROCm GPU, and the model is on {kind}"
    name = str(dtype).removeprefix("torch.")
    if dtype not in _NEEDED:
        return f"it knows float16, bfloat16 and float32, not {name}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if kind == "cuda" and torch.version.hip is None:  # ROCm numbers its GPUs otherwise
        found = torch.cuda.get_device_capability(index)
        if found < _NEEDED[dtype]:
            have, need = (".".join(map(str, numbers)) for numbers in (found, _NEEDED[dtype]))
            return f"the GPU has compute capability {have}, and {name} needs {need}"
    return None


@constant_when_traced
def _why_not(kind: str, index: int | None, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run on such a device, as far as can be told without trying."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: runs on a CPU
    return _find_reason(kind, index, dtype, interpreted)


_tried: dict[tuple[str, int | None, torch.dtype], bool] = {}


@constant_when_traced
def _works(kind: str, index: int | None, dtype: torch.dtype, real: bool) -> bool:
    """Whether the kernels have been tried out on a device, successfully.

    Args:
        real: whether this is about tensors with data; if not, nothing can be tried.
    """
    place = (kind, index, dtype)
    if place not in _tried:
        if not real or (kind == "cuda" and torch.cuda.is_current_stream_capturing()):
            return True
        device = torch.device(kind if index is None else f"{kind}:{index}")
        _tried[place] = _try(device, dtype)
    return _tried[place]


@torch.no_grad()
def _try(device: torch.device, dtype: torch.dtype) -> bool:
    metric = torch.eye(16, dtype=dtype, device=device)[None]
    lists = Lists.empty(1, 16, 8, device)
    try:
        fast = load_fast()
        launch(fast.match_tokens, metric, Request(Cells(4, 4, 2, 2), 8, Draw()), lists)
        launch(fast.slot_mean, metric, lists).cpu()
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        warnings.warn(
            f"tomesd: its Triton kernels do not run on {device} ({type(error).__name__}: {reason}),"
            ' so it uses plain PyTorch, which is slower; backend="reference" does so quietly',
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def load_fast() -> ModuleType:
    """The module `fast`, imported when it is used."""
    from . import fast

    return fast


def launch(function: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
    """`function(x, *rest)`, which launches Triton kernels on the device of `x`.

    Triton launches on the current device, which need not be that of the model.
    """
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return function(x, *rest)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        return function(x, *rest)
