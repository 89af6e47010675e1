"""Merge maps: which tokens shared a slot, as a picture."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from ..hosts import find_models, find_modules
from ..patch import patch_of
from ..plan import MergePlan
from ..regions.coarse import SIDE
from ..settings import Settings
from ..state import Scope
from .hires import image_to_image
from .loading import denoiser
from .sampling import OnStep, Sample, Sampling, call_pipeline, merging, sample

_NOISES = 100
"""Levels of noise that a picture can be looked at with."""


@dataclass(frozen=True)
class MergeMap:
    """The slots of one image's tokens in one block at one step."""

    layer: str
    """Name of the block it was recorded at."""
    timestep: float
    downsample: int
    slot: NDArray[np.int64]
    """Slot of each token, `[h, w]`."""
    coarse: bool = False
    """Whether the model ran on a coarser image, on which each slot is one token."""
    reused: bool = False
    """Whether a part of the model was left out, and what it gave before was used again."""

    @property
    def slots(self) -> int:
        return int(self.slot.max()) + 1

    @property
    def members(self) -> NDArray[np.int64]:
        """Tokens in the slot of each token, `[h, w]`."""
        counts: NDArray[np.int64] = np.bincount(self.slot.ravel())
        return counts[self.slot]


@dataclass(frozen=True)
class StepMaps:
    """What one step of an image did."""

    maps: tuple[MergeMap, ...]
    """Of the blocks that merged."""
    finest: MergeMap | None
    """The finest tokens, each in a slot of its own, or as few as a coarser image has. None: the
    step ran no block."""
    reused: bool
    """See `MergeMap`."""

    @property
    def map(self) -> MergeMap | None:
        """The finest that merged, or that of a coarser image. None: neither was done."""
        coarse = self.finest if self.finest is not None and self.finest.coarse else None
        return min(self.maps, key=lambda map: map.downsample, default=coarse)

    @property
    def plain(self) -> bool:
        """Whether the model ran as it does without a patch."""
        return self.map is None and not self.reused


@contextmanager
def record_maps(model: Any, *, every_block: bool = True) -> Iterator[list[MergeMap]]:
    """Collects the map of every merged block, or run of blocks, inside the `with` block.

    Of a batch, it is that of the last item, which is conditional under guidance.

    Args:
        model: as in `apply_patch`, and patched.
        every_block: otherwise, it is the first block on each grid alone. To copy a map, the GPU has
            to wait: where time is taken, it should not do so at every block.
    """
    maps: list[MergeMap] = []
    call: Any = None  # the last one
    grids: set[Any] = set()  # of it that were recorded
    names = {
        id(module): f"{part_name}.{name}"
        for part_name, part in find_modules(model).items()
        for name, module in part.named_modules()
    }

    def record(scope: Scope, block: nn.Module, plan: MergePlan) -> None:
        nonlocal call, grids
        if scope.call is not call:
            call, grids = scope.call, set()
        if scope.grid in grids and not every_block:
            return
        grids.add(scope.grid)
        frames, h, w = scope.grid
        time = scope.call.timestep
        maps.append(
            MergeMap(
                layer=names[id(block)],
                timestep=0.0 if time is None else float(time.flatten()[-1]),
                downsample=scope.decision.level if scope.decision is not None else 1,
                slot=plan.slot[-1, : frames * h * w].reshape(frames * h, w).cpu().numpy(),
            )
        )

    patches = [patch_of(part.module) for part in find_models(model)]
    for patch in patches:
        if patch is not None:
            patch.observer = record
    try:
        yield maps
    finally:
        for patch in patches:
            if patch is not None:
                patch.observer = None


def sample_with_maps(
    pipe: Any, prompt: str, settings: Settings, on_step: OnStep | None = None, **options: Any
) -> tuple[Sample, list[StepMaps]]:
    """An image, and what each of its steps did.

    Args:
        options: as in `sample`.
    """
    steps: list[StepMaps] = []

    def note(done: int) -> None:
        steps.append(last_step(pipe, maps))
        maps.clear()
        if on_step is not None:
            on_step(done)

    with merging(pipe, settings), record_maps(pipe) as maps:
        made = sample(pipe, prompt, on_step=note, **options)
    return made, steps


def last_step(pipe: Any, maps: Sequence[MergeMap]) -> StepMaps:
    """What the last step of a patched pipeline did, which recorded these maps."""
    patch = patch_of(denoiser(pipe))
    if patch is None or not patch.decisions:
        return StepMaps(tuple(maps), None, patch is not None and patch.steps.reused)
    finest = patch.decisions[0]
    frames, h, w = finest.grid
    slot = np.arange(frames * h * w).reshape(frames * h, w)
    if patch.coarse:
        slot = np.kron(slot, np.ones((SIDE, SIDE), dtype=np.int64))
    whole = MergeMap("", 0.0, finest.level, slot, coarse=patch.coarse)
    return StepMaps(tuple(maps), whole, patch.steps.reused)


