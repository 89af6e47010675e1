"""Finds the models to patch and the modules in them, using the tables of the hosts."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from ..outline import Outline, outline_blocks, outline_model
from ..regions import Role
from ..schedule import Shift, Timeline
from ..settings import Settings
from . import transformers, unets
from .names import class_names, is_comfy
from .table import TRANSFORMERS
from .table_comfy import COMFY_TRANSFORMERS
from .transformers import Transformer

Site = tuple[nn.Module, Role]


class UnsupportedModelError(RuntimeError):
    """The model has no block in which tomesd can merge tokens."""


@dataclass(frozen=True)
class FoundModel:
    """One model to patch: a UNet, a transformer, a ControlNet, or a part of one."""

    name: str
    module: nn.Module
    rooted: bool
    """Whether `module` receives the timestep."""
    row: Transformer | None = None
    """The table row of a diffusion transformer; None for other models."""
    wrapper: nn.Module | None = None
    """The wrapper that `torch.compile` made of `module`, if any. It has the role of the root too,
    so that values no graph can read are read outside the graph."""

    @property
    def kind(self) -> Literal["unet", "transformer"]:
        return "unet" if self.row is None else "transformer"

    @property
    def can_be_coarse(self) -> bool:
        """Whether it can be run on a coarser image."""
        if self.row is None:
            return unets.can_be_coarse(self.module)
        return self.row.coarse is not None

    @property
    def can_reuse(self) -> bool:
        """Whether steps can leave out a part of it."""
        return self.row is not None or unets.can_reuse(self.module)

    @property
    def preset_traits(self) -> dict[str, Any]:
        """What presets depend on, as arguments of `presets.preset`."""
        return {"kind": self.kind, "coarse": self.can_be_coarse, "reuse": self.can_reuse}

    def settings(self, asked: Settings) -> Settings:
        """Fills in the defaults of this kind of model where no option was given.

        Raises:
            ValueError: an option has no meaning on this model.
        """
        if self.row is None:
            return unets.fill_settings(asked, self.module)
        self.row.check_options(asked)
        unets.check_reuse(asked, self.row.name)
        metric = "clean" if self.row.flow else "input"
        # Tokens that have to merge with others do the least harm in those beside them.
        window = max(asked.sy, asked.sx) if asked.is_near_cap else None
        return asked.filled(**transformers.DEFAULTS, metric=metric, window=window)

    def timeline(self, of_scheduler: Timeline) -> Timeline:
        """The timeline of its timesteps: the row's, or else the scheduler's.

        A flow timeline from the scheduler takes precedence: it is ComfyUI's, where nodes can change
        it. The shift is the scheduler's too, unless the row knows how it grows with the image, or
        that the pipeline spaces steps by itself.
        """
        known = self.row.timeline if self.row is not None else None
        known = known(self.module) if callable(known) else known
        if known is None or of_scheduler.flow:
            return of_scheduler
        shift, given = known.shift, of_scheduler.shift
        if isinstance(shift, Shift) and isinstance(given, Shift):
            own = shift.growth is not None and given.growth is not None
            return known if own else replace(known, shift=given)
        return known

    def sites(self, settings: Settings) -> list[Site]:
        """The modules to patch, with their roles. One with two roles appears twice, inner first."""
        if self.row is None:
            sites = list(unets.sites(self.module, settings, self.rooted))
        else:
            sites = list(self.row.sites(self.module, settings))
        if self.wrapper is not None:
            sites.append((self.wrapper, sites[-1][1]))  # the root comes last
        return sites

    @property
    def blocks(self) -> int:
        """How many transformer blocks the model has."""
        return len(self._blocks)

    @property
    def _blocks(self) -> list[nn.Module]:
        if self.row is None:
            return [m for m in self.module.modules() if unets.is_block(m)]
        return [block for part in self.row.lists for block in getattr(self.module, part.path)]

    def outline(self) -> Outline:
        """The work that the model does, for estimates of its speed."""
        if self.row is None and not unets.is_block(self.module):
            return outline_model(self.module, unets.runs(self.module))
        return outline_blocks(self._blocks)


def find_models(model: Any) -> list[FoundModel]:
    """The models to patch in a pipeline, a model, or a wrapper around one."""
    found: list[FoundModel] = []
    refused = None
    for name, module in find_modules(model).items():
        known = {id(other.module) for other in found}
        try:
            found += [other for other in _models(name, module) if id(other.module) not in known]
        except UnsupportedModelError as error:  # such a ControlNet is left alone beside others
            refused = error
    if not found:
        if refused is not None:
            raise refused
        supported = "; ".join((*unets.NAMES, _name_transformers()))
        raise UnsupportedModelError(
            f"tomesd found no transformer block it knows in this {type(model).__name__}. "
            f"Supported: {supported}. Pass a pipeline, one of these models, or a wrapper around "
            "one."
        )
    return found


_ROWS = {row.name: row for row in TRANSFORMERS}
_COMFY_ROWS = {row.name: row for row in COMFY_TRANSFORMERS}


def find_row(module: nn.Module) -> Transformer | None:
    """The row of a transformer's class, or of the nearest base class that has one."""
    rows = _COMFY_ROWS if is_comfy(module) else _ROWS
    return next((rows[name] for name in class_names(module) if name in rows), None)


def _name_transformers() -> str:
    """The supported transformers, as text for an error message."""
    names = [row.name for row in TRANSFORMERS if not row.reason]
    short = [re.sub(r"(Transformer([23]D)?)?(Model)?$", "", name) for name in names]
    comfy = [row.name for row in COMFY_TRANSFORMERS if not row.reason]
    return (
        f"diffusion transformers of Diffusers ({', '.join(short)}) and of ComfyUI "
        f"({', '.join(comfy)})"
    )


def find_modules(model: Any) -> dict[str, nn.Module]:
    """The torch modules in a pipeline, a model, or a wrapper around one, by name."""
    if isinstance(model, nn.Module):
        return {type(model).__name__: model}
    components = getattr(model, "components", None)  # a diffusers pipeline
    if isinstance(components, Mapping):
        return {k: v for k, v in components.items() if isinstance(v, nn.Module)}
    for attribute in ("model", "diffusion_model", "unet", "transformer"):
        inner = getattr(model, attribute, None)
        found = find_modules(inner) if inner is not None and inner is not model else {}
        if found:
            return found
    return {}


def _models(name: str, module: nn.Module) -> Iterator[FoundModel]:
    compiled = "OptimizedModule" in class_names(module)
    inner: Any = module._orig_mod if compiled else module
    wrapper = module if compiled else None
    row = find_row(inner)
    if row is not None:
        if row.reason:
            raise UnsupportedModelError(f"tomesd cannot merge tokens in {row.name}: {row.reason}")
        yield FoundModel(name, inner, True, row, wrapper)
        return
    if unets.is_block(module):
        yield FoundModel(name, module, False)
        return
    if not any(unets.is_stack(m) or find_row(m) is not None for m in module.modules()):
        return
    if unets.is_root(inner) and not _holds_transformer(inner):
        yield FoundModel(name, inner, True, wrapper=wrapper)
    elif unets.is_stack(module):
        yield FoundModel(name, module, False)
    else:  # a wrapper: the model is among its children
        for child_name, child in module.named_children():
            yield from _models(f"{name}.{child_name}", child)


def _holds_transformer(module: nn.Module) -> bool:
    return any(find_row(child) is not None for child in module.modules())
