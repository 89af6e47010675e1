"""Runs a model on shapes alone: no number is computed, and nothing of the run stays behind."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .kept import Kept
from .patch import original_class
from .selectors import plan_flops
from .state import Call, Patch, Scope, run_inside

_MOST_CONSTANTS = 1 << 24
"""Numbers in a tensor that a model may read, as some do to cut the text by its mask."""


def count_flops(module: nn.Module, call: Call, inputs: dict[str, Any]) -> int | None:
    """Floating-point operations of a patched model in a call; what it decides is noted there.

    None if it looks into the data to know what to do, as mixtures of experts do.
    """
    from torch._subclasses import fake_tensor  # slow to import
    from torch.utils.flop_counter import FlopCounterMode  # looks for triton

    # What torch's counter has no entry for: one attention kernel, and ours.
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(
        display=False, custom_mapping={cpu_attention: _attention_flops, **plan_flops()}
    )
    limit, fake_tensor.CONSTANT_NUMEL_LIMIT = fake_tensor.CONSTANT_NUMEL_LIMIT, _MOST_CONSTANTS
    try:
        with (
            _unchanged(module, call.patch),
            torch.no_grad(),
            fake_tensor.FakeTensorMode(allow_non_fake_inputs=True),
        ):
            constants = {name: _constant(name, value) for name, value in inputs.items()}
            with counter, torch.compiler.set_stance("force_eager"):
                run_inside(Scope(call), module, **constants)
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
        return None
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = limit
    return counter.get_total_flops()


@contextmanager
def _unchanged(module: nn.Module, patch: Patch) -> Iterator[None]:
    """Takes back what a model has kept for its next call: it would be tensors without data."""
    kept, patch.kept = patch.kept, Kept()
    attributes = [(vars(owner), dict(vars(owner))) for owner in _owners(module)]
    try:
        yield
    finally:
        patch.kept = kept
        for now, before in attributes:
            now.clear()
            now.update(before)
        _clear_caches(module)


def _clear_caches(module: nn.Module) -> None:
    """Empties the `lru_cache` of every method, which would give shapes without data to real calls.

    QwenImage has such methods; diffusers wraps them, so that the cache is in a closure.
    """
    classes = {cls for part in module.modules() for cls in type(part).__mro__}
    for method in (value for cls in classes for value in vars(cls).values()):
        closure = inspect.getclosurevars(method).nonlocals if inspect.isfunction(method) else {}
        for function in (method, *closure.values()):
            if isinstance(function, functools._lru_cache_wrapper):
                function.cache_clear()


def _owners(module: nn.Module) -> list[Any]:
    """What may keep tensors for the next call: all modules, and objects of the same package in
    them. AnyFlow keeps its positions in one of the first, Z-Image in one of the second kind."""
    parts = list(module.modules())
    package = original_class(module).__module__.split(".")[0]
    held = [value for part in parts for value in vars(part).values() if hasattr(value, "__dict__")]
    helpers = [value for value in held if type(value).__module__.split(".")[0] == package]
    return [*parts, *(value for value in helpers if not isinstance(value, nn.Module | type))]


def _constant(name: str, value: Any) -> Any:
    """A mask as a constant. Where tokens are has been read already, by the tensor itself."""
    if isinstance(value, Tensor) and not value.is_floating_point() and name != "img_ids":
        return torch.tensor(value.tolist(), dtype=value.dtype, device=value.device)
    return value


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count(q, k, v)  # type: ignore[no-untyped-call]
