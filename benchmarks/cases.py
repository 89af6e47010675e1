"""What speed.py measures: the cases of each table in docs/performance.md."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tomesd import Settings
from tomesd.bench import Case, Contender
from tomesd.presets import PRESETS

__all__ = ["CASES"]

DEFAULT = Settings()
FOR_THE_IMAGE = 1000
"""Steps: longer than any image takes."""
NAMES = {"sd15": "SD1.5", "sdxl": "SDXL"}


@dataclass(frozen=True)
class Setting:
    """One of the eight settings that the library is judged by.

    Everything is merged that it allows, also where that does not pay: the tables show what merging
    costs. A step runs on two latents per image.
    """

    name: str
    model: str
    side: int
    ratio: float
    max_downsample: int
    images: int = 1
    all_layers: bool = False

    @property
    def merge(self) -> Settings:
        return Settings(
            ratio=self.ratio,
            max_downsample=self.max_downsample,
            merge_crossattn=self.all_layers,
            merge_mlp=self.all_layers,
            when="always",
        )


EIGHT = (
    Setting("SD1.5 512 px, 8 images, r .5, level 1", "sd15", 512, 0.5, 1, images=8),
    Setting("SD1.5 1024 px, r .5, level 1", "sd15", 1024, 0.5, 1),
    Setting("SD1.5 2048 px, r .5, level 1", "sd15", 2048, 0.5, 1),
    Setting("SD1.5 2048 px, r .75, levels 1-2", "sd15", 2048, 0.75, 2),
    Setting("SDXL 1024 px, r .5, level 2", "sdxl", 1024, 0.5, 2),
    Setting("SDXL 1024 px, r .5, levels 2-4, all", "sdxl", 1024, 0.5, 4, all_layers=True),
    Setting("SDXL 2048 px, r .5, level 2", "sdxl", 2048, 0.5, 2),
    Setting("SDXL 2048 px, r .5, levels 2-4, all", "sdxl", 2048, 0.5, 4, all_layers=True),
)


def half(model: str, side: int, variants: Iterable[Contender], **more: Any) -> Case:
    """Square images in half precision, with fused attention unless said."""
    options = {"dtype": "float16", "attention": "sdpa", "device": "cuda", **more}
    return Case(model, side, side, tuple(variants), **options)


def the_original(merge: Settings, folder: str | None, mode: str = "eager") -> list[Contender]:
    """tomesd 0.1.3 if there is a folder of it. It cannot draw random numbers in a CUDA graph."""
    settings = replace(merge, use_rand=mode != "graph")
    return [] if folder is None else [Contender("original", settings, folder=folder)]


def eight(mode: str) -> Callable[[str | None], list[Case]]:
    """The eight settings, replayed as CUDA graphs or in eager mode, with the bound."""

    def cases(original: str | None) -> list[Case]:
        found = []
        for one in EIGHT:
            merge = one.merge
            kept = replace(merge, share="steps", refresh=FOR_THE_IMAGE)
            variants = [
                Contender("unpatched"),
                *the_original(merge, original, mode),
                Contender("free", merge),
                Contender("tomesd", kept, "plan kept"),
                Contender("tomesd", replace(merge, share="level"), "plan every step"),
                *merged(one),
            ]
            names = {"images": one.images, "section": mode, "setting": one.name}
            found.append(half(one.model, one.side, variants, mode=mode, **names))
        return found

    return cases


def merged(one: Setting) -> list[Contender]:
    every_block = Contender("tomesd", one.merge, "plan every block")
    stacks = Contender("tomesd", replace(one.merge, target="stack"), "whole stacks")
    return [every_block, stacks] if one.all_layers else [every_block]


def compiled(mode: str) -> Callable[[str | None], list[Case]]:
    """The eight settings, compiled."""

    def cases(_: str | None) -> list[Case]:
        found = []
        for one in EIGHT:
            if_faster = Contender("tomesd", replace(one.merge, when="if_faster"), "if faster")
            variants = [Contender("unpatched"), *merged(one), if_faster]
            names = {"images": one.images, "section": "compile", "setting": one.name}
            found.append(half(one.model, one.side, variants, mode=mode, **names))
        return found

    return cases


def paper(original: str | None) -> list[Case]:
    """SD 1.5 at 512 px with attention that is not fused, ratio 10 to 60 %."""
    variants = [Contender("unpatched")]
    for tenths in range(1, 7):
        merge = replace(DEFAULT, ratio=tenths / 10)
        variants += [Contender("tomesd", merge), *the_original(merge, original)]
    names = {"section": "paper", "setting": "SD1.5 512 px, unfused attention"}
    return [half("sd15", 512, variants, attention="eager", images=8, **names)]


def by_default(original: str | None, model: str, side: int, title: str, **more: Any) -> Case:
    """Default settings: unpatched, this library and the original."""
    variants = [Contender("unpatched"), Contender("tomesd", DEFAULT)]
    variants += the_original(DEFAULT, original, more.get("mode", "eager"))
    return half(model, side, variants, setting=f"{NAMES[model]} {side} px, {title}", **more)


def batches(original: str | None) -> list[Case]:
    """Resolution x images."""
    return [
        by_default(original, "sd15", side, f"{n} images", images=n, section="batches")
        for side in (512, 768, 1024)
        for n in (1, 2, 4, 8, 10)
    ]


def sdxl(original: str | None) -> list[Case]:
    """SDXL at its own size, where merging can hardly pay."""
    return [
        by_default(original, "sdxl", 1024, f"{n} images", images=n, mode=mode, section="sdxl")
        for mode in ("eager", "graph")
        for n in (1, 2, 4, 8)
    ]


def pipelines(original: str | None) -> list[Case]:
    """Whole images, with scheduler and decoder."""
    more = {"what": "pipeline", "steps": 20, "section": "pipelines"}
    return [
        by_default(original, model, side, "20 steps", **more)
        for model, side in (("sd15", 512), ("sd15", 1024), ("sdxl", 1024))
    ]


def presets(_: str | None) -> list[Case]:
    """Whole images with each preset: some merge in a part of the steps only."""
    variants = [Contender("unpatched"), Contender("tomesd", DEFAULT, "default")]
    variants += [Contender("tomesd", Settings(**o), name) for name, o in PRESETS.items()]
    more = {"what": "pipeline", "steps": 10, "section": "presets"}
    return [
        half("sd15", side, variants, images=n, setting=f"SD1.5 {side} px, {n} images", **more)
        for side, n in ((512, 8), (1024, 4))
    ]


def cpu(original: str | None) -> list[Case]:
    """The embedded model on a CPU."""
    variants = [Contender("unpatched")]
    for ratio in (0.25, 0.5, 0.75):
        merge = Settings(ratio=ratio)
        variants += [Contender("tomesd", merge), *the_original(merge, original)]
    names = {"section": "cpu", "setting": "embedded model, 256 px"}
    return [Case("demo", 256, 256, tuple(variants), device="cpu", **names)]


CASES: dict[str, Callable[[str | None], list[Case]]] = {
    "graph": eight("graph"),
    "eager": eight("eager"),
    "compile": compiled("compile"),
    "compile-autotune": compiled("compile-autotune"),
    "paper": paper,
    "batches": batches,
    "sdxl": sdxl,
    "pipelines": pipelines,
    "presets": presets,
    "cpu": cpu,
}
"""By table: its cases, given the folder of tomesd 0.1.3 or None."""
