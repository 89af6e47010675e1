"""How kernels are launched: right away, or by the compiler that traces the launch.

Functions that launch take an argument `wrap_triton` and put it around each kernel. It is `quickly`,
or `torch.library.wrap_triton`, under which a compiled model launches the kernel from its own code,
past PyTorch's dispatcher. PyTorch looks for calls of that very name to tell whether code that it
compiled before is still valid.
"""

import functools
from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver

# For kernels that read the time. A sampler takes its timesteps one by one out of a list, so that
# every other one is not aligned, and at the second step the kernels would be compiled again.
jit_at_any_step = triton.jit(do_not_specialize_on_alignment=["timestep"])

# Before, a compiled kernel was not given its constants.
_LAUNCHES_COMPILED = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
_OPTIONS = ("num_warps", "num_stages")


def blocks(size: int, block: int) -> int:
    """How many blocks cover `size`; also where it is a symbol of the compiler."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The least that is not below `size`. Triton's own takes as long as a launch."""
    return 1 << (int(size) - 1).bit_length()


def quickly(kernel: Any) -> Any:
    """Launches as `kernel` does, but looks up faster what was compiled for such arguments."""
    found = _known.get(id(kernel))
    if found is None:
        compiles = isinstance(kernel, triton.JITFunction) and _LAUNCHES_COMPILED
        found = _Quick(kernel) if compiles else kernel
        _note(_known, id(kernel), found)
    return found


_known: dict[int, Any] = {}  # by id: to hash a kernel is to hash its code
_MOST_KNOWN = 1024  # sizes of images, say, that a server is asked for


def _note(known: dict[Any, Any], key: Any, found: Any) -> None:
    """Adds to what is known, which does not grow forever: Triton finds it again, if more slowly."""
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[key] = found


class _Quick:
    """A kernel with what it was compiled to, by all that Triton compiles for."""

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._aligned = [not param.do_not_specialize_on_alignment for param in kernel.params]
        self._compiled: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        names = self._kernel.arg_names[len(args) :]
        values = (*args, *[kwargs[name] for name in names])
        # Numbers, types, and whether pointers are aligned that have to be: that is all that code
        # depends on.
        key = (
            driver.active.get_current_device(),
            *[kwargs.get(name) for name in _OPTIONS],
            *[
                (value.dtype, aligned and value.data_ptr() % 16 == 0)
                if isinstance(value, Tensor)
                else value
                for value, aligned in zip(values, self._aligned, strict=True)
            ],
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            _note(self._compiled, key, self._kernel[grid](*args, **kwargs))
        else:
            compiled[(*grid, 1, 1)[:3]](*values)
