"""What torch.compile does with functions that it cannot or must not trace.

PyTorch has decorators for it, `torch.compiler.assume_constant_result` and `torch.compiler.disable`,
but they import the compiler, which takes seconds, only to set these flags.
"""

import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_when_traced(function: _Function) -> _Function:
    """Makes the compiler call the function while it traces, and take the result as a constant.

    The arguments have to be constants too: numbers and words, but no tensors or other objects, for
    which `Named` is.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_traced(reason: str) -> Callable[[_Function], _Function]:
    """Makes the compiler leave its graph to call the function, where that is allowed.

    Args:
        reason: what it needs that no graph has, for users who do not allow it (`fullgraph=True`).
    """
    message = (
        f"{reason}, which no graph can read. Compile in place, model.compile(fullgraph=True), or "
        "call apply_patch after torch.compile"
    )

    def mark(function: _Function) -> _Function:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = message  # type: ignore[attr-defined]
        # PyTorch 2.11 would compile it and what it calls, outside the graph that was left for it.
        return outside_graphs(function)

    return mark


def outside_graphs(function: _Function) -> _Function:
    """Makes the compiler begin no graph in the function or in what it calls.

    A graph that has begun before goes on through it.
    """
    return _skipped(function, "SKIP")


def around_graphs(function: _Function) -> _Function:
    """Makes the compiler begin no graph with the function itself, but with the functions it calls.

    A graph that has begun before goes on through it. Where blocks are compiled one by one, their
    graphs then hold what all of them do, and nothing that differs by their place in the model.
    """
    return _skipped(function, "DEFAULT")


def _skipped(function: _Function, calls: str) -> _Function:
    with suppress(ImportError):  # the names are private
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )

        strategy = _FrameExecStrategy(_FrameAction.SKIP, getattr(_FrameAction, calls))
        code: Any = function.__code__
        set_code_exec_strategy(code, strategy)
    return function


class Named:
    """An object that functions which are constant to the compiler find by its name."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        _named[self.name] = self


_named: "WeakValueDictionary[str, Named]" = WeakValueDictionary()


def find_named(name: str) -> Any:
    return _named[name]
