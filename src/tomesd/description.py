"""What a patch does to a model at an image size, found by running the model on shapes alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .api import patched
from .dry_run import count_flops
from .hosts import FoundModel, UnsupportedModelError, find_models
from .hosts.inputs import example_inputs
from .machine import machine_of
from .patch import patch_of, role_of
from .rule import LeftAlone, Verdict
from .settings import Settings
from .state import Call, Decision, Patch, Scope, run_inside
from .steps import Moment, Steps


@dataclass(frozen=True)
class Level:
    """The blocks of a model that work on one grid."""

    downsample: int
    """How many times smaller than the latent."""
    grid: tuple[int, ...]
    """Rows and columns of tokens; of a video, frames before them."""
    blocks: int
    """That work on merged tokens, where any do."""
    tokens: int
    merged_tokens: int
    """Tokens that the merged layers work on; equal to `tokens` where nothing is merged."""
    left_alone: LeftAlone = ""
    """Why nothing is merged, where it could be."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row in the table for people to read."""
        merged = str(self.merged_tokens) if self.merged_tokens < self.tokens else "-"
        if self.left_alone:
            merged = f"left alone: {self.left_alone}"
        grid = "x".join(map(str, self.grid))
        return f"1/{self.downsample}", grid, str(self.blocks), str(self.tokens), merged


@dataclass(frozen=True)
class Part:
    """One patched model: a UNet, a transformer, a ControlNet."""

    name: str
    settings: Settings | None
    """None if the model is not patched."""
    latent: tuple[int, int]
    levels: tuple[Level, ...]
    blocks: int
    """All transformer blocks of the model."""
    flops: int
    """Floating-point operations of one call without merging; 0 if they are unknown."""
    merged_flops: int
    """The same with merging, what the matching costs included."""
    verdict: Verdict | None = None
    """What `when="if_faster"` expects on this machine, in eager mode."""
    coarse_tokens: int | None = None
    """Tokens at a step that is coarse; 0 if none can be, None if they are unknown."""
    coarse_flops: int = 0
    """Floating-point operations of one call at such a step; 0 if they are unknown."""
    reused_flops: int = 0
    """The same at a step that leaves out what it can reuse."""
    steps: int | None = None
    """Of the image that `share_of_image` is about."""

    @property
    def saved(self) -> float:
        """Share of the operations that merging saves; 0 if they are unknown."""
        return 1 - self.merged_flops / self.flops if self.flops else 0.0

    @property
    def share_of_image(self) -> float | None:
        """Share of the operations of an unmerged image that are left, over all of its steps. None
        if it is unknown: no number of steps was given, or settings change from step to step."""
        settings = self.settings
        if settings is None or self.steps is None or self.flops == 0:
            return None
        changes = settings.schedule is not None or settings.tau is not None
        if changes or (settings.coarse and self.coarse_tokens is None):
            return None
        total, steps = 0, Steps()
        for progress in (number / self.steps for number in range(self.steps)):
            total += self._flops_at(settings, progress, steps)
        return total / (self.steps * self.flops)

    def _flops_at(self, settings: Settings, progress: float, steps: Steps) -> int:
        """Operations of the next of the steps."""
        if settings.is_coarse(progress) and self.coarse_tokens:
            steps.restart()
            return self.coarse_flops
        steps.enter(-progress, progress, ())
        if settings.reuse is not None and steps.moment(settings).reuses:
            return self.reused_flops
        start, end = settings.span
        return self.merged_flops if start <= progress <= end else self.flops

    def __str__(self) -> str:
        h, w = self.latent
        first, *more = self._summary()
        lines = [f"{self.name}, latent {h}x{w}: {first}", *(f"  {words}" for words in more)]
        if self.verdict is not None and self.settings is not None:
            lines.append(f"  {self.verdict}")
        rows: list[tuple[str, ...]] = [("level", "grid", "blocks", "tokens", "merged to")]
        rows += [level.cells for level in self.levels]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            lines.append("  " + "  ".join(c.rjust(n) for c, n in zip(row, widths, strict=True)))
        return "\n".join(lines)

    def _summary(self) -> Iterator[str]:
        settings = self.settings
        if settings is None:
            yield "not patched"
            return
        yield self._merging(settings)
        if settings.coarse and self.coarse_tokens == 0:
            yield "no step can be coarse"
        elif settings.coarse:
            words = f"coarse up to progress {settings.coarse:g}"
            if self.coarse_tokens is not None:
                share = self.coarse_flops / self.flops
                words += f", {self.coarse_tokens} tokens with {share:.1%} of the operations"
            yield words
        if settings.reuse is not None:
            yield self._reusing(settings)
        whole = self.share_of_image
        if whole is not None:
            yield f"an image of {self.steps} steps takes {whole:.1%} of the operations"

    def _reusing(self, settings: Settings) -> str:
        if 0 < self.flops == self.reused_flops:
            return "no step can be left out"
        start = settings.reuse_start or 0
        last = f" to {settings.reuse_end}" if settings.reuse_end else ""
        words = f"one step in {settings.reuse}{last} runs the whole model, from progress {start:g}"
        if self.flops == 0:
            return f"{words} on"
        return f"{words} on, and the others {self.reused_flops / self.flops:.1%} of the operations"

    def _merging(self, settings: Settings) -> str:
        if all(level.merged_tokens == level.tokens for level in self.levels):
            return "nothing is merged"
        kinds = " + ".join(settings.kinds) if settings.target == "attn" else settings.target
        saved = "operations unknown, as the model looks into its data"
        if self.flops > 0:
            saved = f"{self.saved:.1%} of {self.flops / 1e9:.3g} GFLOPs saved"
        return f"{kinds} merged at ratio {settings.ratio:g}, {saved}"


