"""The eight settings that the library is judged by, and the variants that are compared in them.

Everything is merged that the settings allow (`when="always"`), also where it does not pay: the
table shows what merging costs. Only *if faster* leaves alone what does not pay, as by default.
Images: 1 unless said; a step runs on two latents per image.
"""

from dataclasses import dataclass, replace

from tomesd import Settings
from tomesd.bench import Case, Variant

FOR_THE_IMAGE = 1000  # steps: longer than any image takes


@dataclass(frozen=True)
class Setting:
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


SETTINGS = (
    Setting("SD1.5 512 px, 8 images, r .5, level 1", "sd15", 512, 0.5, 1, images=8),
    Setting("SD1.5 1024 px, r .5, level 1", "sd15", 1024, 0.5, 1),
    Setting("SD1.5 2048 px, r .5, level 1", "sd15", 2048, 0.5, 1),
    Setting("SD1.5 2048 px, r .75, levels 1-2", "sd15", 2048, 0.75, 2),
    Setting("SDXL 1024 px, r .5, level 2", "sdxl", 1024, 0.5, 2),
    Setting("SDXL 1024 px, r .5, levels 2-4, all", "sdxl", 1024, 0.5, 4, all_layers=True),
    Setting("SDXL 2048 px, r .5, level 2", "sdxl", 2048, 0.5, 2),
    Setting("SDXL 2048 px, r .5, levels 2-4, all", "sdxl", 2048, 0.5, 4, all_layers=True),
)


def variants(merge: Settings, mode: str, original: str | None) -> tuple[Variant, ...]:
    found = [Variant("unpatched")]
    if original is not None:
        # Its random numbers cannot be drawn inside a CUDA graph.
        rand = replace(merge, use_rand=mode != "graph")
        found.append(Variant("original", rand, folder=original))
    if not mode.startswith("compile"):
        found.append(Variant("free", merge))
    kept = replace(merge, share="steps", refresh=FOR_THE_IMAGE)
    found += [
        Variant("tomesd", kept, "plan kept"),
        Variant("tomesd", replace(merge, share="level"), "plan every step"),
        Variant("tomesd", merge, "plan every block"),
    ]
    if merge.merge_mlp:
        found.append(Variant("tomesd", replace(merge, target="stack"), "whole stacks"))
    if mode.startswith("compile"):
        found.append(Variant("tomesd", replace(merge, when="if_faster"), "if faster"))
    return tuple(found)


def make_case(setting: Setting, mode: str, original: str | None, section: str) -> Case:
    return Case(
        model=setting.model,
        height=setting.side,
        width=setting.side,
        images=setting.images,
        dtype="float16",
        attention="sdpa",
        mode=mode,
        variants=variants(setting.merge, mode, original),
        section=section,
        setting=setting.name,
    )
