"""Counts the operations of models, merged and with steps left out. Measures no time.

python benchmarks/operations.py [--rows SDXL]
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from common import RESULTS, Arguments
from dit_settings import SETTINGS

import tomesd
from tomesd.bench import RowFile
from tomesd.bench.models import ARCHITECTURES
from tomesd.generation import load_pipeline

STEPS = 28
UNETS = {"SD1.5": ("sd15", (512, 1024, 2048)), "SDXL": ("sdxl", (1024, 2048))}
WAYS: dict[str, dict[str, Any]] = {
    "half": {"ratio": 0.5, "start": 0.0, "end": 1.0},
    "quarter": {"ratio": 0.75, "start": 0.0, "end": 1.0},
    **{name: {"preset": name} for name in ("quality", "balanced", "fast")},
}

ATTENTION: dict[str, dict[str, Any]] = {
    "attention": {"ratio": 0.0, "reuse": 2, "reuse_attention": True}
}
"""On UNets with attention at their finest level."""


def pipeline(part: str, kind: str, config: dict[str, Any], **more: Any) -> Any:
    """Nothing but a model, whose weights are never written to, and so take no memory."""
    with torch.device("meta"):
        model = getattr(diffusers, kind)(**config)
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
    return SimpleNamespace(**{part: model}, **more)


def models() -> Iterator[tuple[str, Callable[[], Any], dict[str, int]]]:
    """What a row says of each setting, what makes its pipeline, and arguments of `describe`."""
    for name, side in (("UNet", 256), ("transformer", 512)):
        make = partial(load_pipeline, name.lower(), device="cpu")
        yield f"embedded {name} {side}x{side}", make, {"height": side, "width": side}
    for name, (architecture, sides) in UNETS.items():
        make = partial(pipeline, "unet", "UNet2DConditionModel", ARCHITECTURES[architecture])
        for side in sides:
            yield f"{name} {side}x{side}", make, {"height": side, "width": side}
    for one in SETTINGS["transformers"]:
        if one.images == 1:
            scale = {"vae_scale_factor": one.scale[0], "vae_scale_factor_temporal": one.scale[1]}
            make = partial(pipeline, "transformer", one.kind, one.config, **scale)
            size = {"height": one.height, "width": one.width, "num_frames": one.frames}
            yield one.name, make, {**size, "batch": one.batch}


def main(arguments: list[str] | None = None) -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--rows", default="", help="regular expression of settings")
    args = parser.read(arguments)
    file = RowFile(RESULTS / "operations.jsonl", torch.device("cpu"))
    for title, make, size in (one for one in models() if re.search(args.rows, one[0])):
        model = make()
        has_attention = title.startswith(("SD1.5", "embedded UNet"))
        for label, options in (WAYS | (ATTENTION if has_attention else {})).items():
            with tomesd.patched(model, when="always", **options):
                (part,) = tomesd.describe(model, **size, steps=STEPS).parts
            row = {"section": "operations", "setting": title, "label": label, "steps": STEPS}
            row |= {"flops": part.flops, "merged": part.merged_flops / part.flops}
            row |= {"left_out": part.reused_flops / part.flops, "image": part.share_of_image}
            file.add({**row, "coarse": part.coarse_flops / part.flops})
            print(f"{args.spent():4.0f} s  {title}, {label}: {part}", flush=True)


if __name__ == "__main__":
    main()
