"""Names of classes and parameters, which the tables of hosts refer to."""

import inspect

from torch import nn

from ..patch import original_class


def class_names(owner: object) -> list[str]:
    """Names of an object's class and its bases, so that a subclass is treated like its base."""
    return [cls.__name__ for cls in type(owner).__mro__]


def is_comfy(module: nn.Module) -> bool:
    """Whether it is a network of ComfyUI: some of them share their name with one of diffusers."""
    return type(module).__module__.startswith("comfy.ldm.")


def parameters(module: nn.Module, method: str = "forward") -> list[str]:
    """Names of a method's parameters, without self."""
    return list(inspect.signature(getattr(original_class(module), method)).parameters)[1:]
