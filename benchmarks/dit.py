"""Speed of diffusion transformers: one call of the model, unpatched and on merged tokens.

    python benchmarks/dit.py [--only Flux] [--out FOLDER]

Architectures as published, with random weights: time does not depend on their values. All ways to
run a setting take turns in one process. Rows are added to dit.jsonl as they are measured.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from rows import RESULTS, timed
from torch import Tensor

import tomesd
from tomesd.bench import Effort, RowFile
from tomesd.bench.measure import free_memory, take_turns, time_calls
from tomesd.bench.models import random_model, shared_copy
from tomesd.bench.rows import Row
from tomesd.generation.memory import MemoryProbe
from tomesd.hosts.inputs import example_inputs
from tomesd.patch import patch_of

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Setting:
    model: str
    kind: str
    """Name of the class in diffusers."""
    height: int
    width: int
    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    frames: int = 1
    """Of the latent."""

    @property
    def name(self) -> str:
        frames = f", {4 * self.frames - 3} frames" if self.frames > 1 else ""
        pair = ", guidance" if self.batch == 2 else ""
        return f"{self.model} {self.width}x{self.height}{frames}{pair}"


_FLUX = {"guidance_embeds": True}
_SD35: dict[str, Any] = {
    **{"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432},
    **{"in_channels": 16, "out_channels": 16, "pos_embed_max_size": 192, "qk_norm": "rms_norm"},
}

SETTINGS = (
    Setting("Flux.1-dev", "FluxTransformer2DModel", 1024, 1024, _FLUX),
    Setting("Flux.1-dev", "FluxTransformer2DModel", 2048, 2048, _FLUX),
    Setting("SD3.5-large", "SD3Transformer2DModel", 1024, 1024, _SD35, batch=2),
    Setting("Qwen-Image", "QwenImageTransformer2DModel", 1328, 1328),
    Setting("Wan 14B", "WanTransformer3DModel", 480, 832, frames=21),
    Setting("Wan 14B", "WanTransformer3DModel", 720, 1280, frames=21),
)


def random_inputs(model: Any, setting: Setting) -> dict[str, Any]:
    size = (setting.height // 8, setting.width // 8)
    inputs = example_inputs(model, size, setting.batch, setting.frames) or {}
    data = {k for k, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return {k: torch.randn_like(v) if k in data and v.ndim > 1 else v for k, v in inputs.items()}


@torch.no_grad()
def measure(setting: Setting, model: Any, effort: Effort) -> Iterator[Row]:
    """A row for each way to run the model."""
    inputs = random_inputs(model, setting)
    timers, results = {}, {}
    for ratio in (0.0, 0.5, 0.75):
        own = shared_copy(model)
        if ratio > 0:
            tomesd.apply_patch(own, ratio, start=0.0, end=1.0)
        call = partial(own, **inputs, return_dict=False)
        finite, patch = bool(call()[0].isfinite().all()), patch_of(own)
        merged = patch is not None and any(decision.merges for decision in patch.decisions)
        peak = MemoryProbe(DEVICE).peak_mib(call)
        results[ratio] = {"error": None, "finite": finite, "merged": merged, "peak_mib": peak}
        timers[ratio] = partial(time_calls, call, device=DEVICE)
    for ratio, timing in take_turns(timers, effort).items():
        yield {
            **{"section": "transformers", "setting": setting.name, "model": setting.model},
            **{"height": setting.height, "width": setting.width, "frames": setting.frames},
            **{"what": "step", "images": 1, "batch": setting.batch, "dtype": "bfloat16"},
            **{"attention": "default", "mode": "eager"},
            "variant": "tomesd" if ratio else "unpatched",
            "label": f"ratio {ratio:g}" if ratio else "unpatched",
            "settings": {"ratio": ratio, "start": 0.0, "end": 1.0} if ratio else None,
            **results[ratio],
            **timed(timing),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="of the settings, those with this in their name")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing per setting")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    args = parser.parse_args()
    file = RowFile(args.out / "dit.jsonl", DEVICE)
    effort = Effort(seconds=args.seconds, min_repeats=3, sample_seconds=0.1)
    model: Any = None
    for setting in (setting for setting in SETTINGS if args.only in setting.name):
        cls = getattr(diffusers, setting.kind)
        if type(model) is not cls:
            model = None  # gone before the next one is made
            free_memory(DEVICE)
            model = random_model(cls, setting.config, DEVICE, torch.bfloat16, 0)
        for row in measure(setting, model, effort):
            file.add(row)
            print(row["setting"], row["label"], f"{row['seconds'] * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
