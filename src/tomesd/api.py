"""The verbs of the library: patch a model, and undo it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from torch import nn

from .hosts import find_modules, find_targets
from .patch import patch_of, restore, swap
from .policy import Patch
from .roles import Layer
from .settings import Backend, Settings, Share, When

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
) -> _Model:
    """Makes `model` merge tokens. Patching again replaces the patch before.

    Args:
        model: a diffusers pipeline or model, an ldm model, or a wrapper around one. It is changed
            in place. A pipeline's ControlNet is patched too.
        ratio, max_downsample, sx, sy, use_rand, merge_attn, merge_crossattn, merge_mlp, seed,
            window, share, refresh, when, backend: see `Settings`.

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
    )
    targets = find_targets(model)
    remove_patch(model)
    settings.warn_if_capped()
    try:
        for target in targets:
            patch = Patch(settings, target.rooted)
            for module, role in target.sites:
                # A wrapper that does nothing still takes time.
                if not isinstance(role, Layer) or settings.merges[role.kind]:
                    swap(module, role, patch)
    except BaseException:
        remove_patch(model)  # nothing is half applied
        raise
    _log.info("merging tokens in %s", ", ".join(target.name for target in targets))
    return model


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
            apply_patch(model, **asdict(before.settings))


def _patched_modules(model: Any) -> list[nn.Module]:
    modules = (m for part in find_modules(model).values() for m in part.modules())
    return [module for module in modules if patch_of(module) is not None]
