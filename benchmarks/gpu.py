"""The tables of docs/performance.md that are measured on a GPU, except for torch.compile.

    python benchmarks/gpu.py [--original FOLDER] [--sections graph eager ...] [--out FOLDER]

FOLDER of `--original` holds tomesd 0.1.3 (`pip install --no-deps --target FOLDER tomesd==0.1.3`).
Every section gets `--budget-seconds`: when they are over, no further setting of it is begun. Rows
go to FOLDER/gpu.jsonl as they are measured.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matching
import torch
from eight_settings import SETTINGS, make_case
from gpu_checks import CheckError, check_kernels

from tomesd import Settings
from tomesd.bench import Case, Effort, RowFile, Subjects, Variant, measure_case
from tomesd.bench.calls import make_call
from tomesd.bench.models import shared_copy
from tomesd.bench.rows import Row
from tomesd.bench.tables import Comparison, comparisons, duration, failures, percent
from tomesd.presets import PRESETS

DEFAULT = Settings()
NAMES = {"sd15": "SD1.5", "sdxl": "SDXL"}


def facts(mode: str) -> Callable[[str | None], Iterator[Case]]:
    """The eight settings."""

    def cases(original: str | None) -> Iterator[Case]:
        for setting in SETTINGS:
            yield make_case(setting, mode, original, section=mode)

    return cases


def three(merge: Settings, original: str | None, rand: bool = True) -> tuple[Variant, ...]:
    """Unpatched, the original, and this library."""
    variants = [Variant("unpatched"), Variant("tomesd", merge)]
    if original is not None:
        variants.append(Variant("original", replace(merge, use_rand=rand), folder=original))
    return tuple(variants)


def half(model: str, side: int, attention: str = "sdpa", **more: Any) -> Case:
    """Square images, in half precision."""
    return Case(model, side, side, dtype="float16", attention=attention, **more)


def paper(original: str | None) -> Iterator[Case]:
    """SD 1.5 at 512 px with attention that is not fused, ratio 10 to 60 %."""
    variants = [Variant("unpatched")]
    for tenths in range(1, 7):
        variants += three(replace(DEFAULT, ratio=tenths / 10), original)[1:]
    yield half(
        "sd15",
        512,
        "eager",
        images=8,
        variants=tuple(variants),
        section="paper",
        setting="SD1.5 512 px, unfused attention",
    )


def batches(original: str | None) -> Iterator[Case]:
    """Resolution x images, at the default settings."""
    for side in (512, 768, 1024):
        for images in (1, 2, 4, 8, 10):
            yield half(
                "sd15",
                side,
                images=images,
                variants=three(DEFAULT, original),
                section="batches",
                setting=f"SD1.5 {side} px, {images} images",
            )


def sdxl(original: str | None) -> Iterator[Case]:
    """SDXL at its own size and the default settings, where merging can hardly pay."""
    for mode in ("eager", "graph"):
        for images in (1, 2, 4, 8):
            yield half(
                "sdxl",
                1024,
                images=images,
                mode=mode,
                variants=three(DEFAULT, original, rand=mode != "graph"),
                section="sdxl",
                setting=f"SDXL 1024 px, {images} images",
            )


def pipelines(original: str | None) -> Iterator[Case]:
    """Whole images, with scheduler and decoder."""
    for model, side in (("sd15", 512), ("sd15", 1024), ("sdxl", 1024)):
        yield half(
            model,
            side,
            what="pipeline",
            steps=20,
            variants=three(DEFAULT, original),
            section="pipelines",
            setting=f"{NAMES[model]} {side} px, 20 steps",
        )


def presets(_: str | None) -> Iterator[Case]:
    """Whole images with each preset: some merge in a part of the steps only."""
    named = {name: Settings(**options) for name, options in PRESETS.items()}
    variants = [Variant("unpatched"), Variant("tomesd", DEFAULT, "default")]
    variants += [Variant("tomesd", settings, name) for name, settings in named.items()]
    for model, side, images in (
        ("sd15", 512, 8),
        ("sd15", 1024, 4),
        ("sdxl", 1024, 4),
        ("sdxl", 2048, 1),
    ):
        yield half(
            model,
            side,
            images=images,
            what="pipeline",
            steps=10,
            variants=tuple(variants),
            section="presets",
            setting=f"{NAMES[model]} {side} px, {images} images",
        )


SECTIONS = {
    "graph": facts("graph"),
    "eager": facts("eager"),
    "paper": paper,
    "batches": batches,
    "sdxl": sdxl,
    "matching": None,  # measures plans, not models
    "pipelines": pipelines,
    "presets": presets,
}


@torch.no_grad()
def check(subjects: Subjects, device: str) -> None:
    """Stops the run if the fast kernels do something else than the reference."""
    check_kernels(torch.device(device))
    small = Case("sd15", 512, 512, (), device=device, dtype="float16", attention="sdpa")
    subject = subjects.get(small)
    always = replace(DEFAULT, when="always", max_downsample=2, merge_mlp=True)
    outputs = {}
    for name, settings in {
        "unpatched": replace(always, ratio=0.0),
        "reference": replace(always, backend="reference"),
        "auto": always,
    }.items():
        model = shared_copy(subject.model)
        Variant("tomesd", settings).apply(model)
        outputs[name] = make_call(subject, model, "step", (512, 512), 1, 1)()[0].float()
        if not torch.isfinite(outputs[name]).all():
            raise CheckError(f"check failed: the output of {name} is not finite")
    reference = outputs["reference"]
    error = (outputs["auto"] - reference).norm() / reference.norm()
    effect = (outputs["unpatched"] - reference).norm() / reference.norm()
    print(f"check: fast kernels to reference {error:.2e}, unmerged to merged {effect:.2e}")
    # Where two matches are equally good to half precision, either is right.
    if error > 0.5 * effect:
        raise CheckError("check failed: the fast kernels differ too much from the reference")


def run_section(
    name: str, args: argparse.Namespace, file: RowFile, subjects: Subjects
) -> list[Row]:
    deadline = time.monotonic() + args.budget_seconds
    if name == "matching":
        return [file.add(row) for row in matching.rows(args.original, args.device)]
    rows: list[Row] = []
    effort = Effort(seconds=args.seconds, min_repeats=args.repeats, sample_seconds=0.1)
    for case in SECTIONS[name](args.original):
        case = replace(case, device=str(args.device))
        if time.monotonic() > deadline:
            print(f"{name}: no time left for {case.setting}", flush=True)
            continue
        start = time.monotonic()
        try:
            subject = subjects.get(case)
            made = [file.add(row) for row in measure_case(subject, case, effort)]
        except Exception as error:  # the other settings go on
            print(f"{name}: {case.setting}: {error!r}", flush=True)
            continue
        rows += made
        brief = ", ".join(f"{row['label']} {_brief(row)}" for row in made)
        print(f"{name}: {case.setting} ({time.monotonic() - start:.0f} s): {brief}", flush=True)
    return rows


def _brief(row: Row) -> str:
    if row["seconds"] is None:
        return row["error"]
    return duration(row) + ("" if row["finite"] else " NOT FINITE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", help="folder with tomesd 0.1.3")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--budget-seconds", type=float, default=120, help="of each section")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing per setting")
    parser.add_argument("--repeats", type=int, default=4, help="at least, per variant")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "bench_output")))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--no-check", action="store_true", help="do not compare the kernels first")
    args = parser.parse_args()
    subjects = Subjects(keep=4)
    if not args.no_check:
        check(subjects, str(args.device))
    file = RowFile(args.out / "gpu.jsonl", args.device)
    tables = {}
    for name in args.sections:
        start = time.monotonic()
        tables[name] = run_section(name, args, file, subjects)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    for name, rows in tables.items():
        print(f"\n## {name}: ms, recovered share, peak MiB\n")
        for one in comparisons(rows):
            cells = " | ".join(_cell(one, row) for row in one)
            print(f"{one.first['setting']}, {one.first['mode']}: {cells}")
        print("\n".join(failures(rows)))


def _cell(one: Comparison, row: Row) -> str:
    if row["seconds"] is None:
        return f"{row['label']} {duration(row)}"
    ratio = (
        f" {row['settings']['ratio']:g}" if row["section"] == "paper" and row["settings"] else ""
    )
    share = one.recovered(row)
    share = "" if share is None or row["variant"] == "free" else f" {percent(share)}"
    return f"{row['label'] + ratio} {duration(row)}{share} {row['peak_mib']:.0f}M"


if __name__ == "__main__":
    main()
