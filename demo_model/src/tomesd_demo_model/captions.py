"""What the model understands: its objects, colours and backgrounds, and captions made of them.

A scene is one to four objects on one background. Every tenth combination of objects (chosen by
a hash of their names, so it is the same everywhere) was never shown in training; captions of
those combinations are the held-out set. Plain Python, no dependencies.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TypeVar

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (214, 48, 49),
    "orange": (245, 140, 40),
    "yellow": (250, 214, 64),
    "light green": (160, 222, 130),
    "green": (46, 150, 78),
    "teal": (28, 145, 150),
    "sky blue": (132, 203, 246),
    "blue": (44, 98, 216),
    "dark blue": (26, 36, 96),
    "purple": (124, 66, 190),
    "pink": (250, 156, 194),
    "brown": (128, 84, 54),
    "beige": (236, 221, 190),
    "grey": (140, 145, 150),
    "white": (248, 248, 248),
    "black": (24, 24, 28),
}
# Pattern of the background -> how often it is drawn.
PATTERNS: dict[str, float] = {
    "plain": 0.20,
    "gradient": 0.20,
    "striped": 0.13,
    "checkered": 0.13,
    "dotted": 0.10,
    "wavy": 0.12,
    "cloudy": 0.12,
}
# How many of each kind of object -> how often.
GROUPINGS: dict[tuple[int, ...], float] = {
    (1,): 0.28,
    (1, 1): 0.24,
    (2,): 0.08,
    (1, 1, 1): 0.10,
    (2, 1): 0.08,
    (3,): 0.05,
    (1, 1, 1, 1): 0.04,
    (2, 1, 1): 0.04,
    (2, 2): 0.04,
    (3, 1): 0.03,
    (4,): 0.02,
}
HELD_OUT_EVERY = 10
# A caption may say nothing about the background, so that "a cat" alone works too.
SILENT_BACKGROUND = 0.06
_T = TypeVar("_T")
_NUMBERS = {2: "two", 3: "three", 4: "four"}


@dataclass(frozen=True)
class Object:
    """One thing the model can draw: its Unicode name, and what captions call it."""

    unicode_name: str
    name: str
    plural: str


@dataclass(frozen=True)
class Background:
    """`pattern` is a key of PATTERNS; one colour means shades of it, two mean both."""

    pattern: str
    colors: tuple[str, ...]


@dataclass(frozen=True)
class Scene:
    """`groups` holds (index into `objects()`, how many) pairs in the order of the caption."""

    groups: tuple[tuple[int, int], ...]
    background: Background
    caption: str


@cache
def objects() -> tuple[Object, ...]:
    """Everything the model was taught to draw, in the order of the label indices."""
    text = (files(__package__) / "objects.txt").read_text(encoding="utf-8")
    found = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        unicode_name, names = line.split(" = ")
        name, _, plural = names.partition(" / ")
        found.append(Object(unicode_name, name, plural or name + "s"))
    return tuple(found)


def sample_scene(rng: random.Random, *, held_out: bool = False) -> Scene:
    """Draw a scene whose combination of objects belongs to the split asked for."""
    while True:
        counts = _pick(rng, GROUPINGS)
        kinds = rng.sample(range(len(objects())), len(counts))
        order = rng.sample(range(len(counts)), len(counts))
        groups = tuple((kinds[i], counts[i]) for i in order)
        background = _sample_background(rng)
        if is_held_out(groups, background) == held_out:
            return Scene(groups, background, _caption(rng, groups, background))


def sample_scenes(count: int, seed: int = 0, *, held_out: bool = True) -> list[Scene]:
    """`count` scenes with different captions, each naming its objects and background."""
    rng = random.Random(seed)
    scenes: dict[str, Scene] = {}
    while len(scenes) < count:
        scene = sample_scene(rng, held_out=held_out)
        if " on " in scene.caption:
            scenes[scene.caption] = scene
    return list(scenes.values())


def sample_captions(count: int, seed: int = 0, *, held_out: bool = True) -> list[str]:
    """The captions of `sample_scenes`."""
    return [scene.caption for scene in sample_scenes(count, seed, held_out=held_out)]


def is_held_out(groups: tuple[tuple[int, int], ...], background: Background) -> bool:
    """Whether training never showed this set of objects (or one object on this background)."""
    names = sorted(objects()[kind].name for kind, _ in groups)
    if len(names) == 1:
        names += [background.pattern, *background.colors]
    digest = hashlib.sha1("|".join(names).encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_EVERY == 0


def _pick(rng: random.Random, weights: dict[_T, float]) -> _T:
    return rng.choices(list(weights), list(weights.values()))[0]


def _sample_background(rng: random.Random) -> Background:
    pattern = _pick(rng, PATTERNS)
    two = pattern != "plain" and rng.random() < 0.5
    return Background(pattern, tuple(rng.sample(list(COLORS), 2 if two else 1)))


def _caption(
    rng: random.Random, groups: tuple[tuple[int, int], ...], background: Background
) -> str:
    things = [_count(*group) for group in groups]
    text = things[0] if len(things) == 1 else ", ".join(things[:-1]) + " and " + things[-1]
    if rng.random() < SILENT_BACKGROUND:
        return text
    return f"{text} on {_article(_describe(rng, background))}"


def _count(kind: int, number: int) -> str:
    thing = objects()[kind]
    return _article(thing.name) if number == 1 else f"{_NUMBERS[number]} {thing.plural}"


def _article(words: str) -> str:
    return ("an " if words[0] in "aeiou" and not words.startswith("uni") else "a ") + words


def _describe(rng: random.Random, background: Background) -> str:
    # People write "sky-blue" as well as "sky blue".
    joint = "-" if rng.random() < 0.2 else " "
    pattern, colors = background.pattern, [c.replace(" ", joint) for c in background.colors]
    if pattern == "plain":
        return rng.choice(["", "plain "]) + colors[0] + " background"
    if pattern == "gradient":
        return " to ".join(colors) + " gradient" + rng.choice(["", " background"])
    return f"{' and '.join(colors)} {pattern} background"
