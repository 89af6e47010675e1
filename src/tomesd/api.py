"""The verbs of the library: patch a model, and undo it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from .hosts import find_modules, find_noise, find_targets
from .patch import patch_of, restore, swap
from .planning import shared_plan
from .presets import Preset, changed
from .presets import preset as preset_options
from .roles import Block, Layer, Norm, Projection, Role
from .settings import (
    Backend,
    Metric,
    Protect,
    Schedule,
    Selector,
    Settings,
    Share,
    Target,
    When,
)
from .shared import Patch

__all__ = ["apply_patch", "patched", "remove_patch"]

_log = logging.getLogger("tomesd")
_Model = TypeVar("_Model")


def apply_patch(
    model: _Model,
    ratio: float = 0.5,
    max_downsample: int | None = None,
    sx: int = 2,
    sy: int = 2,
    use_rand: bool = True,
    merge_attn: bool = True,
    merge_crossattn: bool = False,
    merge_mlp: bool = False,
    *,
    seed: int = 0,
    window: int | None = None,
    share: Share = "block",
    refresh: int = 4,
    when: When = "if_faster",
    backend: Backend = "auto",
    selector: Selector = "bipartite",
    metric: Metric = "input",
    target: Target = "attn",
    proportional: bool = False,
    schedule: Schedule = None,
    ratio_end: float | None = None,
    start: float = 0.0,
    end: float = 1.0,
    tau: float | None = None,
    level_ratios: Mapping[int, float] | None = None,
    kind_ratios: Mapping[str, float] | None = None,
    protect: Protect = None,
    protect_share: float = 0.1,
    preset: Preset | None = None,
) -> _Model:
    """Makes `model` merge tokens. Patching again replaces the patch before.

    Args:
        model: a diffusers pipeline or model, an ldm model, or a wrapper around one. It is changed
            in place. A pipeline's ControlNet is patched too.
        ratio, max_downsample, sx, sy, use_rand, merge_attn, merge_crossattn, merge_mlp, seed,
            window, share, refresh, when, backend, selector, metric, target, proportional, schedule,
            ratio_end, start, end, tau, level_ratios, kind_ratios, protect, protect_share: see
            `Settings`.
        preset: "quality", "balanced" or "fast": settings that have been measured. Options that are
            given besides, and differ from their defaults, win over it.

    Returns:
        `model` itself.

    Raises:
        ValueError, TypeError: an option is out of range or of the wrong type.
        UnsupportedModelError: no known transformer block in the model.
            Whichever is raised, the model is as it was.
    """
    settings = Settings(
        ratio=ratio,
        max_downsample=max_downsample,
        sx=sx,
        sy=sy,
        use_rand=use_rand,
        merge_attn=merge_attn,
        merge_crossattn=merge_crossattn,
        merge_mlp=merge_mlp,
        seed=seed,
        window=window,
        share=share,
        refresh=refresh,
        when=when,
        backend=backend,
        selector=selector,
        metric=metric,
        target=target,
        proportional=proportional,
        schedule=schedule,
        ratio_end=ratio_end,
        start=start,
        end=end,
        tau=tau,
        level_ratios=level_ratios,
        kind_ratios=kind_ratios,
        protect=protect,
        protect_share=protect_share,
    )
    if preset is not None:
        settings = Settings(**{**preset_options(preset), **changed(settings)})
    targets = find_targets(model)
    noise = find_noise(model)
    noise.check(settings)
    remove_patch(model)
    settings.warn_if_capped()
    try:
        for place in targets:
            blocks = sum(isinstance(role, Block) for _, role in place.sites)
            patch = Patch(settings, place.rooted, shared_plan, noise, blocks)
            for module, role in place.sites:
                if _plays(role, settings):
                    swap(module, role, patch)
    except BaseException:
        remove_patch(model)  # nothing is half applied
        raise
    _log.info("merging tokens in %s", ", ".join(place.name for place in targets))
    return model


def _plays(role: Role, settings: Settings) -> bool:
    """Whether a role is needed: a wrapper that does nothing still takes time."""
    if isinstance(role, Layer):
        return role.kind in settings.layers
    if isinstance(role, Norm):
        return settings.target == "attn" and "attn" in settings.layers
    return settings.proportional or not isinstance(role, Projection)


def remove_patch(model: _Model) -> _Model:
    """Undoes `apply_patch`, whatever else has been done to the model since. Returns `model`."""
    for module in _patched_modules(model):
        restore(module)
    return model


@contextmanager
def patched(model: _Model, *args: Any, **options: Any) -> Iterator[_Model]:
    """`apply_patch(model, ...)` for the time of a `with` block; then what was before is back."""
    before = next((patch_of(module) for module in _patched_modules(model)), None)
    apply_patch(model, *args, **options)
    try:
        yield model
    finally:
        remove_patch(model)
        if before is not None:
            apply_patch(model, **vars(before.settings))


def _patched_modules(model: Any) -> list[nn.Module]:
    modules = (m for part in find_modules(model).values() for m in part.modules())
    return [module for module in modules if patch_of(module) is not None]
