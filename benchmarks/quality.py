"""What merging does to the images of the embedded model: the rows of docs/quality.md.

    python benchmarks/quality.py paper front --original FOLDER --reference FOLDER --images FOLDER
    python benchmarks/quality.py search --add kv "kv 0.6" '{"target": "kv", "ratio": 0.6}'
    python benchmarks/quality.py speed --original FOLDER

The rows in results/quality.jsonl are the list of what is compared: a section is measured again with
the settings that its rows have, and with those that are added; presets as they are now. Images are
made and judged with `tomesd.evaluation`, and kept in FOLDER of `--images`, so that a run goes on
where it was stopped; settings that are in several sections are run once. FOLDER of `--reference` is
from compose_scenes.py. `speed` measures how fast the same settings are. Rows are added to the same
file; image i has held-out caption i and seed i in every row.
"""

import argparse
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Arguments

import tomesd
from tomesd.bench import Effort, RowFile, Subject, load_original, load_subject
from tomesd.bench.calls import random_inputs
from tomesd.bench.measure import attempt, take_turns, time_calls
from tomesd.bench.models import shared_copy
from tomesd.bench.rows import Row, read_rows
from tomesd.evaluation import Judges, Reference, Run, Variant, define, evaluate
from tomesd.evaluation.prompts import load_prompts, make_items
from tomesd.generation import load_pipeline
from tomesd.generation.loading import pick_device
from tomesd.generation.memory import MemoryProbe
from tomesd.presets import MERGING_PRESETS, numbered

ROWS = RESULTS / "quality.jsonl"
SIDE = 256
"""Pixels of an image."""
GUIDANCE = 5.0
SECTIONS = ("paper", "front", "ablations", "seed", "search")
TIMED = ("paper", "front", "seed", "search")
KINDS = {"unmerged": "unmerged", "original": "original", "tomesd": "merged"}
ATTENTIONS = {"fused": "default", "unfused": "eager"}
CANDIDATE = ("setting", "variant", "label", "settings", "images", "steps", "scheduler")
"""What is taken from a row to measure it again."""


def candidates(section: str, added: list[tuple[str, str, str]]) -> list[Row]:
    """In the order of the table.

    Args:
        added: group, label and settings in JSON of more.
    """
    found: dict[str, Row] = {}
    for row in read_rows(ROWS):
        if row["section"] == f"quality-{section}":
            one = {name: row[name] for name in CANDIDATE}
            if row["label"].startswith("preset "):
                one["settings"] = MERGING_PRESETS[row["label"].removeprefix("preset ")]
            found.setdefault(json.dumps(one, sort_keys=True), {**one, "place": row["place"]})
    rows = sorted(found.values(), key=lambda row: row["place"])
    for group, label, words in added:
        names = {"variant": "tomesd", "setting": group, "label": label}
        rows.append({**rows[0], **names, "settings": json.loads(words)})
    for row in rows:
        if row["variant"] == "tomesd":
            # No rule may leave a layer alone: what a row says has to be merged.
            row["settings"] = json.loads(json.dumps({"when": "always", **row["settings"]}))
    return rows


def name_of(row: Row) -> str:
    """Of its folder: equal for settings that make the same images."""
    words = json.dumps(row["settings"], sort_keys=True)
    return f"{row['variant']}{re.sub(r'[^A-Za-z0-9.]+', '-', words).rstrip('-')}"


def image_rows(section: str, pipe: Any, judges: Judges, args: argparse.Namespace) -> Iterator[Row]:
    """Makes and judges the images of a section."""
    rows = candidates(section, args.add)
    made = {name: rows[0][name] for name in ("images", "scheduler", "steps")}
    reference = Reference.of(args.reference) if args.reference else None
    # Once each, whatever they are called.
    variants = {name_of(row): (KINDS[row["variant"]], row["settings"]) for row in rows}
    definition = define(
        pipe,
        model={"model": "demo"},
        prompts="held-out",
        items=make_items(load_prompts("held-out", made["images"])),
        variants=[Variant(name, *rest) for name, rest in variants.items()],
        batch=args.batch,
        size=(SIDE, SIDE),
        steps=made["steps"],
        guidance=GUIDANCE,
        scheduler=made["scheduler"],
    )
    run = Run(args.images / "-".join(map(str, made.values())))
    original = load_original(args.original) if args.original else None
    options = {"reference": reference, "original": original, "extend": True}
    results = evaluate(pipe, run, definition, judges, **options)
    by_name = {result.variant.name: result for result in results}
    for place, row in enumerate(rows):
        found = by_name[name_of(row)]
        scores = [one.fields(name) for name, one in found.metrics.items()]
        yield {
            **{**identity(row, f"quality-{section}"), **made, "what": "images", "place": place},
            **{"dtype": str(pipe.unet.dtype).removeprefix("torch."), "batch": args.batch},
            **{"reference_scenes": reference and len(reference.files)},
            **{"unmerged_set": "same seeds", "seconds_per_image": found.seconds},
            **{"peak_mib": found.peak_mib, **{k: v for score in scores for k, v in score.items()}},
        }


