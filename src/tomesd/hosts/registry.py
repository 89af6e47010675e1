"""Registers patched classes where diffusers looks blocks up."""

import copy
import sys

from ..patch import class_made

__all__: list[str] = []


def _join_registry(base: type, patched: type) -> None:
    """Registers a generated class with diffusers' hooks, if its base is registered.

    Caches, and guidance that skips blocks, look blocks up by their exact class.
    """
    helpers = sys.modules.get("diffusers.hooks._helpers")
    registry = getattr(helpers, "TransformerBlockRegistry", None)
    if registry is None:
        return
    try:
        entry = registry.get(base)
    except ValueError:  # not a block
        return
    registry.register(patched, copy.copy(entry))  # `register` changes the entry


class_made.append(_join_registry)
