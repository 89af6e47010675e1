"""Clips: scenes whose objects move while the camera pans, and the transformer that draws them.

Latents of clips are those of their frames: the autoencoder knows nothing of time.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from config import VIDEO
from data import RADIUS, overlap
from flow import Text, euler, guided, initialise
from scenes import Composer

# Objects are smaller than in stills, or most would have nowhere to go.
SHRUNK = 0.75
# How often something moves, and how far it gets within a clip, in sides of the picture.
CAMERA = (0.6, 0.15, 0.50)
OBJECTS = (0.7, 0.12, 0.45)
_TRIES = 12


def with_motion(scenes: dict[str, Tensor], rng: np.random.Generator) -> dict[str, Tensor]:
    """A description (see `data.describe`) to which a clip's motion is added.

    New keys: move [B, 4, 2], the way of each object across the picture, and pan [B, 2], the way
    of the camera, both over the whole clip, which starts with the objects at `place`. What does
    not move by itself passes by as the background does, but nothing leaves the picture: captions
    stay true. Of a few motions the one after which objects cover each other least is taken.
    """
    place = scenes["place"].numpy() * np.array([1, 1, SHRUNK], dtype=np.float32)
    pan = _ways(rng, (len(place), 1, 1), *CAMERA)
    own = _ways(rng, (len(place), _TRIES, place.shape[1]), *OBJECTS)
    radius = RADIUS * place[..., 2]
    room = radius[:, None, :, None]
    end = (place[:, None, :, :2] + own - pan).clip(room, 1 - room)
    least = overlap(end, radius, scenes["visible"].numpy() > 0).argmin(axis=1)
    move = end[np.arange(len(place)), least] - place[..., :2]
    added = {"place": place, "move": move, "pan": pan[:, 0, 0]}
    return scenes | {key: torch.from_numpy(value) for key, value in added.items()}


def _ways(
    rng: np.random.Generator, shape: tuple[int, ...], often: float, low: float, high: float
) -> np.ndarray:
    """Vectors [*shape, 2] of random directions; some are zero."""
    length = rng.uniform(low, high, shape) * (rng.random(shape) < often)
    angle = rng.uniform(0, math.tau, shape)
    ways = np.stack([np.cos(angle), np.sin(angle)], axis=-1) * length[..., None]
    return ways.astype(np.float32)


def moments(scenes: dict[str, Tensor], frames: int) -> dict[str, Tensor]:
    """Every frame of every clip as a scene: [B, ...] -> [B * frames, ...], clip by clip.

    A single frame is the middle of its clip. `pan` becomes where the camera is, and `clip` says
    in which row the frame's clip begins.
    """
    device = scenes["move"].device
    time = ((torch.arange(frames, device=device) + 0.5) / frames).repeat(len(scenes["move"]))
    rows = {key: value.repeat_interleave(frames, dim=0) for key, value in scenes.items()}
    spot = rows["place"][..., :2] + time[:, None, None] * rows.pop("move")
    rows["place"] = torch.cat([spot, rows["place"][..., 2:]], dim=-1)
    rows["pan"] = rows["pan"] * (time[:, None] - 0.5)
    row = torch.arange(len(time), device=device)
    return rows | {"clip": row - row % frames}


class ClipComposer(Composer):
    """Composes the frames of clips, whose backgrounds pass by."""

    @torch.no_grad()
    def clips(self, scenes: dict[str, Tensor], side: int, frames: int, chunk: int = 128) -> Tensor:
        """Pictures [B, frames, 3, side, side] in [-1, 1]; about `chunk` frames are made at once."""
        device, count = self.textures.device, max(1, chunk // frames)
        scenes = {key: value.to(device, non_blocking=True) for key, value in scenes.items()}
        parts = []
        for i in range(0, len(scenes["sprite"]), count):
            rows = moments({key: value[i : i + count] for key, value in scenes.items()}, frames)
            parts.append(self._compose(rows, side).unflatten(0, (-1, frames)))
        return torch.cat(parts)

    def _view(self, scenes: dict[str, Tensor], side: int) -> tuple[Tensor, Tensor]:
        x, y = super()._view(scenes, side)
        pan = scenes["pan"]
        return x + pan[:, 0, None, None], y + pan[:, 1, None, None]

    def _smooth_noise(self, scenes: dict[str, Tensor], side: int, cells: int) -> Tensor:
        """Noise that reaches as far as the camera can: all frames of a clip see parts of one."""
        reach = 1 + CAMERA[2]
        grid = self._noise(len(scenes["clip"]), round((cells - 1) * reach) + 1)[scenes["clip"]]
        spot = torch.stack(torch.broadcast_tensors(*self._view(scenes, side)), dim=-1)
        spot = (spot - 0.5) * (2 / reach)
        return F.grid_sample(grid, spot, mode="bicubic", padding_mode="border", align_corners=True)[
            :, 0
        ]


def transformer() -> WanTransformer3DModel:
    """Untrained: every block starts as the identity and the prediction as zero."""
    model = WanTransformer3DModel(**VIDEO)
    initialise(model, r"proj_out|condition_embedder\.time_proj|.*\.attn2\.to_out\.0")
    for table in (model.scale_shift_table, *(block.scale_shift_table for block in model.blocks)):
        nn.init.zeros_(table)
    return model


def predict(model: nn.Module, noisy: Tensor, level: Tensor, text: Text) -> Tensor:
    """Direction [B, 4, F, h, w] at latents of that shape and noise levels [B] in [0, 1]."""
    return model(
        hidden_states=noisy,
        timestep=1000 * level,  # as WanPipeline gives it, unlike FluxPipeline
        encoder_hidden_states=text[0],
        return_dict=False,
    )[0]


@torch.no_grad()
def sample(
    model: nn.Module, text: Text, without: Text, noise: Tensor, *, guidance: float, steps: int
) -> Tensor:
    """Latents [B, 4, F, h, w] from noise of that shape, for captions `text`."""
    direction = functools.partial(predict, model)
    step = functools.partial(guided, direction, text=text, without=without, guidance=guidance)
    return euler(step, noise, noise[0, 0].numel() // 4, steps)
