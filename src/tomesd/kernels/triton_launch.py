"""How kernels are launched: right away, or by the compiler that traces the launch.

Functions that launch take an argument `wrap_triton` and put it around each kernel. It is
`as_it_is`, which costs nothing, or `torch.library.wrap_triton`, under which a compiled model
launches the kernel from its own code, past PyTorch's dispatcher. PyTorch looks for calls of that
very name to tell whether code that it compiled before is still valid.
"""

from typing import Any

__all__ = ["as_it_is", "blocks"]


def as_it_is(kernel: Any) -> Any:
    return kernel


def blocks(size: int, block: int) -> int:
    """How many blocks cover `size`; also where it is a symbol of the compiler."""
    return -(-size // block)
