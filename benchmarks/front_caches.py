"""The caches that front.py compares with, and a count of what blocks compute."""

import ast
import functools
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig


def config(
    cache: str,
    options: dict[str, Any],
    model: Any,
    steps: int,
    calibrate: Callable[[Any], None],
) -> Any:
    """What `enable_cache` of the model is given.

    Args:
        calibrate: makes a few images with a model.
    """
    if cache == "first block":
        return FirstBlockCacheConfig(**options)
    if cache == "taylor":
        # Whole blocks are left out. Otherwise only attention would be.
        return TaylorSeerCacheConfig(use_lite_mode=True, **options)
    measured = magnitudes(model, steps, calibrate)
    return MagCacheConfig(mag_ratios=measured, num_inference_steps=steps, **options)


@contextmanager
def deep_cache(pipe: Any, options: dict[str, Any]) -> Iterator[None]:
    """A UNet with DeepCache, of the package of that name (not installed with the others)."""
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe)
    helper.set_params(**options)
    helper.enable()
    try:
        yield
    finally:
        helper.disable()


def magnitudes(model: Any, steps: int, calibrate: Callable[[Any], None]) -> list[float]:
    """How much the residual of the blocks grows from step to step, which MagCache goes by."""
    model.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=steps))
    printed = io.StringIO()  # it tells its result in no other way
    with redirect_stdout(printed):
        calibrate(model)
    model.disable_cache()
    lists = [line for line in printed.getvalue().splitlines() if line.startswith(("[0", "[1"))]
    return ast.literal_eval(lists[-1])


@contextmanager
def counted_tokens(transformer: Any) -> Iterator[list[int]]:
    """Counts the image tokens that blocks work on, in a list of one number."""
    count, forwards = [0], {}
    for name in ("transformer_blocks", "single_transformer_blocks"):
        for block in getattr(transformer, name, ()):
            forwards.setdefault(type(block), type(block).forward)

    def counting(forward: Any) -> Any:
        @functools.wraps(forward)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            count[0] += tokens.shape[0] * tokens.shape[1]
            return forward(self, *args, **kwargs)

        return run

    for cls, forward in forwards.items():
        cls.forward = counting(forward)
    try:
        yield count
    finally:
        for cls, forward in forwards.items():
            cls.forward = forward
