"""Puts patched classes where diffusers looks blocks up."""

import copy
import sys

from ..patch import class_made

__all__: list[str] = []


def _join_registry(base: type, patched: type) -> None:
    """Puts a new class beside its base in the registry of diffusers' hooks.

    Caches, and guidance that skips blocks, find them there by the class itself.
    """
    helpers = sys.modules.get("diffusers.hooks._helpers")
    registry = getattr(helpers, "TransformerBlockRegistry", None)
    if registry is None:
        return
    try:
        entry = registry.get(base)
    except ValueError:  # not a block
        return
    registry.register(patched, copy.copy(entry))  # a copy, because an entry notes its class


class_made.append(_join_registry)
