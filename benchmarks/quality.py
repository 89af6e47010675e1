"""What merging does to the images of the embedded model: the rows of docs/quality.md.

    python benchmarks/quality.py paper front --original FOLDER --reference FOLDER --images FOLDER
    python benchmarks/quality.py speed --original FOLDER

The first makes and judges the images of some sections with `tomesd.evaluation`; FOLDER of
`--reference` is from compose_scenes.py. Images are kept in FOLDER of `--images`, so that a run goes
on where it was stopped, and settings that are in several sections are run once. The second
measures how fast the same settings are. Rows are added to results/quality.jsonl; image i has
held-out caption i and seed i in every row.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from quality_settings import SECTIONS, Candidate, Section
from rows import RESULTS

import tomesd
from tomesd.bench import Effort, RowFile, Subject, load_original, load_subject
from tomesd.bench.calls import random_inputs
from tomesd.bench.measure import attempt, take_turns, time_calls
from tomesd.bench.models import shared_copy
from tomesd.bench.rows import Row
from tomesd.evaluation import (
    Judges,
    Reference,
    Result,
    Run,
    Variant,
    define,
    evaluate,
    load_prompts,
    make_items,
)
from tomesd.generation import load_pipeline
from tomesd.generation.memory import MemoryProbe

SIDE = 256
"""Pixels of an image."""
GUIDANCE = 5.0
SPEED = "speed"
TIMED = ("paper", "front", "seed", "search")
KINDS = {"unmerged": "unmerged", "original": "original", "tomesd": "merged"}


class Images:
    """Makes and judges the images of sections."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.pipe = load_pipeline("demo", device=args.device)
        self.pipe.set_progress_bar_config(disable=True)
        self.judges = Judges.load(self.pipe.unet.device)
        self.reference = Reference.of(args.reference) if args.reference else None
        self.original = load_original(args.original) if args.original else None

    def rows(self, name: str, section: Section) -> list[Row]:
        made = f"{section.images}-{section.scheduler}-{section.steps}"
        definition = define(
            self.pipe,
            model={"model": "demo"},
            prompts="held-out",
            items=make_items(load_prompts("held-out", section.images)),
            # Once each, whatever they are called.
            variants=list({c.name: variant_of(c) for c in section.candidates}.values()),
            batch=self.args.batch,
            size=(SIDE, SIDE),
            steps=section.steps,
            guidance=GUIDANCE,
            scheduler=section.scheduler,
        )
        run = Run(self.args.images / made)
        options = {"reference": self.reference, "original": self.original, "extend": True}
        results = evaluate(self.pipe, run, definition, self.judges, **options)
        by_name = {result.variant.name: result for result in results}
        common = {
            "section": f"quality-{name}",
            "what": "images",
            "steps": section.steps,
            "images": section.images,
            "batch": self.args.batch,
            "dtype": str(self.pipe.unet.dtype).removeprefix("torch."),
            "scheduler": section.scheduler,
            "reference_scenes": self.reference and len(self.reference.files),
            "unmerged_set": "same seeds",
        }
        return [
            {**identity(c), **common, "place": place, **scores(by_name[c.name])}
            for place, c in enumerate(section.candidates)
        ]


def identity(candidate: Candidate) -> Row:
    """What a row says of its candidate, and what is the same in all rows."""
    return {
        "setting": candidate.group,
        "model": "demo",
        "height": SIDE,
        "width": SIDE,
        "attention": "default",
        "mode": "eager",
        "variant": candidate.variant,
        "label": candidate.label,
        "settings": candidate.settings,
        "guidance": GUIDANCE,
    }


def variant_of(candidate: Candidate) -> Variant:
    settings = json.loads(json.dumps(candidate.settings))  # as it will be read
    return Variant(candidate.name, KINDS[candidate.variant], settings)


def scores(result: Result) -> Row:
    row: Row = {"seconds_per_image": result.seconds, "peak_mib": result.peak_mib}
    for name, found in result.metrics.items():
        row |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    return row


