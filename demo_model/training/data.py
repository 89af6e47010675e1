"""Scene descriptions made by worker processes, and a pool of latents kept on the GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tokenizer import WordTokenizer
from tomesd_demo_model.captions import COLORS, PATTERNS, Scene, sample_scene

MAX_OBJECTS = 4
MAX_ANGLE = 0.25
# Of an object's side, how far it reaches from its centre.
RADIUS = 0.45
# Side of an object in picture units, by how many share the picture: they fill most of it.
SIZES = {1: (0.72, 1.0), 2: (0.54, 0.70), 3: (0.47, 0.60), 4: (0.43, 0.54)}
_PATTERN_INDEX = {name: i for i, name in enumerate(PATTERNS)}
_COLOR_INDEX = {name: i for i, name in enumerate(COLORS)}
_RGB = np.array(list(COLORS.values()), dtype=np.float32) / 255


def describe(scenes: list[Scene], tokenizer: WordTokenizer, seed: int) -> dict[str, Tensor]:
    """Draw everything a scene leaves open (places, sizes, shades) and pack it for `Composer`.

    Keys, with B scenes and 4 slots: sprite, visible, angle [B, 4]; place [B, 4, 3] (x, y, side);
    pattern [B]; colors [B, 2, 3]; style [B, 5]; tokens [B, MAX_TOKENS]; color [B, 2] (which
    colours were named) and count [B], which only the classifier reads.
    """
    rng = np.random.default_rng(seed)
    batch = len(scenes)
    sprite = np.zeros((batch, MAX_OBJECTS), dtype=np.int64)
    count = np.zeros(batch, dtype=np.int64)
    for row, scene in enumerate(scenes):
        kinds = [kind for kind, number in scene.groups for _ in range(number)]
        # The order of drawing is not the order of the caption.
        sprite[row, : len(kinds)] = rng.permutation(kinds)
        count[row] = len(kinds)
    visible = np.arange(MAX_OBJECTS) < count[:, None]
    named = [[_COLOR_INDEX[name] for name in s.background.colors] for s in scenes]
    arrays = {
        "sprite": sprite,
        "visible": visible.astype(np.float32),
        "place": _place(rng, count, visible),
        "angle": rng.uniform(-MAX_ANGLE, MAX_ANGLE, (batch, MAX_OBJECTS)).astype(np.float32),
        "pattern": np.array([_PATTERN_INDEX[s.background.pattern] for s in scenes]),
        "colors": np.stack([_shades(rng, s) for s in scenes]),
        "style": rng.random((batch, 5), dtype=np.float32),
        "tokens": np.array([tokenizer(s.caption) for s in scenes], dtype=np.int64),
        "color": np.array([[row[0], row[-1]] for row in named]),
        "count": count,
    }
    return {key: torch.from_numpy(value) for key, value in arrays.items()}


def _place(rng: np.random.Generator, count: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Of 48 random placements per scene keep the one that overlaps least: [B, 4, 3]."""
    low, high = np.array([SIZES[int(n)] for n in count], dtype=np.float32).T
    size = low[:, None] + (high - low)[:, None] * rng.random(visible.shape, dtype=np.float32)
    radius = RADIUS * size
    spot = rng.random((len(count), 48, MAX_OBJECTS, 2), dtype=np.float32)
    room = radius[:, None, :, None]
    spot = room + (1 - 2 * room) * spot
    best = spot[np.arange(len(count)), overlap(spot, radius, visible).argmin(axis=1)]
    return np.concatenate([best, size[..., None]], axis=-1)


def overlap(spot: np.ndarray, radius: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """How much the objects of K placements [B, K, 4, 2] cover each other: [B, K]."""
    total = np.zeros(spot.shape[:2], dtype=np.float32)
    for i in range(MAX_OBJECTS):
        for j in range(i):
            distance = np.linalg.norm(spot[:, :, i] - spot[:, :, j], axis=-1)
            depth = np.maximum(0, (radius[:, i] + radius[:, j])[:, None] - distance)
            total += depth**2 * (visible[:, i] & visible[:, j])[:, None]
    return total


def _shades(rng: np.random.Generator, scene: Scene) -> np.ndarray:
    """The background's two colours, slightly varied; one name means two shades of it."""
    names = scene.background.colors
    colors = [_RGB[_COLOR_INDEX[name]] for name in names]
    if len(names) == 1:
        bright = colors[0].mean() > 0.7
        target = np.float32(0.0 if bright else 1.0)
        colors.append(colors[0] + (target - colors[0]) * rng.uniform(0.15, 0.30))
        if rng.random() < 0.5:
            colors.reverse()
    varied = np.stack(colors) + rng.normal(0, 0.02, (2, 3))
    return varied.clip(0, 1).astype(np.float32)


class SceneStream(IterableDataset):
    """Endless batches of training scenes; every worker draws its own."""

    def __init__(self, tokenizer: WordTokenizer, batch: int, seed: int) -> None:
        self.tokenizer, self.batch, self.seed = tokenizer, batch, seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = torch.utils.data.get_worker_info()
        worker = info.id if info else 0
        rng = random.Random(f"{self.seed}-{worker}")
        while True:
            scenes = [sample_scene(rng) for _ in range(self.batch)]
            yield describe(scenes, self.tokenizer, rng.getrandbits(48))


def scene_batches(
    tokenizer: WordTokenizer, batch: int, seed: int, workers: int
) -> Iterator[dict[str, Tensor]]:
    """Batches made ahead by `workers` processes (0: made when asked for)."""
    stream = SceneStream(tokenizer, batch, seed)
    ahead = {"prefetch_factor": 4} if workers else {}
    return iter(DataLoader(stream, batch_size=None, num_workers=workers, **ahead))


class LatentPool:
    """A ring of encoded scenes on the GPU; every batch adds a few and draws from all.

    Composing and encoding a picture costs as much as a good part of a training step, so each
    scene is used several times, with other noise and another timestep.
    """

    def __init__(
        self,
        encode: Callable[[dict[str, Tensor]], Tensor],
        scenes: Iterator[dict[str, Tensor]],
        capacity: int,
        keep: tuple[str, ...] = ("tokens",),
    ) -> None:
        """`keep` names the keys of a scene description that are kept beside its latents."""
        self.encode, self.scenes, self.capacity, self.keep = encode, scenes, capacity, keep
        self.latents: Tensor | None = None
        self.kept: dict[str, Tensor] = {}
        self.written = 0

    def add(self) -> None:
        """Encode one more batch of scenes over the oldest ones."""
        scenes = next(self.scenes)
        latents = self.encode(scenes)
        device = latents.device
        kept = {key: scenes[key].to(device, non_blocking=True) for key in self.keep}
        if self.latents is None:
            self.latents = latents.new_empty(self.capacity, *latents.shape[1:])
            self.kept = {k: v.new_empty(self.capacity, *v.shape[1:]) for k, v in kept.items()}
        index = (self.written + torch.arange(len(latents), device=device)) % self.capacity
        self.latents[index] = latents
        for key, value in kept.items():
            self.kept[key][index] = value
        self.written += len(latents)

    def draw(self, batch: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Random latents [batch, ...] and the kept parts of their descriptions."""
        while self.written < batch:
            self.add()
        assert self.latents is not None
        filled = min(self.written, self.capacity)
        index = torch.randint(filled, (batch,), device=self.latents.device)
        return self.latents[index], {key: value[index] for key, value in self.kept.items()}
