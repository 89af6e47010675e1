"""Swaps the classes of modules for generated subclasses, and back.

A generated class overrides a method or two and calls the original ones, looked up when they are
needed: nothing of a host is copied, and what others replace on the class later is respected. It has
its base's name, so regional compilation finds it under that name. What differs between blocks, the
role, is on the module: blocks of one class share what is compiled for that class.
"""

import copy
import functools
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import MethodType
from typing import Any

from torch import nn

from .compiler import around_graphs
from .regions import Block, Member, Role, Stack, TransformerRoot, UNetRoot
from .state import Patch, Scope, current_scope, is_idle, run_inside

_STATE, _ROLES = "_tomesd", "_tomesd_roles"
_CHECKPOINT = "_gradient_checkpointing_func"
_IMAGE_DONE = "_reset_stateful_cache"
"""What pipelines of diffusers call on their models when an image is done."""

_Key = tuple[type[Role], tuple[str, ...]]


def swap(module: nn.Module, role: Role, patch: Patch) -> None:
    """Makes `module` play `role` in `patch`. Roles add up: some models are root and stack."""
    before: Any = type(module)
    after = _patched_class(before, type(role), _methods(module, role))
    module.__dict__[_STATE] = patch
    module.__dict__.setdefault(_ROLES, {})[type(role).__name__] = role
    module.__class__ = after
    _rebind(module, before, after)


def restore(module: nn.Module) -> None:
    """Undoes every `swap` of `module`."""
    before: Any = type(module)
    after = original_class(module)
    module.__class__ = after
    module.__dict__.pop(_STATE, None)
    module.__dict__.pop(_ROLES, None)
    _rebind(module, before, after)


def patch_of(module: nn.Module) -> Patch | None:
    return module.__dict__.get(_STATE)


def role_of(module: nn.Module) -> Role | None:
    """The outermost role that `module` plays."""
    roles = module.__dict__.get(_ROLES)
    return [*roles.values()][-1] if roles else None


def original_class(module: nn.Module) -> Any:
    """The class of `module` before any `swap`."""
    cls: Any = type(module)
    while hasattr(cls, "_tomesd_base"):
        cls = cls._tomesd_base
    return cls


def _methods(module: nn.Module, role: Role) -> tuple[str, ...]:
    """The methods to override so that the role is played on every way into the module."""
    if isinstance(role, UNetRoot | TransformerRoot):
        # Entering twice is harmless, and not at all is not: `forward` is passed by when a UI
        # replaces it on the instance, `__call__` by what was compiled before the patch.
        return ("__call__", "forward")
    if isinstance(role, Block | Member) and hasattr(type(module), "_forward"):
        return ("_forward",)
    if "forward" in module.__dict__ and not list(_bound_forwards(module, type(module))):
        return ("__call__",)  # an unknown wrapper: all we can do is stay around it
    return ("forward",)


@functools.cache
def _patched_class(base: Any, kind: type[Role], methods: tuple[str, ...]) -> Any:
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce,
        "_tomesd_base": base,
        "_tomesd_key": (kind, methods),
    }
    if issubclass(kind, Stack | TransformerRoot):
        namespace[_CHECKPOINT] = property(_checkpoint_in_scope, _set_checkpoint)
    if issubclass(kind, UNetRoot | TransformerRoot):
        namespace[_IMAGE_DONE] = _forget_image
    cls = type(base.__name__, (base,), namespace)
    for name in methods:
        method = _method(cls, kind, name)
        setattr(cls, name, property(_in_scope(method)) if name == "_forward" else method)
    _register(base, cls)
    return cls


def _register(base: type, cls: type) -> None:
    """Registers a generated class with diffusers, if its base is registered.

    Caches, and guidance that skips blocks, look blocks up by their exact class.
    """
    helpers = sys.modules.get("diffusers.hooks._helpers")
    registry = getattr(helpers, "TransformerBlockRegistry", None)
    if registry is not None:
        with suppress(ValueError):  # not a block
            registry.register(cls, copy.copy(registry.get(base)))  # `register` changes the entry


