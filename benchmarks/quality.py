"""What merging does to the images of the embedded model: the rows of docs/quality.md.

    python benchmarks/quality.py --make-reference FILE --sprites FILE     once, on a CPU
    python benchmarks/quality.py --reference-file FILE --original FOLDER --sections paper ...
    python benchmarks/quality.py --profile                                what is fast here?

Image i has held-out caption i and seed i in every row. Rows go to OUT/quality.jsonl as they are
made; those that are there, or in the files of `--done`, are not made again, and when
`--budget-seconds` are over, no further one is begun. Images stay on the device; a sheet with a few
of them is written for each section.

Sections: paper, windows, far (for `--size 512`), ablations, seed (50 PLMS steps), search (30 DDIM
steps), front (50 PLMS steps, the settings in the JSON list of `--front`); speed: times and memory
of the settings of paper, seed and, with `--front`, front, to be measured alone on the GPU.

With `--compile parts`, what is the same in all rows is compiled once. With `--compile whole`, each
row of many images compiles the whole UNet, which samples faster, and one process compiles while
others sample. They share the work and the unmerged images, time nothing, and write to folders of
their own; then the rows are joined:

    for K in 1 2 3: python benchmarks/quality.py --compile whole --no-speed --part K/3 \\
                        --cache FOLDER --out PARTS/K ... &
    python benchmarks/quality.py --join --done PARTS/*/quality.jsonl --out FOLDER
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from quality_bench import Bench, as_read
from quality_jobs import Job, identity, jobs, of_part, part_of, same_images, section, take_over
from quality_reference import make_reference
from quality_settings import OURS, Candidate, unmerged
from torch import Tensor

from tomesd.bench.measure import attempt, free_memory
from tomesd.bench.rows import Row
from tomesd.evaluation.figures import pareto_front

TIMED = ("paper", "front", "seed")
SECTIONS = ("paper", "windows", "ablations", "seed", "search", "front", "far", "speed")
SCORES = (("psnr", 2), ("lpips", 4), ("fid", 2), ("fid_unmerged", 2))
FURTHER = (
    ("mib_fused", 1, "MiB"),
    ("mib_unfused", 1, "MiB unfused"),
    ("images_per_second", 1, "images/s"),
    ("seconds_row", 1, "s"),
    ("seconds_scoring", 1, "s for scores"),
)


class Run:
    """Makes rows until the time is up, and knows what went wrong."""

    def __init__(self, bench: Bench, until: float):
        self.bench, self.until = bench, until
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.sheets: dict[str, dict[str, Tensor]] = {}
        self._longest = 0.0

    def over(self) -> bool:
        return time.monotonic() + self._longest > self.until

    def images(self, found: list[Job]) -> None:
        for job in found:
            mode = self.bench.mode(job)
            job.rows = [(of, named) for of, named in job.rows if not self._known(of, named)]
            if not job.rows:
                continue
            if self.over():
                print("time is up", flush=True)
                return
            outcome = self._timed(
                job.candidate, lambda job=job, mode=mode: self.bench.rows(job, mode)
            )
            if outcome is None:
                continue
            (made, few), seconds = outcome
            for row, (of, named) in zip(made, job.rows, strict=True):
                self._add({**row, "seconds_row": seconds})
                if named.shown:
                    self.sheets.setdefault(of.name, {})[named.label] = few

    def _known(self, of: Any, candidate: Candidate) -> bool:
        """Whether there is such a row; one of the same images by another name becomes one."""
        row = self.bench.find(of, candidate) or self.bench.adopt(of, candidate)
        if row is not None:
            self.rows.append(row)
        return row is not None

    def speeds(self, candidates: list[Candidate]) -> None:
        for candidate in candidates:
            row = self.bench.speed_identity(candidate)
            known = self.bench.known.get(identity(as_read(row)))
            if known is not None:
                self.rows.append(known)
                continue
            if self.over():
                print("speed: time is up", flush=True)
                return
            outcome = self._timed(candidate, lambda c=candidate: self.bench.speed(c, alone=True))
            if outcome is not None:
                self._add({**row, **outcome[0], "seconds_row": outcome[1]})

    def _timed(self, candidate: Candidate, work: Any) -> tuple[Any, float] | None:
        began = time.monotonic()
        outcome = attempt(work, self.bench.device)
        free_memory(self.bench.device)
        seconds = time.monotonic() - began
        if isinstance(outcome, str):
            self.failed.append(f"{candidate.variant}, {candidate.label}: {outcome}")
            print(f"FAILED {self.failed[-1]}", flush=True)
            return None
        self._longest = max(self._longest, seconds)
        return outcome, seconds

    def _add(self, row: Row) -> None:
        self.rows.append(self.bench.add(row))
        print(summary(self.rows[-1]), flush=True)


def summary(row: Row) -> str:
    """One line of a table."""
    words = [f"{row['section'][8:]:9s} {row['label'][:52]:52s}"]
    scores = () if row["section"] == "quality-speed" else SCORES
    for name, digits in scores:
        words.append(f"{name} {row[name]:.{digits}f}" if row.get(name) is not None else f"{name} -")
    for name in ("speedup", "speedup_unfused"):
        if row.get(name) is not None:
            words.append(f"{name} {row[name]:.3f}")
    for name, digits, unit in FURTHER:
        if row.get(name) is not None:
            words.append(f"{row[name]:.{digits}f} {unit}")
    return "  ".join(words)


def pareto(rows: list[Row], speed: str) -> list[Row]:
    """Those that no other is both faster than and closer to the unmerged image, slowest first."""
    rows = [row for row in rows if row.get(speed) and row.get("lpips") is not None]
    return [rows[i] for i in pareto_front([(row[speed], row["lpips"]) for row in rows], "less")]


def write_sheet(images: dict[str, Tensor], path: Path) -> None:
    """A line of small images for each label, which stands above it."""
    from PIL import Image, ImageDraw

    lines = [few.permute(2, 0, 3, 1).flatten(1, 2) for few in images.values()]
    height, width = lines[0].shape[0] // 2, lines[0].shape[1] // 2
    room = 16
    picture = Image.new("RGB", (width, len(lines) * (height + room)), "white")
    draw = ImageDraw.Draw(picture)
    for place, (label, line) in enumerate(zip(images, lines, strict=True)):
        top = place * (height + room)
        draw.text((4, top + 2), label, fill="black")
        small = Image.fromarray(line.numpy()).resize((width, height), Image.Resampling.BOX)
        picture.paste(small, (0, top + room))
    picture.save(path, quality=85)


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments)
    if args.make_reference:
        make_reference(args)
        return
    if args.join:
        print(f"{take_over(args.out / 'quality.jsonl', args.done)} new rows")
        return
    torch.backends.cudnn.benchmark = True
    # Images are judged in full precision, as the scenes that they are compared with were.
    torch.backends.cudnn.allow_tf32 = False
    if args.profile:
        from quality_profile import profile

        profile(args)
        return
    until = time.monotonic() + args.budget_seconds
    run = Run(Bench(args), until)
    make_rows(run, args)
    report(run)


def make_rows(run: Run, args: argparse.Namespace) -> None:
    pipe = run.bench.pipe
    sections = [section(name, args, pipe) for name in args.sections if name != "speed"]
    run.bench.expect(sections)
    run.images(of_part(jobs(sections), args.part))
    for name, sheet in run.sheets.items():
        write_sheet(sheet, args.out / f"quality_{name}.jpg")
    if "speed" in args.sections:
        names = [name for name in TIMED if name != "front" or args.front]
        listed = [c for name in names for c in section(name, args, pipe).candidates]
        # Of the same settings by several names, the first.
        distinct = {same_images(c): c for c in reversed([unmerged(), *listed])}
        run.speeds(list(reversed(distinct.values())))


def report(run: Run) -> None:
    print("\nAll rows of these sections")
    for row in run.rows:
        print(summary(row))
    searched = [row for row in run.rows if row["section"] == "quality-search"]
    for speed in ("speedup", "speedup_unfused"):
        front = pareto(searched, speed)
        if front:
            print(f"\nPareto front, LPIPS against {speed}")
        for row in front:
            mark = "" if row["variant"] == OURS else "  (0.1.3)"
            print(f"{row[speed]:.3f}x  lpips {row['lpips']:.4f}  {row['label']}{mark}")
    if run.failed:
        sys.exit("\n".join(["", *run.failed]))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS[:5]))
    add("--images", type=int, default=2000, help="of a row of paper, windows and front")
    add("--few", type=int, default=128, help="images of a row of the other sections")
    add("--steps", type=int, default=50)
    add("--search-steps", type=int, default=30)
    add("--size", type=int, default=256)
    add("--batch", type=int, default=250)
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--layout", choices=("contiguous", "channels_last"), default="contiguous")
    add("--compile", choices=("whole", "parts"), help="the UNet, for sampling only; see above")
    add("--eager-original", action="store_true", help="do not compile 0.1.3, which takes long")
    add("--original", type=Path, help="folder of tomesd 0.1.3")
    add("--inception", type=Path)
    add("--lpips-weights", type=Path)
    add("--reference-file", type=Path, help="from --make-reference")
    add("--reference", type=int, default=2000, help="how many composed scenes")
    add("--other-seeds", action="store_true", help="FID to a second unmerged set, of other seeds")
    add("--resamples", type=int, default=12, help="for the intervals of FID")
    add("--time-images", type=int, default=64, help="enough that the GPU is slower than the host")
    add("--time-steps", type=int, default=12)
    add("--time-repeats", type=int, help="default: 3 for the section speed, 1 otherwise")
    add("--no-speed", dest="speed", action="store_false", help="time nothing: the GPU is shared")
    add("--part", type=part_of, default=(1, 1), metavar="K/N", help="make every Nth row only")
    add("--front", type=Path, help="JSON list of settings")
    add("--out", type=Path, default=Path("benchmarks/results"))
    add("--done", type=Path, nargs="+", default=[], help="files of rows to take over")
    add("--join", action="store_true", help="take over the rows of --done, and no more")
    add("--cache", type=Path, help="folder to keep unmerged images in, for all processes")
    add("--budget-seconds", type=float, default=float("inf"))
    add("--profile", action="store_true", help="time a step in several ways, and no more")
    add("--make-reference", type=Path, help="compose scenes, save their features, and no more")
    add("--sprites", type=Path, help="sprites.npz of the training, for --make-reference")
    args = parser.parse_args(arguments)
    if "front" in args.sections and args.front is None:
        parser.error("--sections front: needs --front FILE")
    if args.make_reference and args.sprites is None:
        parser.error("--make-reference: needs --sprites FILE")
    if args.time_repeats is None:
        args.time_repeats = 3 if "speed" in args.sections else 1
    return args


if __name__ == "__main__":
    main()
