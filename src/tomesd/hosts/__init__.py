"""Finds the modules to patch in a model, from the tables of the host families."""

import inspect
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..patch import original_class
from ..roles import Block, Layer, Norm, Projection, Role, Root, Stack
from . import diffusers, ldm
from .noise import find_noise
from .table import (
    ALIGNED,
    ATTENTION,
    BLOCK,
    CONTEXT,
    INTERLEAVED,
    LAYERS,
    NORM,
    PROJECTIONS,
    UNFUSED,
)

__all__ = ["Target", "UnsupportedModelError", "find_modules", "find_noise", "find_targets"]

_FAMILIES = diffusers.FAMILIES + ldm.FAMILIES
_STACKS = {name: path for family in _FAMILIES for name, path in family.stacks.items()}
_DIRECT = {code: having for family in _FAMILIES for code, having in family.direct.items()}
_TIMESTEPS = ("timestep", "timesteps")


class UnsupportedModelError(RuntimeError):
    """The model has no block that tomesd knows how to merge tokens in."""


@dataclass(frozen=True)
class Target:
    """One model to patch: a UNet, a transformer, a ControlNet."""

    name: str
    module: nn.Module
    rooted: bool
    """Whether `module` receives the timestep."""
    sites: tuple[tuple[nn.Module, Role], ...]
    """What to patch, and in which role. A module with two roles appears twice, inner first."""


def find_targets(model: Any) -> list[Target]:
    """The models to patch in a pipeline, a model, or a wrapper around one."""
    targets: list[Target] = []
    for name, module in find_modules(model).items():
        found = list(_targets(name, module))
        known = {id(target.module) for target in targets}
        targets += [target for target in found if id(target.module) not in known]
    if not targets:
        families = "; ".join(family.name for family in _FAMILIES)
        raise UnsupportedModelError(
            f"tomesd found no transformer block it knows in this {type(model).__name__}. "
            f"Supported: {families}. Give a pipeline, one of these models, or a wrapper around one."
        )
    return targets


def find_modules(model: Any) -> dict[str, nn.Module]:
    """The torch modules in what a user calls a model, by name."""
    if isinstance(model, nn.Module):
        return {type(model).__name__: model}
    components = getattr(model, "components", None)  # a diffusers pipeline
    if isinstance(components, Mapping):
        return {k: v for k, v in components.items() if isinstance(v, nn.Module)}
    for attribute in ("model", "diffusion_model", "unet", "transformer"):
        inner = getattr(model, attribute, None)
        if inner is not None and inner is not model:
            return find_modules(inner)
    return {}


def _targets(name: str, module: nn.Module) -> Iterator[Target]:
    if BLOCK in _class_names(module):
        yield Target(name, module, False, tuple(_block_sites(module)))
        return
    sites = tuple(_stack_sites(module))
    if not sites:
        return
    root = _root_role(module)
    if root is not None:
        yield Target(name, module, True, (*sites, (module, root)))
    elif _stack_name(module) is not None:
        yield Target(name, module, False, sites)
    else:  # a wrapper: the model is further in
        for child_name, child in module.named_children():
            yield from _targets(f"{name}.{child_name}", child)


def _stack_sites(module: nn.Module) -> Iterator[tuple[nn.Module, Role]]:
    for stack in module.modules():
        stack_name = _stack_name(stack)
        blocks = getattr(stack, "transformer_blocks", None)
        if stack_name is None or blocks is None:
            continue
        found = [block for block in blocks.modules() if BLOCK in _class_names(block)]
        together = not hasattr(stack, INTERLEAVED)
        for block in found:
            first, last = block is found[0], block is found[-1]
            yield from _block_sites(block, first or not together, last or not together)
        path = _STACKS[stack_name]
        side = (operator.attrgetter(path)(stack) if path else None) or 1
        yield stack, Stack(_parameters(stack)[0], side)


def _block_sites(
    block: nn.Module, opens: bool = True, closes: bool = True
) -> Iterator[tuple[nn.Module, Role]]:
    for attribute, kind in LAYERS.items():
        layer = getattr(block, attribute, None)
        layer = getattr(layer, "_orig_mod", layer)  # compiled on its own
        if not isinstance(layer, nn.Module):
            continue
        names = _parameters(layer)
        if kind == "attn":
            yield from _projection_sites(layer)
        context = names[1] if len(names) > 1 and names[1] in CONTEXT else ""
        yield layer, Layer(names[0], kind, ALIGNED.get(kind, ()), context)
    method = "_forward" if hasattr(type(block), "_forward") else "forward"
    parameters = tuple(_parameters(block, method))
    code = _direct_code(block, method)
    if code:
        norm = getattr(block, NORM)
        yield norm, Norm(_parameters(norm)[0])
    role = Block(
        parameters[0],
        opens,
        closes,
        aligned=tuple(name for names in ALIGNED.values() for name in names),
        names=parameters,
        attention=ATTENTION,
        unfused=_unfused(getattr(block, ATTENTION, None)),
        norm=NORM,
        code=code,
    )
    yield block, role


def _direct_code(block: nn.Module, method: str) -> str:
    """The module with the block's code, if that hands what its norm gives to self-attention."""
    code: str = getattr(original_class(block), method).__module__
    having = _DIRECT.get(code)
    # A norm of another kind may give more than a tensor.
    if having is None or not isinstance(getattr(block, NORM, None), nn.LayerNorm):
        return ""
    fits = all(getattr(block, name, ...) == value for name, value in having.items())
    return code if fits else ""


def _unfused(attention: Any) -> tuple[str, ...]:
    """What does attention that writes its scores to memory: processors, or the class itself."""
    if not isinstance(attention, nn.Module) or hasattr(attention, "processor"):
        return UNFUSED
    cls = original_class(attention)
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return (cls.__name__,) if code is not None and "einsum" in code.co_names else ()


def _projection_sites(attention: nn.Module) -> Iterator[tuple[nn.Module, Role]]:
    for part in PROJECTIONS:
        module = getattr(attention, part, None)
        if isinstance(module, nn.ModuleList | nn.Sequential):  # the projection and a dropout
            module = module[0]
        if isinstance(module, nn.Module):
            yield module, Projection(_parameters(module)[0], part)  # type: ignore[arg-type]


def _root_role(module: nn.Module) -> Root | None:
    names = _parameters(module)
    for position, name in enumerate(names):
        if name in _TIMESTEPS:
            return Root(names[0], name, position)
    return None


def _stack_name(module: nn.Module) -> str | None:
    return next((name for name in _class_names(module) if name in _STACKS), None)


def _class_names(module: nn.Module) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__]


def _parameters(module: nn.Module, method: str = "forward") -> list[str]:
    """Names of the parameters of a method, without self."""
    return list(inspect.signature(getattr(original_class(module), method)).parameters)[1:]