def _method(cls: type, kind: type[Role], name: str) -> Any:
    can_idle = not issubclass(kind, UNetRoot | TransformerRoot | Stack)

    @functools.wraps(getattr(cls, name))
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        patch = self.__dict__.get(_STATE)
        if patch is None or not isinstance(self, cls):  # a hook kept a method of an earlier patch
            return getattr(original_class(self), name)(self, *args, **kwargs)
        inner = getattr(super(cls, self), name)
        if can_idle and is_idle(patch):
            return inner(*args, **kwargs)
        role: Role = self.__dict__[_ROLES][kind.__name__]
        return role.run(self, patch, inner, args, kwargs)

    # The compiler makes graphs of a function's code, up to a limit, which all patched classes would
    # share if they had the code in common.
    own: Any = method
    own.__code__ = own.__code__.replace()
    return around_graphs(own) if kind in (Block, Member) else own


def _forget_image(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Makes the next call the first one of an image, also if it is at the time of the last one."""
    patch = patch_of(self)
    if patch is not None:
        patch.steps.restart()
    inner: Any = self._modules.get("_orig_mod", self)  # of the wrapper that torch.compile makes
    forget = getattr(original_class(inner), _IMAGE_DONE, None)
    if forget is not None:
        forget(inner, *args, **kwargs)


# Gradient checkpointing runs a block again in the backward pass, on another thread even, when the
# call of the model is long over. So what is handed to a checkpoint function is tied to the scope it
# is handed over in: in ldm that is the block's `_forward`, in diffusers the block itself.


def _in_scope(method: Any) -> Any:
    """Getter of a method that, whenever it is called, runs in the scope it was taken in."""

    def get(module: nn.Module) -> Any:
        return functools.partial(_resume, module, _scope_at(module), method, module)

    return get


def _checkpoint_in_scope(module: nn.Module) -> Any:
    """Getter of a checkpoint function that ties what it is given to the present scope."""
    checkpoint = module.__dict__.get(_CHECKPOINT)
    if checkpoint is None:
        raise AttributeError(_CHECKPOINT)
    scope = _scope_at(module)

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(_resume, module, scope, function), *args, **kwargs)

    return run


def _set_checkpoint(module: nn.Module, checkpoint: Any) -> None:
    module.__dict__[_CHECKPOINT] = checkpoint


def _resume(
    module: nn.Module, scope: Scope | None, function: Any, *args: Any, **kwargs: Any
) -> Any:
    if scope is not None and patch_of(module) is not scope.patch:
        raise RuntimeError(
            "the tomesd patch was removed or replaced between a forward pass with gradient "
            "checkpointing and its backward pass, which has to run the same layers again"
        )
    return run_inside(scope, function, *args, **kwargs)


def _scope_at(module: nn.Module) -> Scope | None:
    patch = patch_of(module)
    return current_scope(patch) if patch is not None else None


def _reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickles and copies as the original class and the roles on top of it."""
    keys: list[_Key] = []
    base: Any = type(self)
    while hasattr(base, "_tomesd_base"):
        keys.insert(0, base._tomesd_key)
        base = base._tomesd_base
    get_state = getattr(base, "__getstate__", None)  # object has one from Python 3.11 on
    state = get_state(self) if get_state else self.__dict__
    return _rebuild, (base, tuple(keys)), state


def _rebuild(base: Any, keys: tuple[_Key, ...]) -> nn.Module:
    for kind, methods in keys:
        base = _patched_class(base, kind, methods)
    return base.__new__(base)


def _rebind(module: nn.Module, before: Any, after: Any) -> None:
    """Points what hooks kept of the class `before` at the class `after`.

    accelerate and diffusers hook a module by putting a `forward` on the instance that calls the
    bound method they found there. Rebinding that method keeps the order "hook around our forward"
    whichever of the two came first.
    """
    for holder, name in list(_bound_forwards(module, before)):
        holder[name] = MethodType(after.forward, module)


def _bound_forwards(module: nn.Module, cls: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Where hooks keep `cls.forward` bound to `module`: (namespace, name)."""
    registry = module.__dict__.get("_diffusers_hook")
    references = getattr(registry, "_fn_refs", ())
    for holder in (module.__dict__, *(reference.__dict__ for reference in references)):
        for name, value in holder.items():
            bound = isinstance(value, MethodType) and value.__self__ is module
            if bound and value.__func__ is cls.forward:
                yield holder, name
