"""What all roles have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..policy import Frame, enter_frame
from ..shared import Patch

__all__ = ["Inner", "Role", "refuse_outside", "run_inside"]

Inner = Callable[..., Any]


@dataclass(frozen=True)
class Role(ABC):
    """Base of the roles. `first` names the first parameter of the module's forward."""

    first: str

    def input(self, args: tuple, kwargs: dict) -> Tensor:
        return args[0] if args else kwargs[self.first]

    def with_input(self, x: Tensor, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with another input."""
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, self.first: x})

    @abstractmethod
    def run(self, module: nn.Module, patch: Patch, inner: Inner, args: tuple, kwargs: dict) -> Any:
        """Calls `inner`, the module's own method, with what it was given or something merged."""


def run_inside(frame: Frame | None, function: Inner, *args: Any, **kwargs: Any) -> Any:
    """Calls `function` with `frame` as the current one, whichever thread this is."""
    before = enter_frame(frame)
    try:
        return function(*args, **kwargs)
    finally:
        enter_frame(before)


def refuse_outside(patch: Patch, module: nn.Module) -> None:
    if patch.rooted:
        raise RuntimeError(
            f"a {type(module).__name__} patched by tomesd ran outside its model's forward, where "
            "image size and timestep are unknown; call the model, or remove_patch() first"
        )
