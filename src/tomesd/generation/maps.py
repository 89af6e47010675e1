"""Merge maps: which tokens shared a slot, as a picture."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

import tomesd

from ..hosts import find_models, find_modules
from ..patch import patch_of
from ..plan import MergePlan
from ..settings import Settings
from ..state import Scope
from .loading import denoiser


@dataclass(frozen=True)
class MergeMap:
    """The slots of one image's tokens in one block at one step."""

    layer: str
    """Name of the block it was recorded at."""
    timestep: float
    downsample: int
    slot: NDArray[np.int64]
    """Slot of each token, `[h, w]`."""

    @property
    def members(self) -> NDArray[np.int64]:
        """Tokens in the slot of each token, `[h, w]`."""
        counts: NDArray[np.int64] = np.bincount(self.slot.ravel())
        return counts[self.slot]


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


@torch.no_grad()
def map_of_image(
    pipe: Any, image: Image.Image, settings: Settings, *, noise: float = 0.3
) -> list[MergeMap]:
    """The maps of a given picture: it is noised to a share of the schedule, and denoised one step.

    Args:
        pipe: a Stable Diffusion pipeline.
        noise: where in the schedule, 0 (clean) to 1 (pure noise).
    """
    model, device = denoiser(pipe), denoiser(pipe).device
    pixels = torch.from_numpy(np.asarray(image.convert("RGB"))).permute(2, 0, 1)[None]
    pixels = pixels.to(device, model.dtype) / 127.5 - 1
    config = pipe.vae.config
    latent = pipe.vae.encode(pixels).latent_dist.mode()
    latent = (latent - (getattr(config, "shift_factor", None) or 0)) * config.scaling_factor
    steps = pipe.scheduler.config.num_train_timesteps
    timestep = torch.tensor([round(noise * (steps - 1))], device=device)
    generator = torch.Generator("cpu").manual_seed(settings.seed)
    drawn = torch.randn(latent.shape, generator=generator).to(latent)
    noisy = pipe.scheduler.add_noise(latent, drawn, timestep)
    text, _ = pipe.encode_prompt("", device, 1, False)
    with tomesd.patched(pipe, **asdict(settings)), record_maps(pipe) as maps:
        model(noisy, timestep, encoder_hidden_states=text)
    return maps


def draw_map(map: MergeMap, image: Image.Image) -> Image.Image:
    """The picture as its slots see it: each in the mean colour of its tokens, and paler.

    Tokens that stayed alone are drawn as they are, and no line crosses them: what is pale was
    merged, with thin white lines between the slots, and what looks like the picture was kept.

    Args:
        image: the picture that the tokens belong to, of any size.
    """
    h, w = map.slot.shape
    scale = max(8, image.width // w)  # pixels per token
    tokens = _token_colors(image, h, w)
    slot = map.slot.ravel()
    count = np.bincount(slot)
    flat = tokens.reshape(-1, 3)
    mean = np.stack([np.bincount(slot, flat[:, c]) / count for c in range(3)], axis=1)[slot]
    canvas = np.kron(_paler(mean, 0.35).reshape(h, w, 3), np.ones((scale, scale, 1)))
    original = np.asarray(image.convert("RGB").resize((w * scale, h * scale)), dtype=float)
    alone = np.kron(map.members == 1, np.ones((scale, scale), dtype=bool))
    canvas[alone] = original[alone]
    lines = _borders(map.slot, map.members, scale)
    canvas[lines] = _paler(canvas[lines], 0.6)
    return Image.fromarray(canvas.round().clip(0, 255).astype(np.uint8))


def _token_colors(image: Image.Image, h: int, w: int) -> NDArray[np.float64]:
    small = image.convert("RGB").resize((w, h), Image.Resampling.BOX)
    return np.asarray(small, dtype=float)


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
