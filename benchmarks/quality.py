"""What merging does to the images of the embedded model: the rows of docs/quality.md, made again.

    python benchmarks/quality.py paper front --original FOLDER --reference FOLDER --images FOLDER

The rows in results/quality.jsonl are the list of what is compared: a section is made again with the
settings that its rows have; presets as they are now. Images are made and judged with
`tomesd.evaluation`, and kept in FOLDER of `--images`, so that a run goes on where it was stopped;
settings that are in several sections are run once. FOLDER of `--reference` is from
demo_model/training/compose_scenes.py. Rows are added to the same file; image i has held-out caption
i and seed i in every row. `tomesd eval` compares other settings, and tells how fast they are.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import RESULTS, Arguments

from tomesd.bench import RowFile, load_original
from tomesd.bench.rows import Row, read_rows
from tomesd.evaluation import Judges, Reference, Run, Variant, define, evaluate
from tomesd.evaluation.prompts import load_prompts, make_items
from tomesd.generation import load_pipeline
from tomesd.generation.loading import pick_device

ROWS = RESULTS / "quality.jsonl"
SIDE, GUIDANCE = 256, 5.0
SECTIONS = ("paper", "front", "ablations", "seed", "search")
KINDS = {"unmerged": "unmerged", "original": "original", "tomesd": "merged"}
CANDIDATE = ("setting", "variant", "label", "settings", "images", "steps", "scheduler")
"""What is taken from a row to make it again."""


def candidates(section: str) -> list[Row]:
    """In the order of the table."""
    found: dict[str, Row] = {}
    for row in read_rows(ROWS):
        if row["section"] == f"quality-{section}":
            one = {name: row[name] for name in CANDIDATE}
            found.setdefault(json.dumps(one, sort_keys=True), {**one, "place": row["place"]})
    rows = sorted(found.values(), key=lambda row: row["place"])
    for row in rows:
        if row["variant"] == "tomesd":
            # No rule may leave a layer alone: what a row says has to be merged.
            row["settings"] = {"when": "always", **row["settings"]}
    return rows


def name_of(row: Row) -> str:
    """Of its folder: equal for settings that make the same images."""
    words = json.dumps(row["settings"], sort_keys=True)
    return f"{row['variant']}{re.sub(r'[^A-Za-z0-9.]+', '-', words).rstrip('-')}"


def image_rows(section: str, pipe: Any, judges: Judges, args: argparse.Namespace) -> Iterator[Row]:
    """Makes and judges the images of a section."""
    rows = candidates(section)
    made = {name: rows[0][name] for name in ("images", "scheduler", "steps")}
    reference = Reference.of(args.reference) if args.reference else None
    # Once each, whatever they are called.
    variants = {name_of(row): row for row in rows}
    definition = define(
        pipe,
        model={"model": "unet"},
        prompts="held-out",
        items=make_items(load_prompts("held-out", made["images"])),
        variants=[Variant(k, KINDS[v["variant"]], v["settings"]) for k, v in variants.items()],
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
        scores = {k: v for name, one in found.metrics.items() for k, v in one.fields(name).items()}
        yield {
            **{"section": f"quality-{section}", "model": "unet", "what": "images", "place": place},
            **{name: row[name] for name in ("setting", "variant", "label", "settings")},
            **{"height": SIDE, "width": SIDE, "attention": "default", "mode": "eager"},
            **{**made, "guidance": GUIDANCE, "batch": args.batch, "dtype": definition.dtype},
            **{"reference_scenes": reference and len(reference.files)},
            **{"unmerged_set": "same seeds", "seconds_per_image": found.seconds},
            **{"peak_mib": found.peak_mib, **scores},
        }


def main(arguments: list[str] | None = None) -> None:
    parser = Arguments(__doc__, device="auto")
    add = parser.add_argument
    add("sections", nargs="+", choices=SECTIONS)
    add("--images", type=Path, default=Path("quality_images"), help="folder to keep images in")
    add("--original", help="folder with tomesd 0.1.3")
    add("--reference", type=Path, help="folder of composed scenes")
    add("--batch", type=int, default=250)
    add("--out", type=Path, default=ROWS)
    args = parser.read(arguments)
    device = pick_device(args.device)
    file = RowFile(args.out, device)
    pipe, judges = load_pipeline("unet", device=args.device), Judges.load(device)
    pipe.set_progress_bar_config(disable=True)
    for name in args.sections:
        for row in image_rows(name, pipe, judges, args):
            print(file.add(row), flush=True)


if __name__ == "__main__":
    main()
