"""The interface of roles, and access to the arguments of the method that a role wraps."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..state import Patch

Inner = Callable[..., Any]


@dataclass(frozen=True)
class Role(ABC):
    @abstractmethod
    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        """Calls `inner`, the module's own method, with the given arguments or with merged ones."""


def find_argument(names: tuple[str, ...], name: str, args: tuple, kwargs: dict) -> Any:
    """One argument of a method with these parameters; None if it was not passed."""
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else kwargs.get(name)


def replace_arguments(
    names: tuple[str, ...], changes: dict[str, Any], args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """The arguments of a method with these parameters, some of them replaced."""
    if not changes:
        return args, kwargs
    if not args:
        return args, {**kwargs, **changes}
    values, named = list(args), {**kwargs, **changes}
    for place, name in enumerate(names[: len(args)]):
        values[place] = named.pop(name, values[place])
    return tuple(values), named


@dataclass(frozen=True)
class Given:
    """The arguments of a call by name; `a.b` is entry `b` of the dict `a`, if there is one."""

    names: tuple[str, ...]
    args: tuple
    kwargs: dict

    def __getitem__(self, name: str) -> Any:
        name, *entries = name.split(".")
        value = find_argument(self.names, name, self.args, self.kwargs)
        for entry in entries:
            value = value.get(entry) if isinstance(value, dict) else None
        return value

    def replaced(self, changes: dict[str, Any]) -> "Given":
        """The same call with some arguments replaced."""
        return Given(self.names, *replace_arguments(self.names, changes, self.args, self.kwargs))