@dataclass(frozen=True)
class Description:
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.parts))


def describe(
    model: Any,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    *,
    steps: int | None = None,
    batch: int = 2,
    inputs: Any = None,
) -> Description:
    """What merges where at an image size: regions, blocks, tokens, and the share of FLOPs saved.

    The model runs on shapes without data: nothing is computed, and its weights are not touched.
    Where the ratio changes on the way, this is the call at which it is `ratio`.

    Args:
        model: as in `apply_patch`, patched or not.
        height, width: of the image, in pixels; the model's own if None, or 512 if it names none.
        num_frames: of a video; a few if None. Models of images ignore it.
        steps: of an image, to tell what all of them save together.
        batch: of one call of the model; guidance runs conditional and unconditional as 2.
        inputs: keyword arguments of the model's forward, for models whose inputs we cannot make up.
    """
    _check_count("batch", batch, 1)
    size, frames = _latent_size(model, height, width), _latent_frames(model, num_frames)
    found = [part for part in find_models(model) if part.rooted]
    if not found:
        raise UnsupportedModelError(
            f"describe needs a whole model, which receives the timestep; {type(model).__name__} "
            "is a part of one"
        )
    if steps is not None:
        _check_count("steps", steps, 1)
    if any(patch_of(part.module) is not None for part in found):
        parts = (_part(part, size, frames, batch, inputs) for part in found)
        return Description(tuple(replace(part, steps=steps) for part in parts))
    with patched(model, ratio=0.0):
        parts = (_part(part, size, frames, batch, inputs) for part in found)
        return Description(tuple(replace(part, settings=None) for part in parts))


# What pipelines call the pixels and the frames that become one of the latent.
_SPATIAL = (
    "vae_scale_factor",
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_spatial_scale_factor",
)
_IN_ONE = {"BriaPipeline": 2}
"""Pipelines that count so many latent pixels, of which they make a token, as one."""
_TEMPORAL = (
    "vae_scale_factor_temporal",
    "vae_temporal_compression_ratio",
    "vae_temporal_scale_factor",
)