def map_at(steps: Sequence[StepMaps], number: int, level: int | None = None) -> MergeMap:
    """Of what the steps of an image did, the map of the first block that merges, at one step.

    Where nothing was merged at this step, every token has a slot of its own.

    Args:
        level: downsampling of the blocks; the finest that is merged at any step, if None.
    """
    if all(step.plain for step in steps):
        raise ValueError(
            "with these options, at this size and with so many steps, nothing is merged, made "
            "coarse or reused"
        )
    found = [map for step in steps for map in step.maps]
    found = found or [step.finest for step in steps if step.finest is not None]
    levels = sorted({map.downsample for map in found})
    level = levels[0] if level is None else level
    if level not in levels:
        raise ValueError(
            f"level={level}: merged are {', '.join(map(str, levels))}; --max-downsample merges more"
        )
    first, step = next(map for map in found if map.downsample == level), steps[number]
    merged = next((map for map in step.maps if map.layer == first.layer), None)
    if merged is None and step.map is not None and step.map.coarse:
        merged = step.map
    alone = replace(first, slot=np.arange(first.slot.size).reshape(first.slot.shape), coarse=False)
    return replace(merged or alone, reused=step.reused)


def map_title(map: MergeMap, step: int) -> str:
    words = [f"{map.slots} of {map.slot.size} tokens"] if map.slots < map.slot.size else []
    words += ["coarse"] if map.coarse else []
    words += ["reused"] if map.reused else []
    return f"step {step}: {', '.join(words) or 'all tokens computed'}"


def three_steps(steps: int) -> tuple[int, ...]:
    """An early, a middle and a late one, from 0; fewer of fewer steps."""
    return tuple(dict.fromkeys(round(share * (steps - 1)) for share in (0.1, 0.5, 0.9)))


def map_of_image(
    pipe: Any, image: Image.Image, settings: Settings, *, noise: float = 0.3
) -> StepMaps:
    """What a step does to a given picture, which is noised to a share of the schedule before.

    Args:
        pipe: one that diffusers has an image-to-image form of.
        noise: where in the schedule, 0 (clean) to 1 (pure noise).
    """
    form = image_to_image(pipe)
    inputs = {
        "prompt": "",
        "image": image.convert("RGB"),
        "strength": min(1.0, max(noise, 1 / _NOISES)),
        "output_type": "latent",
        "callback_on_step_end": _stop,
    }
    sampling = Sampling(*image.size, steps=_NOISES, guidance=1.0)
    with merging(form, settings), record_maps(form) as maps:
        call_pipeline(form, inputs, [settings.seed], sampling)
        return last_step(form, maps)


def _stop(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
    pipe._interrupt = True  # as diffusers documents it
    return values


def draw_map(map: MergeMap, image: Image.Image) -> Image.Image:
    """The picture as its slots see it: each in the mean colour of its tokens, and paler.

    Tokens that stayed alone are drawn as they are, and no line crosses them: what is pale was
    merged, with thin white lines between the slots, and what looks like the picture was kept.
    Where a part of the model was left out and nothing merged, the picture is grey.

    Args:
        image: the picture that the tokens belong to, of any size.
    """
    h, w = map.slot.shape
    scale = max(8, image.width // w)  # pixels per token
    left_out = map.reused and map.slots == map.slot.size
    image = image.convert("L" if left_out else "RGB").convert("RGB")
    tokens = np.asarray(image.resize((w, h), Image.Resampling.BOX), dtype=float)
    slot = map.slot.ravel()
    count = np.bincount(slot)
    flat = tokens.reshape(-1, 3)
    mean = np.stack([np.bincount(slot, flat[:, c]) / count for c in range(3)], axis=1)[slot]
    canvas = np.kron(_paler(mean, 0.35).reshape(h, w, 3), np.ones((scale, scale, 1)))
    original = np.asarray(image.resize((w * scale, h * scale)), dtype=float)
    alone = np.kron(map.members == 1, np.ones((scale, scale), dtype=bool))
    canvas[alone] = original[alone]
    lines = _borders(map.slot, map.members, scale)
    canvas[lines] = _paler(canvas[lines], 0.6)
    return Image.fromarray(canvas.round().clip(0, 255).astype(np.uint8))


def _paler(colors: NDArray[Any], share: float) -> NDArray[Any]:
    """Colours with this share of white."""
    return (1 - share) * colors + share * 255


def _borders(slot: NDArray[np.int64], members: NDArray[np.int64], scale: int) -> NDArray[np.bool_]:
    """Pixels on the line between merged tokens that are neighbours in different slots."""
    h, w = slot.shape
    lines = np.zeros((h * scale, w * scale), dtype=bool)
    merged = members > 1
    right = (slot[:, 1:] != slot[:, :-1]) & merged[:, 1:] & merged[:, :-1]
    below = (slot[1:] != slot[:-1]) & merged[1:] & merged[:-1]
    across, down = np.ones((scale, 1), dtype=bool), np.ones((1, scale), dtype=bool)
    lines[:, scale - 1 : -1 : scale] |= np.kron(right, across)
    lines[scale - 1 : -1 : scale] |= np.kron(below, down)
    return lines
