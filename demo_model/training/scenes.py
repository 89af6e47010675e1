"""Compose scenes on the GPU from sprites held in its memory."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tomesd_demo_model.captions import PATTERNS

SHADOW_STRENGTH = 0.35
SHADOW_OFFSET = (0.02, 0.05)
# Where each halved copy of a sprite lies in its 256 x 384 texture: x, y, side.
MIP_LEVELS = ((0, 0, 256), (256, 0, 128), (256, 128, 64), (256, 192, 32))
TEXTURE_SIZE = (256, 384)


class Composer:
    """Turns batches of scene descriptions (see `data.describe`) into pictures."""

    def __init__(self, sprites: Path, device: torch.device | str, seed: int = 0) -> None:
        rgba = torch.from_numpy(np.load(sprites)["sprites"]).permute(0, 3, 1, 2)
        self.textures = _with_mip_levels(rgba.float().div(255)).to(device)
        left, top, side = MIP_LEVELS[-1]
        self.shapes = self.textures[:, 3:4, top : top + side, left : left + side].contiguous()
        self.levels = torch.tensor(MIP_LEVELS, dtype=torch.float32, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)

    @torch.no_grad()
    def __call__(self, scenes: dict[str, Tensor], side: int, chunk: int = 128) -> Tensor:
        """Pictures [B, 3, side, side] in [-1, 1]."""
        device = self.textures.device
        scenes = {key: value.to(device, non_blocking=True) for key, value in scenes.items()}
        total = len(scenes["sprite"])
        parts = [
            self._compose({k: v[i : i + chunk] for k, v in scenes.items()}, side)
            for i in range(0, total, chunk)
        ]
        return torch.cat(parts)

    @torch.no_grad()
    def layout(self, scenes: dict[str, Tensor], side: int) -> tuple[Tensor, Tensor]:
        """What lies in each cell of a grid over the pictures.

        kind [B, side, side]: 0 for the background, else 1 + the object's index; spot
        [B, side, side, 2]: where in that object's own frame the cell lies, [-0.5, 0.5].
        """
        batch, device = len(scenes["sprite"]), self.shapes.device
        kind = torch.zeros(batch, side, side, dtype=torch.long, device=device)
        spot = self.shapes.new_zeros(*kind.shape, 2)
        for slot in range(scenes["sprite"].shape[1]):
            thing = {k: v[:, slot] for k, v in _objects(scenes).items()}
            here = torch.stack(_local_coordinates(thing["place"], thing["angle"], side), dim=-1)
            shape = F.grid_sample(self.shapes[thing["sprite"]], 2 * here, align_corners=False)[:, 0]
            covered = shape * thing["visible"][:, None, None] > 0.5
            kind = torch.where(covered, thing["sprite"][:, None, None] + 1, kind)
            spot = torch.where(covered[..., None], here, spot)
        return kind, spot

    def _compose(self, scenes: dict[str, Tensor], side: int) -> Tensor:
        picture = self._background(scenes, side)
        for slot in range(scenes["sprite"].shape[1]):
            picture = self._paste(picture, {k: v[:, slot] for k, v in _objects(scenes).items()})
        return picture.mul(2).sub(1).clamp(-1, 1)

    def _background(self, scenes: dict[str, Tensor], side: int) -> Tensor:
        """Two colours mixed by the pattern's mask, under slightly uneven light: [B, 3, s, s]."""
        clouds = sum(
            self._smooth_noise(scenes, side, cells) / (i + 1) for i, cells in enumerate((3, 6, 12))
        )
        mask = _pattern_masks(scenes["style"], clouds, side, self._view(scenes, side))
        # An index made on the CPU would make the host wait for the GPU at every batch.
        rows = torch.arange(len(mask), device=mask.device)
        mask = mask[rows, scenes["pattern"]].unsqueeze(1)
        first, second = scenes["colors"][:, :, :, None, None].unbind(1)
        light = 1 + 0.06 * self._smooth_noise(scenes, side, 3)
        return (torch.lerp(first, second, mask) * light[:, None]).clamp(0, 1)

    def _view(self, scenes: dict[str, Tensor], side: int) -> tuple[Tensor, Tensor]:
        """Where in the background the pixels lie: x and y that broadcast to [B, side, side]."""
        return _grid(side, self.textures.device)

    def _smooth_noise(self, scenes: dict[str, Tensor], side: int, cells: int) -> Tensor:
        grid = self._noise(len(scenes["pattern"]), cells)
        return F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=True)[:, 0]

    def _noise(self, batch: int, cells: int) -> Tensor:
        device = self.textures.device
        return torch.randn(batch, 1, cells, cells, generator=self.generator, device=device)

    def _paste(self, picture: Tensor, thing: dict[str, Tensor]) -> Tensor:
        """Draw one object per picture, its soft shadow first."""
        side = picture.shape[-1]
        x, y = _local_coordinates(thing["place"], thing["angle"], side)
        # Between 0.8 and 1.6 texture pixels per picture pixel: neither blurred nor aliased.
        pixels = thing["place"][:, 2] * side
        level = (torch.log2(256 / pixels) + 0.3).floor().clamp(0, len(MIP_LEVELS) - 1).long()
        box = self.levels[level]
        texture = self.textures[thing["sprite"]]
        visible = thing["visible"][:, None, None, None]
        dx, dy = SHADOW_OFFSET
        shadow = _sample(texture[:, 4:], x - dx, y - dy, box) * visible
        sprite = _sample(texture[:, :4], x, y, box) * visible
        picture = picture * (1 - SHADOW_STRENGTH * shadow)
        return sprite[:, :3] + (1 - sprite[:, 3:]) * picture


