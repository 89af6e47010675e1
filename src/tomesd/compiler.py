"""What torch.compile does with functions that it cannot or must not trace.

PyTorch has decorators for it, `torch.compiler.assume_constant_result` and `torch.compiler.disable`,
but they import the compiler, which takes seconds, only to set these flags.
"""

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_when_traced(function: _Function) -> _Function:
    """Makes the compiler call the function while it traces, and take the result as a constant.

    The arguments have to be constants too: numbers and words, but no tensors or other objects.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_traced(reason: str) -> Callable[[_Function], _Function]:
    """Makes the compiler leave its graph to call the function, where that is allowed.

    Args:
        reason: what users read where it is not allowed, with `fullgraph=True`.
    """

    def mark(function: _Function) -> _Function:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return function

    return mark
