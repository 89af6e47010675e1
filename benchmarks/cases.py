"""What speed.py measures: the cases of each table in docs/performance.md."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tomesd import Settings
from tomesd.bench import Case, Contender
from tomesd.presets import MERGING_PRESETS

Cases = Callable[[str | None], list[Case]]
"""Makes them, given the folder of tomesd 0.1.3 or None."""

UNPATCHED = Contender("unpatched")
FOR_THE_IMAGE = 1000
"""Steps: longer than any image takes."""
NAMES = {"sd15": "SD1.5", "sdxl": "SDXL"}

# The settings that the library is judged by: model, pixels of a side, images, and what is merged.
# That is merged also where it does not pay: the tables show what merging costs.
LEVEL_1 = Settings(ratio=0.5, max_downsample=1, when="always")
LEVEL_2 = replace(LEVEL_1, max_downsample=2)
ALL = replace(LEVEL_1, max_downsample=4, merge_crossattn=True, merge_mlp=True)
EIGHT = {
    "SD1.5 512 px, 8 images, r .5, level 1": ("sd15", 512, 8, LEVEL_1),
    "SD1.5 1024 px, r .5, level 1": ("sd15", 1024, 1, LEVEL_1),
    "SD1.5 2048 px, r .5, level 1": ("sd15", 2048, 1, LEVEL_1),
    "SD1.5 2048 px, r .75, levels 1-2": ("sd15", 2048, 1, replace(LEVEL_2, ratio=0.75)),
    "SDXL 1024 px, r .5, level 2": ("sdxl", 1024, 1, LEVEL_2),
    "SDXL 1024 px, r .5, levels 2-4, all": ("sdxl", 1024, 1, ALL),
    "SDXL 2048 px, r .5, level 2": ("sdxl", 2048, 1, LEVEL_2),
    "SDXL 2048 px, r .5, levels 2-4, all": ("sdxl", 2048, 1, ALL),
}


def half(model: str, side: int, variants: Iterable[Contender], **more: Any) -> Case:
    """Square images in half precision, with fused attention unless said."""
    options = {"dtype": "float16", "attention": "sdpa", "device": "cuda", **more}
    return Case(model, side, side, tuple(variants), **options)


def the_original(merge: Settings, folder: str | None, mode: str = "eager") -> list[Contender]:
    """tomesd 0.1.3 if there is a folder of it. It cannot draw random numbers in a CUDA graph."""
    settings = replace(merge, use_rand=mode != "graph")
    return [] if folder is None else [Contender("original", settings, folder=folder)]


def eight(mode: str) -> Cases:
    """The eight settings: compiled; or in another mode, with the bound and the original."""

    def variants(merge: Settings, original: str | None) -> list[Contender]:
        merged = [Contender("tomesd", merge, "plan every block")]
        if merge.merge_mlp:
            merged.append(Contender("tomesd", replace(merge, target="stack"), "whole stacks"))
        if mode.startswith("compile"):
            if_faster = replace(merge, when="if_faster")
            return [UNPATCHED, *merged, Contender("tomesd", if_faster, "if faster")]
        kept = replace(merge, share="steps", refresh=FOR_THE_IMAGE)
        return [
            *(UNPATCHED, *the_original(merge, original, mode), Contender("free", merge)),
            Contender("tomesd", kept, "plan kept"),
            Contender("tomesd", replace(merge, share="level"), "plan every step"),
            *merged,
        ]

    def cases(original: str | None) -> list[Case]:
        more = {"mode": mode, "section": mode.removesuffix("-autotune")}
        return [
            half(model, side, variants(merge, original), setting=name, images=images, **more)
            for name, (model, side, images, merge) in EIGHT.items()
        ]

    return cases


def ratios(ratios: Iterable[float], original: str | None) -> list[Contender]:
    """Both libraries at each ratio."""
    merges = [Settings(ratio=ratio) for ratio in ratios]
    pairs = [(Contender("tomesd", merge), *the_original(merge, original)) for merge in merges]
    return [UNPATCHED, *(one for pair in pairs for one in pair)]


def paper(original: str | None) -> list[Case]:
    """SD 1.5 at 512 px with attention that is not fused, ratio 10 to 60 %."""
    variants = ratios((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), original)
    names = {"section": "paper", "setting": "SD1.5 512 px, unfused attention"}
    return [half("sd15", 512, variants, attention="eager", images=8, **names)]


def cpu(original: str | None) -> list[Case]:
    """The embedded model on a CPU."""
    variants = tuple(ratios((0.25, 0.5, 0.75), original))
    names = {"section": "cpu", "setting": "embedded model, 256 px"}
    return [Case("demo", 256, 256, variants, device="cpu", **names)]


def by_default(section: str, settings: Iterable[tuple[Any, ...]], **more: Any) -> Cases:
    """Default settings: unpatched, this library and the original.

    Args:
        settings: model, pixels of a side, images, mode.
    """

    def cases(original: str | None) -> list[Case]:
        found = []
        for model, side, images, mode in settings:
            title = f"{more['steps']} steps" if "steps" in more else f"{images} images"
            names = {"section": section, "setting": f"{NAMES[model]} {side} px, {title}"}
            theirs = the_original(Settings(), original, mode)
            variants = [UNPATCHED, Contender("tomesd", Settings()), *theirs]
            found.append(half(model, side, variants, images=images, mode=mode, **names, **more))
        return found

    return cases


def presets(_: str | None) -> list[Case]:
    """Whole images with each preset: some merge in a part of the steps only."""
    variants = [UNPATCHED, Contender("tomesd", Settings(), "default")]
    variants += [Contender("tomesd", Settings(**o), name) for name, o in MERGING_PRESETS.items()]
    more = {"what": "pipeline", "steps": 10, "section": "presets"}
    return [
        half("sd15", side, variants, images=n, setting=f"SD1.5 {side} px, {n} images", **more)
        for side, n in ((512, 8), (1024, 4))
    ]


BATCHES = [("sd15", side, n, "eager") for side in (512, 768, 1024) for n in (1, 2, 4, 8, 10)]
# At its own size, merging can hardly pay on SDXL.
SDXL = [("sdxl", 1024, n, mode) for mode in ("eager", "graph") for n in (1, 2, 4, 8)]
SINGLE = [(*one, 1, "eager") for one in (("sd15", 512), ("sd15", 1024), ("sdxl", 1024))]

CASES: dict[str, Cases] = {
    **{mode: eight(mode) for mode in ("graph", "eager", "compile", "compile-autotune")},
    "paper": paper,
    "batches": by_default("batches", BATCHES),
    "sdxl": by_default("sdxl", SDXL),
    "pipelines": by_default("pipelines", SINGLE, what="pipeline", steps=20),
    "presets": presets,
    "cpu": cpu,
}