def identity(row: Row, section: str) -> Row:
    """What a row says of its settings, and what is the same in all rows."""
    return {
        **{"section": section, "setting": row["setting"], "model": "demo"},
        **{"height": SIDE, "width": SIDE, "attention": "default", "mode": "eager"},
        **{name: row[name] for name in ("variant", "label", "settings")},
        "guidance": GUIDANCE,
    }


def speed_row(candidate: Row, subjects: dict[str, Subject], args: argparse.Namespace) -> Row:
    """Time and memory of steps with guidance, with fused and with unfused attention."""
    row = identity({**candidate, "setting": ""}, "quality-speed")
    row |= {"what": "steps", "steps": args.steps, "images": args.time_images}
    for attention, subject in subjects.items():
        # Unfused attention takes several times the memory.
        images = args.time_images if attention == "fused" else max(1, args.time_images // 2)
        row |= time_steps(candidate, subject, attention, images, args)
    return row


@torch.no_grad()
def time_steps(
    candidate: Row, subject: Subject, attention: str, images: int, args: argparse.Namespace
) -> Row:
    """Unmerged and merged steps take turns, at noise levels that are spread over an image."""
    device, side = subject.device, SIDE // subject.pixels_per_latent
    inputs = random_inputs(subject.model, (side, side), 2 * images)
    subject.pipe.scheduler.set_timesteps(args.steps)
    levels = subject.pipe.scheduler.timesteps.to(device)
    text = inputs["encoder_hidden_states"]

    def steps(unet: Any) -> None:
        for level in levels:
            unet(inputs["sample"], level, encoder_hidden_states=text, return_dict=False)

    probe = MemoryProbe(device)
    calls = [partial(steps, subject.model), partial(steps, patched(candidate, subject, args))]
    for call in calls:
        call()  # whatever is loaded or tuned once
    peak = probe.peak_mib(calls[1])
    timers = {i: partial(time_calls, call, device=device) for i, call in enumerate(calls)}
    effort = Effort(seconds=args.seconds, min_repeats=3, sample_seconds=0)
    base, mine = take_turns(timers, effort).values()
    row: Row = {
        f"mib_{attention}": None if peak is None else peak / images,
        f"step_ms_{attention}": 1000 * mine.median / args.steps / images,
        "dtype": str(subject.dtype).removeprefix("torch."),
    }
    if candidate["variant"] != "unmerged":
        name = "speedup" if attention == "fused" else "speedup_unfused"
        ratios = [a / b for a, b in zip(base.seconds, mine.seconds, strict=True)]
        row |= {f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
        row[name] = base.median / mine.median
    return row


def patched(candidate: Row, subject: Subject, args: argparse.Namespace) -> Any:
    """A copy of the model that shares its weights. The pipeline knows the noise levels."""
    unet = shared_copy(subject.model)
    if candidate["variant"] == "tomesd":
        options = {name: numbered(value) for name, value in candidate["settings"].items()}
        tomesd.apply_patch(subject.pipe_with(unet), **options)
    elif candidate["variant"] == "original":
        load_original(args.original or "").apply_patch(unet, **candidate["settings"])
    return unet


def measure_speeds(file: RowFile, args: argparse.Namespace, device: torch.device) -> None:
    load = partial(load_subject, "demo", device=args.device)
    subjects = {name: load(attention=attention) for name, attention in ATTENTIONS.items()}
    found = [row for name in TIMED for row in candidates(name, args.add)]
    for candidate in {name_of(row): row for row in found}.values():
        outcome = attempt(partial(speed_row, candidate, subjects, args), device)
        print(candidate["label"], outcome, flush=True)
        if not isinstance(outcome, str):
            file.add(outcome)


def main(arguments: list[str] | None = None) -> None:
    parser = Arguments(__doc__, device="auto")
    add = parser.add_argument
    add("sections", nargs="+", choices=[*SECTIONS, "speed"])
    add("--add", nargs=3, action="append", default=[], metavar=("GROUP", "LABEL", "SETTINGS"))
    add("--images", type=Path, default=Path("quality_images"), help="folder to keep images in")
    add("--original", help="folder with tomesd 0.1.3")
    add("--reference", type=Path, help="folder of composed scenes")
    add("--batch", type=int, default=250)
    add("--time-images", type=int, default=64, help="enough that the GPU is slower than the host")
    add("--steps", type=int, default=12, help="to time; images have as many as in their rows")
    add("--seconds", type=float, default=2.0, help="of timing per setting and attention")
    add("--out", type=Path, default=ROWS)
    args = parser.read(arguments)
    device = pick_device(args.device)
    file = RowFile(args.out, device)
    if "speed" in args.sections:
        measure_speeds(file, args, device)
    if chosen := [name for name in SECTIONS if name in args.sections]:
        pipe, judges = load_pipeline("demo", device=args.device), Judges.load(device)
        pipe.set_progress_bar_config(disable=True)
        for name in chosen:
            for row in image_rows(name, pipe, judges, args):
                print(file.add(row), flush=True)


if __name__ == "__main__":
    main()
