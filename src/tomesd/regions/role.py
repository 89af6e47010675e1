"""What all roles have in common."""

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
        """Calls `inner`, the module's own method, with what it was given or something merged."""
