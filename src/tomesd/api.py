"""The verbs of the library: patch a model, and undo it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from .allowed import Backend, Depth, Metric, Protect, Schedule, Selector, Share, Target, When
from .hosts import FoundModel, Site, find_models, find_modules
from .hosts.timeline import find_timeline
from .machine import machine_of
from .patch import patch_of, restore, swap
from .presets import BEST, Preset, combined
from .presets import preset as preset_options
from .settings import DEFAULT, Settings
from .state import Patch

_log = logging.getLogger("tomesd")
_Model = TypeVar("_Model")
_Part = tuple[list[Site], Patch]
"""The modules to patch in one of the models found, with their roles, and what they share."""


def apply_patch(
    model: _Model,
    ratio: float = DEFAULT,
    max_downsample: int | None = DEFAULT,
    sx: int = DEFAULT,
    sy: int = DEFAULT,
    use_rand: bool = DEFAULT,
    merge_attn: bool = DEFAULT,
    merge_crossattn: bool = DEFAULT,
    merge_mlp: bool = DEFAULT,
    *,
    seed: int = DEFAULT,
    window: int | None = DEFAULT,
    share: Share | None = DEFAULT,
    refresh: int = DEFAULT,
    when: When = DEFAULT,
    backend: Backend = DEFAULT,
    selector: Selector = DEFAULT,
    metric: Metric | None = DEFAULT,
    target: Target | None = DEFAULT,
    depth: Depth | None = DEFAULT,
    st: int | None = DEFAULT,
    reference_ratio: float | None = DEFAULT,
    proportional: bool = DEFAULT,
    schedule: Schedule = DEFAULT,
    ratio_end: float | None = DEFAULT,
    start: float | None = DEFAULT,
    end: float | None = DEFAULT,
    tau: float | None = DEFAULT,
    reuse: int | None = DEFAULT,
    reuse_start: float | None = DEFAULT,
    reuse_end: int | None = DEFAULT,
    reuse_within: float | None = DEFAULT,
    reuse_attention: bool = DEFAULT,
    extrapolate: bool = DEFAULT,
    coarse: float | None = DEFAULT,
    level_ratios: Mapping[int, float] | None = DEFAULT,
    kind_ratios: Mapping[str, float] | None = DEFAULT,
    protect: Protect = DEFAULT,
    protect_share: float = DEFAULT,
    preset: Preset | None = None,
) -> _Model:
    """Makes `model` merge tokens. Patching again replaces the patch before.

    Args:
        model: a diffusers pipeline or model, an ldm model, or a wrapper around one. It is changed
            in place. All denoisers of a pipeline are patched, and its ControlNets.
        preset: "quality", "balanced" or "fast": settings that have been measured. Options that are
            given besides win over it. If nothing at all is given, it is "fast" on UNets and
            "balanced" on transformers.
        all others: see `Settings`, which also has their defaults.

    Returns:
        `model` itself.

    Raises:
        ValueError, TypeError: an option is out of range or of the wrong type, or means nothing on
            this model.
        UnsupportedModelError: no known transformer block in the model.
            Whichever is raised, the model is as it was.
    """
    given = {name: value for name, value in locals().items() if value is not DEFAULT}
    del given["model"], given["preset"]
    prepared = prepare(model, given, preset)
    remove_patch(model)
    prepared.parts[0][1].asked.warn_if_capped()
    try:
        _swap_all(prepared.parts)
    except BaseException:
        remove_patch(model)  # nothing is half applied
        raise
    for part, (_, patch) in zip(prepared.found, prepared.parts, strict=True):
        weight, settings = next(part.module.parameters(), None), patch.settings
        if weight is not None and settings.active and settings.when == "if_faster":
            # Ahead of time: a compiled model asks when nothing may be measured.
            machine_of(weight.device, weight.dtype)
    _log.info("merging tokens in %s", ", ".join(part.name for part in prepared.found))
    return model


@dataclass(frozen=True)
class Prepared:
    """What it takes to make a model merge tokens, found once, to be used for some of its calls."""

    found: list[FoundModel]
    parts: list[_Part]

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Makes the model merge for the time of a `with` block; then what was before is back."""
        before = _patches_in(self.found)
        _restore_all(before)
        try:
            _swap_all(self.parts)
            yield
        finally:
            _restore_all(self.parts)
            _swap_all(before)


def prepare(model: Any, options: Mapping[str, Any], preset: Preset | None = None) -> Prepared:
    """Finds what `apply_patch` would change in `model`, and changes nothing. Raises as it does."""
    if preset is None:  # which options may need, and which depends on the model
        Settings(**options)
    found = find_models(model)
    patches = [_make_patch(model, part, options, preset) for part in found]
    pairs = zip(found, patches, strict=True)
    return Prepared(found, [(part.sites(patch.settings), patch) for part, patch in pairs])


def _make_patch(
    model: Any, part: FoundModel, options: Mapping[str, Any], preset: Preset | None
) -> Patch:
    timeline = part.timeline(find_timeline(model))
    if not options and preset is None:
        preset = best_preset(model, part)
    if preset is not None:
        options = combined(preset_options(preset, **part.preset_traits), options)
    asked = Settings(**options)
    settings = part.settings(asked)
    timeline.check(settings)
    return Patch(settings, asked, part.rooted, timeline, part.outline())


def best_preset(model: Any, part: FoundModel) -> Preset | None:
    """The preset of a model for which no option is given; None if its times are unknown."""
    timeline = part.timeline(find_timeline(model))
    return BEST[part.kind] if part.rooted and timeline.noise is not None else None


def _patches_in(found: list[FoundModel]) -> list[_Part]:
    """The patches that models have now."""
    patches = [(part, patch_of(part.module)) for part in found]
    return [(part.sites(patch.settings), patch) for part, patch in patches if patch is not None]


def _swap_all(parts: list[_Part]) -> None:
    for sites, patch in parts:
        for module, role in sites:
            swap(module, role, patch)


def _restore_all(parts: list[_Part]) -> None:
    for sites, _ in parts:
        for module, _ in sites:
            restore(module)


def remove_patch(model: _Model) -> _Model:
    """Undoes `apply_patch`, whatever else has been done to the model since. Returns `model`."""
    for part in find_modules(model).values():
        for module in part.modules():
            if patch_of(module) is not None:
                restore(module)
    return model


@contextmanager
def patched(model: _Model, *args: Any, **options: Any) -> Iterator[_Model]:
    """`apply_patch(model, ...)` for the time of a `with` block; then what was before is back."""
    before = _patches_in(find_models(model))
    apply_patch(model, *args, **options)
    try:
        yield model
    finally:
        remove_patch(model)
        _swap_all(before)
