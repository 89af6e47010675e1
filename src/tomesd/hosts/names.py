"""Names of classes and parameters, which the tables of hosts are about."""

import inspect

from torch import nn

from ..patch import original_class

__all__ = ["class_names", "is_comfy", "parameters"]


def class_names(module: nn.Module) -> list[str]:
    """Of the module's class and all it derives from: a subclass counts as what it derives from."""
    return [cls.__name__ for cls in type(module).__mro__]


def is_comfy(module: nn.Module) -> bool:
    """Whether it is a network of ComfyUI's, which have some of the names that diffusers has."""
    return type(module).__module__.startswith("comfy.ldm.")


def parameters(module: nn.Module, method: str = "forward") -> list[str]:
    """Names of the parameters of a method, without self."""
    return list(inspect.signature(getattr(original_class(module), method)).parameters)[1:]