def _objects(scenes: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: scenes[key] for key in ("sprite", "place", "angle", "visible")}


def _with_mip_levels(rgba: Tensor) -> Tensor:
    """[K, 4, 256, 256] premultiplied -> [K, 5, 256, 384]: RGBA and blurred alpha, all levels."""
    kernel = torch.exp(-torch.linspace(-2.5, 2.5, 25).square() / 2)
    kernel /= kernel.sum()
    alpha = rgba[:, 3:]
    alpha = F.conv2d(alpha, kernel.view(1, 1, 1, -1), padding=(0, 12))
    alpha = F.conv2d(alpha, kernel.view(1, 1, -1, 1), padding=(12, 0))
    picture = torch.cat([rgba, alpha], dim=1)
    texture = picture.new_zeros(len(rgba), 5, *TEXTURE_SIZE)
    for x, y, side in MIP_LEVELS:
        texture[:, :, y : y + side, x : x + side] = F.adaptive_avg_pool2d(picture, side)
    return texture


def _grid(side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pixel centres in picture units: x [1, 1, side] and y [1, side, 1]."""
    centres = (torch.arange(side, device=device) + 0.5) / side
    return centres.view(1, 1, -1), centres.view(1, -1, 1)


def _local_coordinates(place: Tensor, angle: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Position of every pixel in the object's own frame, [-0.5, 0.5] inside: two [B, s, s]."""
    x, y = _grid(side, place.device)
    cx, cy, size = (value[:, None, None] for value in place.unbind(1))
    x, y = (x - cx) / size, (y - cy) / size
    cos, sin = (f(angle)[:, None, None] for f in (torch.cos, torch.sin))
    return x * cos + y * sin, y * cos - x * sin


def _sample(texture: Tensor, x: Tensor, y: Tensor, box: Tensor) -> Tensor:
    """Read `texture` at object coordinates inside its mip level `box` [B, 3]: [B, C, s, s]."""
    left, top, side = (value[:, None, None] for value in box.unbind(1))
    height, width = TEXTURE_SIZE
    grid_x = 2 * (left + (x + 0.5) * side) / width - 1
    grid_y = 2 * (top + (y + 0.5) * side) / height - 1
    inside = (x.abs() < 0.5) & (y.abs() < 0.5)
    grid = torch.stack([grid_x, grid_y], dim=-1)
    return F.grid_sample(texture, grid, align_corners=False) * inside.unsqueeze(1)


def _pattern_masks(style: Tensor, clouds: Tensor, side: int, view: tuple[Tensor, Tensor]) -> Tensor:
    """Mixing masks [B, patterns, s, s] in [0, 1], in the order of PATTERNS.

    `style` [B, 5] are random numbers in [0, 1): angle, frequency, two phases, shape.
    """
    x, y = view
    angle, frequency, phase_x, phase_y, shape = (v[:, None, None] for v in style.unbind(1))
    cos, sin = torch.cos(angle * math.tau), torch.sin(angle * math.tau)
    u = (x - 0.5) * cos + (y - 0.5) * sin
    v = (y - 0.5) * cos - (x - 0.5) * sin

    def wave(position: Tensor, cycles: Tensor, phase: Tensor) -> Tensor:
        return torch.sin(math.tau * (position * cycles + phase))

    def sharp(value: Tensor, cycles: Tensor) -> Tensor:
        return (0.5 + value * side / (math.tau * cycles)).clamp(0, 1)

    centre = torch.sqrt((x - 0.2 - 0.6 * phase_x) ** 2 + (y - 0.2 - 0.6 * phase_y) ** 2)
    gradient = torch.where(shape < 0.3, centre * 1.3, u / 1.1 + 0.5).clamp(0, 1)
    stripes, checks, dots = 4 + 5 * frequency, 2.5 + 2 * frequency, 4 + 4 * frequency
    bent = u + (0.03 + 0.03 * shape) * wave(v, 1.5 + 1.5 * phase_y, phase_y)
    cell_u, cell_v = ((p * dots + phase_x) % 1 - 0.5 for p in (u, v))
    radius = 0.22 + 0.12 * shape
    masks = {
        "plain": torch.zeros_like(gradient),
        "gradient": gradient,
        "striped": sharp(wave(u, stripes, phase_x), stripes),
        "checkered": sharp(wave(u, checks, phase_x) * wave(v, checks, phase_y), checks),
        "dotted": ((radius - torch.hypot(cell_u, cell_v)) * side / dots + 0.5).clamp(0, 1),
        "wavy": sharp(wave(bent, stripes, phase_x), stripes),
        "cloudy": torch.sigmoid(2.2 * clouds),
    }
    return torch.stack([masks[name].expand_as(gradient) for name in PATTERNS], dim=1)