def _latent_size(model: Any, height: int | None, width: int | None) -> tuple[int, int]:
    scale, own = _first_int(model, _SPATIAL, 8), _own_size(model)
    height = own[0] * scale if height is None else height
    width = own[1] * scale if width is None else width
    _check_count("height", height, scale, " pixels")
    _check_count("width", width, scale, " pixels")
    in_one = _IN_ONE.get(type(model).__name__, 1)
    return in_one * (height // scale), in_one * (width // scale)


def _latent_frames(model: Any, num_frames: int | None) -> int:
    if num_frames is None:
        return 8
    _check_count("num_frames", num_frames, 1)
    return (num_frames - 1) // _first_int(model, _TEMPORAL, 4) + 1


def _check_count(name: str, value: Any, least: int, unit: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: must be an int of at least {least}{unit}")


def _first_int(model: Any, names: tuple[str, ...], otherwise: int) -> int:
    found = (getattr(model, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), otherwise)


def _own_size(model: Any) -> tuple[int, int]:
    """Height and width of the latent that a model is made for; 64 if it does not say."""
    denoisers = (getattr(model, name, None) for name in ("unet", "transformer"))
    configs = (getattr(part, "config", None) for part in (model, *denoisers))
    sides = (getattr(config, "sample_size", None) for config in configs)
    side = getattr(model, "default_sample_size", None) or next(filter(None, sides), 64)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return int(height), int(width)


def _part(found: FoundModel, size: tuple[int, int], frames: int, batch: int, inputs: Any) -> Part:
    module, patch = found.module, patch_of(found.module)
    assert patch is not None
    if inputs is None:
        inputs = example_inputs(module, size, batch, frames)
    if inputs is None:
        raise UnsupportedModelError(
            f"describe cannot make up inputs for {type(module).__name__}; "
            "pass them: describe(model, height, width, inputs={...})"
        )
    settings = patch.settings
    if settings.share == "steps":  # nothing made here may be kept for a real call
        settings = replace(settings, share="level")
    weight = next(module.parameters())
    if settings.when == "if_faster":
        machine_of(weight.device, weight.dtype)  # nothing can be measured on shapes alone
    decided = _decide(found, patch, settings, size, inputs)  # reads where tokens are, with data
    merging = Call(patch, settings, size)
    flops = count_flops(module, Call(patch, Settings(ratio=0.0), size), inputs)
    merged_flops = None if flops is None else count_flops(module, merging, inputs)
    if flops is None or merged_flops is None:
        merging, flops, merged_flops = decided, 0, 0
    # Nothing merges in a coarse step, and that needs no warning.
    coarse_call = Call(patch, settings, size, ratio=0.0, coarse=True)
    coarse_tokens, coarse_flops = _coarse(found, coarse_call, inputs)
    return Part(
        name=found.name,
        settings=patch.settings,
        latent=size,
        levels=_levels(merging.decisions),
        blocks=found.blocks,
        flops=flops,
        merged_flops=merged_flops,
        verdict=merging.verdict,
        coarse_tokens=coarse_tokens,
        coarse_flops=coarse_flops,
        reused_flops=_reused(found, patch, size, inputs) if flops > 0 else 0,
    )


def _coarse(found: FoundModel, call: Call, inputs: Any) -> tuple[int | None, int]:
    """Tokens and operations of a coarse step, where they can be counted."""
    if not call.settings.coarse or found.row is None:
        return None, 0
    flops = count_flops(found.module, call, inputs)
    if flops is None:
        return None, 0
    return call.decisions[0].tokens if call.coarse else 0, flops


def _reused(found: FoundModel, patch: Patch, size: tuple[int, int], inputs: Any) -> int:
    """Operations of a step that leaves out what it can reuse."""
    if patch.settings.reuse is None:
        return 0
    settings = replace(patch.settings, ratio=0.0, schedule=None, ratio_end=None, extrapolate=False)
    call = Call(patch, settings, size, moment=Moment(reuses=True))
    return count_flops(found.module, call, inputs) or 0


def _decide(
    found: FoundModel, patch: Patch, settings: Settings, size: tuple[int, int], inputs: Any
) -> Call:
    """What a transformer would merge, found without running it."""
    call = Call(patch, settings, size)
    if found.row is not None:
        root = role_of(found.module)
        assert root is not None
        run_inside(Scope(call), root.run, found.module, patch, lambda **_: None, (), inputs)
    return call


def _levels(decisions: list[Decision]) -> tuple[Level, ...]:
    """One row per grid, finest first."""
    levels: dict[Any, Level] = {}
    for decision in decisions:
        grid = decision.grid if decision.grid[0] > 1 else decision.grid[1:]
        left = decision.tokens - decision.remove
        level = Level(decision.level, grid, 0, decision.tokens, left, decision.left_alone)
        before = levels.get(level, level)
        levels[level] = replace(before, blocks=before.blocks + decision.blocks)
    return tuple(sorted(levels.values(), key=lambda level: -level.tokens))
