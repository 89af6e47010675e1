"""What a patch does to a model at an image size, found by running the model on shapes alone."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .api import patched
from .grids import level_of
from .hosts import Target, UnsupportedModelError, find_targets
from .hosts.inputs import example_inputs
from .patch import patch_of
from .policy import Call, Frame, Visit
from .roles import run_inside
from .selectors import plan_flops
from .settings import Settings
from .shared import LeftAlone, Patch

__all__ = ["Description", "Level", "Part", "describe"]


@dataclass(frozen=True)
class Level:
    """The blocks of a model that work on one grid."""

    downsample: int
    """How many times smaller than the latent."""
    grid: tuple[int, int]
    blocks: int
    tokens: int
    merged_tokens: int
    """Tokens that the merged layers work on; equal to `tokens` where nothing is merged."""
    left_alone: LeftAlone = ""
    """Why nothing is merged, where it could be."""


@dataclass(frozen=True)
class Part:
    """One patched model: a UNet, a transformer, a ControlNet."""

    name: str
    settings: Settings | None
    """None if the model is not patched."""
    latent: tuple[int, int]
    levels: tuple[Level, ...]
    flops: int
    """Floating-point operations of one call without merging."""
    merged_flops: int
    """The same with merging, what the matching costs included."""

    @property
    def saved(self) -> float:
        """Share of the operations that merging saves."""
        return 1 - self.merged_flops / self.flops

    def __str__(self) -> str:
        h, w = self.latent
        lines = [f"{self.name}, latent {h}x{w}: {self._summary()}"]
        rows = [("level", "grid", "blocks", "tokens", "merged to")]
        for level in self.levels:
            merged = str(level.merged_tokens) if level.merged_tokens < level.tokens else "-"
            if level.left_alone:
                merged = f"left alone: {level.left_alone}"
            grid = f"{level.grid[0]}x{level.grid[1]}"
            cells = (f"1/{level.downsample}", grid, str(level.blocks), str(level.tokens), merged)
            rows.append(cells)
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            lines.append("  " + "  ".join(c.rjust(n) for c, n in zip(row, widths, strict=True)))
        return "\n".join(lines)

    def _summary(self) -> str:
        if self.settings is None:
            return "not patched"
        if all(level.merged_tokens == level.tokens for level in self.levels):
            return "nothing is merged"
        target = self.settings.target
        kinds = " + ".join(self.settings.kinds if target == "attn" else (target,))
        return (
            f"{kinds} merged at ratio {self.settings.ratio:g}, "
            f"{self.saved:.1%} of {self.flops / 1e9:.3g} GFLOPs saved"
        )


@dataclass(frozen=True)
class Description:
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.parts))


def describe(
    model: Any, height: int = 512, width: int = 512, *, batch: int = 2, inputs: Any = None
) -> Description:
    """What merges where at an image size: levels, blocks, tokens, and the share of FLOPs saved.

    The model runs on shapes without data: nothing is computed, and its weights are not touched.

    Args:
        model: as in `apply_patch`, patched or not.
        height, width: of the image, in pixels.
        batch: of one call of the model; guidance runs conditional and unconditional as 2.
        inputs: keyword arguments of the model's forward, for models whose inputs we cannot make up.
    """
    scale = getattr(model, "vae_scale_factor", 8)
    for name, value in (("height", height), ("width", width)):
        if not isinstance(value, int) or isinstance(value, bool) or value < scale:
            raise ValueError(f"{name}={value!r}: must be an int of at least {scale} pixels")
    size = (height // scale, width // scale)
    targets = [target for target in find_targets(model) if target.rooted]
    if not targets:
        raise UnsupportedModelError(
            f"describe needs a whole model, which receives the timestep; {type(model).__name__} "
            "is a part of one"
        )
    if any(patch_of(target.module) is not None for target in targets):
        return Description(tuple(_part(target, size, batch, inputs) for target in targets))
    with patched(model, ratio=0.0):
        parts = (_part(target, size, batch, inputs) for target in targets)
        return Description(tuple(replace(part, settings=None) for part in parts))


def _part(target: Target, size: tuple[int, int], batch: int, inputs: Any) -> Part:
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    patch = patch_of(target.module)
    assert patch is not None
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        given = inputs if inputs is not None else example_inputs(target.module, size, batch)
        if given is None:
            raise UnsupportedModelError(
                f"describe cannot make up inputs for {type(target.module).__name__}; "
                "pass them: describe(model, height, width, inputs={...})"
            )
        flops, _ = _run(target.module, patch, Settings(ratio=0.0), size, given)
        settings = patch.settings
        if settings.share == "steps":  # nothing made here may be kept for a real call
            settings = replace(settings, share="level")
        merged_flops, visits = _run(target.module, patch, settings, size, given)
    levels = _levels(visits, size)
    return Part(target.name, patch.settings, size, levels, flops, merged_flops)


def _run(
    module: nn.Module, patch: Patch, settings: Settings, size: tuple[int, int], inputs: Any
) -> tuple[int, list[Visit]]:
    """Operations of one call, and the stacks of blocks that it came through."""
    from torch.utils.flop_counter import FlopCounterMode  # looks for triton

    call = Call(size)
    # What torch's counter has no entry for: one attention kernel, and ours.
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(
        display=False,
        custom_mapping={cpu_attention: _attention_flops, **plan_flops()},
    )
    with counter, torch.compiler.set_stance("force_eager"):
        run_inside(Frame(patch, call, settings), module, **inputs)
    return counter.get_total_flops(), call.visits


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count(q, k, v)  # type: ignore[no-untyped-call]


def _levels(visits: list[Visit], size: tuple[int, int]) -> tuple[Level, ...]:
    """One row per grid, finest first."""
    blocks: dict[tuple[tuple[int, int], int, LeftAlone], int] = {}
    for visit in visits:
        key = (visit.grid, visit.remove, visit.left_alone)
        blocks[key] = blocks.get(key, 0) + visit.blocks
    levels = []
    for (grid, remove, left_alone), count in blocks.items():
        tokens = grid[0] * grid[1]
        level = level_of(size, grid)
        levels.append(Level(level, grid, count, tokens, tokens - remove, left_alone))
    return tuple(sorted(levels, key=lambda level: -level.tokens))
