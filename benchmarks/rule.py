"""What `when="if_faster"` decides, against what was measured, and on GPUs that are not here.

    python benchmarks/rule.py [--out FOLDER]

The models are outlines: they are built without weights, on no device. For each setting that has
been measured, the rule is asked with what `tomesd calibrate` measured on an H200 and its host. Rows
go to rule.jsonl, in place of those of the last time.
"""

import argparse
import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
from common import RESULTS
from dit_settings import BLOCKS, SETTINGS

import tomesd
from tomesd import policy, rule
from tomesd.bench.models import ARCHITECTURES
from tomesd.bench.rows import Row, read_rows
from tomesd.bench.tables import comparisons
from tomesd.files import json_lines, write_text
from tomesd.layout import Layout, LayoutPart
from tomesd.machine import Machine
from tomesd.patch import patch_of, role_of
from tomesd.regions.model import fullness
from tomesd.rule import Verdict
from tomesd.settings import Settings
from tomesd.state import Call

# By dtype, what `tomesd calibrate` measured. The host's time for a kernel is 2.6 times what it was
# for a plain layer (`layer_seconds`), as it is counted since.
H200 = {row["dtype"]: Machine(**row["rates"]) for row in read_rows(RESULTS / "machine.jsonl")}
# Published rates: dense half precision with sums in single precision, and memory. What layers and
# attention reach of the first is taken to be what they reach on the H200, whose rate is 989e12.
PUBLISHED = {
    "RTX 3060": (51e12 / 2, 360e9),
    "RTX 4090": (330e12 / 2, 1008e9),
    "A100 80 GB": (312e12, 2039e9),
    "RTX 5090": (419e12 / 2, 1792e9),
}
LAUNCHES = (5e-6, 50e-6)
"""Of a quick host and of a slow one, for GPUs that are not here."""
LAUNCHERS = {"eager": "eager", "compile": "compiled", BLOCKS: "compiled"}
"""Who starts kernels, by mode; in all others it is a CUDA graph."""
# Transformers that make a token of 2x2 latent pixels, and that have no blocks of UNets.
MODELS = ("Flux.1-dev", "SD3.5-large", "Qwen-Image", "Z-Image", "Wan 14B", "HunyuanVideo")
TRANSFORMERS = {one.name: one for one in SETTINGS["transformers"] if one.model in MODELS}


@functools.cache
def outline_of(name: str) -> Any:
    """A model without weights."""
    with torch.device("meta"):
        if name in ARCHITECTURES:
            return diffusers.UNet2DConditionModel(**ARCHITECTURES[name])
        setting = next(one for one in TRANSFORMERS.values() if one.model == name)
        return getattr(diffusers, setting.kind)(**setting.config)


def ask(row: Row, settings: Row, machine: Machine) -> Verdict:
    """What the rule says about a call of a model on a machine."""
    model, dtype = outline_of(row["model"]), getattr(torch, row["dtype"])
    options = {k: v for k, v in settings.items() if k in Settings.__dataclass_fields__}
    tomesd.apply_patch(model, **{**options, "when": "if_faster"})
    patch, size = patch_of(model), (row["height"] // 8, row["width"] // 8)
    call = Call(patch, patch.settings, size, fullness=fullness(row["batch"], {}))
    known = {"machine_of": machine, "find_launcher": LAUNCHERS.get(row["mode"], "graph")}
    with (
        mock.patch.multiple(rule, **{name: mock.Mock(return_value=v) for name, v in known.items()}),
        mock.patch.object(rule.kernels, "use_triton", return_value=True),
    ):
        if row["model"] in ARCHITECTURES:
            heads = 8 if row["attention"] == "eager" else 0
            x = torch.empty(row["batch"], 1, *size, dtype=dtype, device="meta")
            call.left_alone = policy._judge_unet(call, x, heads)
        else:
            setting = TRANSFORMERS[row["setting"]]
            grid = ((setting.frames - 1) // setting.scale[1] + 1, size[0] // 2, size[1] // 2)
            part = LayoutPart.on(grid)
            x = torch.empty(row["batch"], part.tokens, 1, dtype=dtype, device="meta")
            policy.decide_layout(call, Layout(size, grid, (part,)), role_of(model).merging, x)
    return call.verdict


def measured(out: Path) -> Iterator[Row]:
    """The rule's answers for all settings that have been measured."""
    rows = [r for name in ("gpu", "compiled", "dit") for r in read_rows(out / f"{name}.jsonl")]
    known = {*ARCHITECTURES, *TRANSFORMERS}
    steps = [r for r in rows if r["what"] == "step" and {r["model"], r["setting"]} & known]
    for found in comparisons(steps):
        base = found.find("unpatched")
        for row in found:
            speedup = found.speedup(row)
            if row["variant"] != "tomesd" or speedup is None:
                continue
            verdict = ask(row, row["settings"], H200[row["dtype"]])
            yield {
                **{k: row[k] for k in ("section", "setting", "label", "mode", "batch")},
                **{"ratio": row["settings"]["ratio"], "machine": "NVIDIA H200"},
                **{"merges": any(verdict.pays), "expected": verdict.gain},
                # Rows that were left alone do not tell how long merging takes.
                "measured": None if row.get("left_alone") else speedup,
                # By how much the gain may be off, from the spreads of the two times.
                "noise": sum(one["spread"] / one["seconds"] for one in (base, row)),
                "measured_run": row["run"],
            }


def elsewhere() -> Iterator[Row]:
    """The rule's answers on other GPUs, at default settings, in eager mode."""
    options = {"ratio": 0.5, "start": 0.0, "end": 1.0}
    for (name, (peak, memory)), launch in itertools.product(PUBLISHED.items(), LAUNCHES):
        share = peak / 989e12
        for one in simulated():
            known = H200[one["dtype"]]
            rates = {"operations": known.operations * share, "attention": known.attention * share}
            machine = replace(known, **rates, bytes=memory, launch=launch)
            verdict = ask(one, options, machine)
            yield {
                **{"section": "rule elsewhere", "setting": one["setting"]},
                **{"machine": name, "launch": launch, "simulated": True},
                **{"merges": any(verdict.pays), "expected": verdict.gain},
            }


def simulated() -> Iterator[Row]:
    """Settings that other GPUs are asked about."""
    unets = (("SD1.5", "sd15", 512), ("SD1.5", "sd15", 1024), ("SDXL", "sdxl", 1024))
    for (name, model, side), images in itertools.product(unets, (1, 8)):
        known = {"setting": f"{name} {side} px, {images} images", "model": model, "mode": "eager"}
        size = {"height": side, "width": side, "batch": 2 * images}
        yield {**known, **size, "dtype": "float16", "attention": "sdpa"}
    for one in TRANSFORMERS.values():
        if one.images == 1:
            yield {**one.row(), "dtype": "bfloat16", "mode": "eager"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    out = parser.parse_args().out
    rows = [*measured(out), *elsewhere()]
    write_text(out / "rule.jsonl", json_lines(rows))
    print(f"{len(rows)} answers")


if __name__ == "__main__":
    main()