def speed_row(candidate: Candidate, subjects: dict[str, Subject], args: argparse.Namespace) -> Row:
    """Time and memory of steps with guidance, with fused and with unfused attention."""
    row: Row = identity(replace(candidate, group=""))
    row |= {"section": "quality-speed", "what": "steps", "steps": args.steps}
    row |= {"images": args.time_images}
    for attention, subject in subjects.items():
        # Unfused attention takes several times the memory.
        images = args.time_images if attention == "fused" else max(1, args.time_images // 2)
        row |= time_steps(candidate, subject, attention, images, args)
    return row


@torch.no_grad()
def time_steps(
    candidate: Candidate, subject: Subject, attention: str, images: int, args: argparse.Namespace
) -> Row:
    """Unmerged and merged steps take turns, at noise levels that are spread over an image."""
    device = subject.device
    side = SIDE // subject.pixels_per_latent
    inputs = random_inputs(subject.model, (side, side), 2 * images)
    subject.pipe.scheduler.set_timesteps(args.steps)
    levels = subject.pipe.scheduler.timesteps.to(device)
    text = inputs["encoder_hidden_states"]

    def steps(unet: Any) -> None:
        for level in levels:
            unet(inputs["sample"], level, encoder_hidden_states=text, return_dict=False)

    probe = MemoryProbe(device)
    calls = {"base": partial(steps, subject.model)}
    calls["mine"] = partial(steps, patched_copy(candidate, subject, args.original))
    for call in calls.values():
        call()  # whatever is loaded or tuned once
    peak = probe.peak_mib(calls["mine"])
    row: Row = {f"mib_{attention}": None if peak is None else peak / images}
    timers = {name: partial(time_calls, call, device=device) for name, call in calls.items()}
    effort = Effort(seconds=args.seconds, min_repeats=3, sample_seconds=0)
    timings = take_turns(timers, effort)
    row[f"step_ms_{attention}"] = 1000 * timings["mine"].median / args.steps / images
    row["dtype"] = str(subject.dtype).removeprefix("torch.")
    if candidate.variant != "unmerged":
        name = "speedup" if attention == "fused" else "speedup_unfused"
        base, mine = timings["base"].seconds, timings["mine"].seconds
        ratios = [a / b for a, b in zip(base, mine, strict=True)]
        row[name] = timings["base"].median / timings["mine"].median
        row |= {f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
    return row


def patched_copy(candidate: Candidate, subject: Subject, original: str | None) -> Any:
    """A copy of the model that shares its weights. The pipeline knows the noise levels."""
    unet = shared_copy(subject.model)
    if candidate.variant == "tomesd":
        tomesd.apply_patch(subject.pipe_with(unet), **candidate.settings)
    elif candidate.variant == "original":
        if original is None:
            raise ValueError("tomesd 0.1.3: give its folder with --original")
        load_original(original).apply_patch(unet, **candidate.settings)
    return unet


def measure_speeds(file: RowFile, args: argparse.Namespace) -> None:
    attentions = {"fused": "default", "unfused": "eager"}
    subjects = {
        name: load_subject("demo", device=args.device, attention=attention)
        for name, attention in attentions.items()
    }
    distinct = {c.name: c for name in TIMED for c in SECTIONS[name].candidates}
    for candidate in distinct.values():
        outcome = attempt(partial(speed_row, candidate, subjects, args), file_device(args))
        print(candidate.label, outcome, flush=True)
        if not isinstance(outcome, str):
            file.add(outcome)


def file_device(args: argparse.Namespace) -> torch.device:
    cuda = args.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("sections", nargs="+", choices=[*SECTIONS, SPEED])
    add("--images", type=Path, default=Path("quality_images"), help="folder to keep images in")
    add("--original", help="folder with tomesd 0.1.3")
    add("--reference", type=Path, help="folder of composed scenes")
    add("--batch", type=int, default=250)
    add("--device", default="auto")
    add("--time-images", type=int, default=64, help="enough that the GPU is slower than the host")
    add("--steps", type=int, default=12, help="to time; images have as many as their section says")
    add("--seconds", type=float, default=2.0, help="of timing per setting and attention")
    add("--out", type=Path, default=RESULTS / "quality.jsonl")
    args = parser.parse_args(arguments)
    file = RowFile(args.out, file_device(args))
    if SPEED in args.sections:
        measure_speeds(file, args)
    chosen = [name for name in SECTIONS if name in args.sections]
    images = Images(args) if chosen else None
    for name in chosen:
        for row in images.rows(name, SECTIONS[name]):
            print(file.add(row), flush=True)


if __name__ == "__main__":
    main()
