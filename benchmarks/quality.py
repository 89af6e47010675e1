"""What merging does to the images of the embedded model: the rows of docs/quality.md.

    python benchmarks/quality.py --make-reference FILE --sprites FILE     once, on a CPU
    python benchmarks/quality.py --reference-file FILE --original FOLDER --sections paper ...
    python benchmarks/quality.py --profile                                what is fast here?

Image i has held-out caption i and seed i in every row. Rows go to OUT/quality.jsonl as they are
made; those that are there, or in the file of `--done`, are not made again, and when
`--budget-seconds` are over, no further one is begun. Images stay on the device; a sheet with a few
of them is written for each section.

Sections: paper, ablations, seed (50 PLMS steps), search (30 DDIM steps), front (50 PLMS steps, the
settings in the JSON list of `--front`).
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quality_settings
import tomesd_demo_model
import torch
from quality_reference import load_reference, make_reference
from quality_sampling import (
    GUIDANCE,
    Images,
    Sampler,
    compiled_blocks,
    features,
    fields,
    pair_estimates,
    unfused,
)
from quality_settings import OURS, UNMERGED, Candidate, unmerged
from torch import Tensor

from tomesd.bench import RowFile, load_original
from tomesd.bench.measure import attempt, free_memory
from tomesd.bench.rows import Row
from tomesd.evaluation.metrics import fid_estimate, kid_estimate
from tomesd.evaluation.networks import Inception, Lpips
from tomesd.generation import load_pipeline

SECTIONS = ("paper", "ablations", "seed", "search", "front")
OTHER_SEEDS = 1 << 20
SHOWN = 10


@dataclass(frozen=True)
class Section:
    """How the images of a section are made."""

    name: str
    images: int
    steps: int
    scheduler: str
    candidates: list[Candidate]
    other_seeds: bool = False
    """Whether there is a second unmerged set, of other seeds, to take the distance to."""


def section(name: str, args: argparse.Namespace, pipe: Any) -> Section:
    if name == "search":
        return Section(name, args.few, args.search_steps, "ddim", quality_settings.search())
    many = name in ("paper", "front")
    lists: dict[str, Callable[[], list[Candidate]]] = {
        "paper": quality_settings.paper,
        "ablations": quality_settings.ablations,
        "seed": lambda: quality_settings.seed(threshold(pipe, 0.4)),
        "front": lambda: quality_settings.front(args.front),
    }
    count = args.images if many else args.few
    return Section(name, count, args.steps, "plms", lists[name](), many and not args.same_seeds)


def threshold(pipe: Any, share: float) -> float:
    """The noise level below which so many of the steps lie."""
    kept = pipe.scheduler.alphas_cumprod
    return round(1 - float(kept[round(share * (len(kept) - 1))]), 3)


class Bench:
    """The model, the networks that judge, and the unmerged images to compare with."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.pipe = load_pipeline("demo", device=args.device, dtype=args.dtype)
        self.unet = self.pipe.unet
        self.device = self.unet.device
        if args.layout == "channels_last":
            self.unet.to(memory_format=torch.channels_last)
            self.pipe.vae.to(memory_format=torch.channels_last)
        captions = tomesd_demo_model.held_out_captions()
        self.sampler = Sampler(self.pipe, captions, args.size, args.batch)
        self.original = load_original(args.original) if args.original else None
        self.inception = Inception(args.inception).to(self.device)
        self.lpips = Lpips(path=args.lpips_weights).to(self.device)
        self.reference: Tensor | None = None
        if args.reference_file:
            self.reference = load_reference(args.reference_file, args.reference, self.device)
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / "quality.jsonl"
        if args.done and args.done.exists() and not path.exists():
            shutil.copyfile(args.done, path)
        self.file = RowFile(path, self.device, resume=True)
        self._bases: dict[Any, Images] = {}
        self._other: dict[Any, Tensor] = {}
        self._unfused: Any = None

    def base(self, of: Section, seed: int = 0) -> Images:
        """The unmerged images of a section, made once."""
        key = (of.images, of.steps, of.scheduler, seed)
        if key not in self._bases:
            self._bases[key] = self._cached(key, lambda: self._sample(self.unet, of, seed))
        return self._bases[key]

    def _cached(self, key: tuple[Any, ...], make: Callable[[], Images]) -> Images:
        """Kept in the folder of `--cache` from one call to the next."""
        if self.args.cache is None:
            return make()
        where = [*key, self.args.size, self.args.batch, self.unet.dtype, self.args.compile]
        path = self.args.cache / ("_".join(str(word) for word in where) + ".pt")
        if path.exists():
            found = torch.load(path, map_location=self.device, weights_only=True)
            return Images(**found)
        made = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(vars(made), path)
        return made

    def other(self, of: Section) -> Tensor:
        """Features of the unmerged set that sets are compared with."""
        key = (of.images, of.steps, of.scheduler, of.other_seeds)
        if key not in self._other:
            made = self.base(of, OTHER_SEEDS if of.other_seeds else 0)
            self._other[key] = features(made.pixels, self.inception)
            if of.other_seeds:
                self._bases.pop((of.images, of.steps, of.scheduler, OTHER_SEEDS))
        return self._other[key]

    def _sample(self, unet: Any, of: Section, seed: int = 0) -> Images:
        with compiled_blocks(self.args.compile):
            return self.sampler.images(unet, of.images, of.steps, of.scheduler, seed=seed)

    def identity(self, of: Section, candidate: Candidate) -> Row:
        """What tells a row from others, and how it is made."""
        return {
            "section": f"quality-{of.name}",
            "setting": candidate.group,
            "model": "demo",
            "what": "images",
            "steps": of.steps,
            "height": self.args.size,
            "width": self.args.size,
            "images": of.images,
            "batch": min(self.args.batch, of.images),
            "dtype": str(self.unet.dtype).removeprefix("torch."),
            "attention": "default",
            "mode": "compiled residual blocks" if self.args.compile else "eager",
            "variant": candidate.variant,
            "label": candidate.label,
            "settings": candidate.settings,
            "scheduler": of.scheduler,
            "guidance": GUIDANCE,
            "layout": self.args.layout,
        }

    def twin(self, of: Section, candidate: Candidate) -> Row | None:
        """The row of the same images under another name or in another table."""
        names = ("section", "setting", "label")
        wanted = {k: v for k, v in self.identity(of, candidate).items() if k not in names}
        wanted = json.loads(json.dumps(wanted))
        judged_alike = "other seeds" if of.other_seeds else "same seeds"
        for row in self.file.rows:
            alike = of.name == "search" or row.get("unmerged_set") == judged_alike
            if alike and all(row.get(name) == value for name, value in wanted.items()):
                return {k: v for k, v in row.items() if k not in ("run", "date")}
        return None

    def row(self, of: Section, candidate: Candidate) -> tuple[Row, Tensor]:
        """Makes the images of a candidate and judges them; a few of them come along."""
        row = self.identity(of, candidate)
        if candidate.variant == UNMERGED:
            made = self.base(of)
        else:
            made = self._sample(candidate.apply(self.pipe, self.unet, self.original), of)
        row |= {
            "seconds_per_image": made.seconds / of.images,
            "images_per_second": of.images / made.seconds,
            "peak_mib": made.peak_mib,
        }
        began = time.perf_counter()
        row |= self._scores(of, candidate, made.pixels)
        row["seconds_scoring"] = time.perf_counter() - began
        if candidate.variant != UNMERGED:
            row |= self._speed(candidate)
        return row, made.pixels[:SHOWN].cpu()

    def _scores(self, of: Section, candidate: Candidate, pixels: Tensor) -> Row:
        found: Row = {}
        if candidate.variant != UNMERGED:
            found |= fields(pair_estimates(pixels, self.base(of).pixels, self.lpips))
        if of.name == "search":
            return found
        mine = features(pixels, self.inception)
        sets = {"": self.reference}
        # Against itself, the unmerged set would be at distance 0.
        if of.other_seeds or candidate.variant != UNMERGED:
            sets["_unmerged"] = self.other(of)
        for name, features_of_set in sets.items():
            if features_of_set is not None:
                paired = name != "" and not of.other_seeds
                estimates = {
                    f"fid{name}": fid_estimate(
                        mine, features_of_set, paired=paired, resamples=self.args.resamples
                    ),
                    f"kid{name}": kid_estimate(mine, features_of_set, paired=paired),
                }
                found |= fields(estimates)
        found["reference_scenes"] = None if self.reference is None else len(self.reference)
        found["unmerged_set"] = "other seeds" if of.other_seeds else "same seeds"
        return found

    def _speed(self, candidate: Candidate) -> Row:
        """How many times as fast the steps are, with attention as it is now and as it was then."""
        args = self.args
        if self._unfused is None:
            self._unfused = unfused(self.unet)
        found: Row = {"timed_images": args.time_images, "timed_steps": args.time_steps}
        for name, base, images in (
            ("speedup", self.unet, args.time_images),
            ("speedup_unfused", self._unfused, max(1, args.time_images // 2)),
        ):
            models = {"base": base, "mine": candidate.apply(self.pipe, base, self.original)}
            times = self.sampler.step_times(models, images, args.time_steps, args.time_repeats)
            ratios = [b / m for b, m in zip(times["base"], times["mine"], strict=True)]
            found[name] = sum(times["base"]) / sum(times["mine"])
            if len(ratios) > 1:
                found |= {f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
            found[f"step_ms_{'unfused' if 'unfused' in name else 'fused'}"] = (
                1000 * min(times["mine"]) / args.time_steps / images
            )
        return found


def run_section(bench: Bench, of: Section, until: float) -> tuple[list[Row], list[str]]:
    """All rows of a section that can be made before `until`, and what went wrong."""
    rows: list[Row] = []
    failed: list[str] = []
    sheet: dict[str, Tensor] = {}
    longest = 0.0
    for candidate in [unmerged(), *of.candidates]:
        row = bench.file.find(bench.identity(of, candidate))
        if row is None:
            if time.monotonic() + longest > until:
                print(f"{of.name}: time is up", flush=True)
                break
            began = time.monotonic()
            twin = bench.twin(of, candidate)
            if twin is not None:
                rows.append(bench.file.add({**twin, **bench.identity(of, candidate)}))
                continue
            outcome = attempt(lambda c=candidate: bench.row(of, c), bench.device)
            if isinstance(outcome, str):
                failed.append(f"{of.name}, {candidate.label}: {outcome}")
                print(f"FAILED {failed[-1]}", flush=True)
                continue
            made, few = outcome
            made["seconds_row"] = time.monotonic() - began
            longest = max(longest, made["seconds_row"])
            row = bench.file.add(made)
            if candidate.shown:
                sheet[candidate.label] = few
            print(summary(row), flush=True)
            free_memory(bench.device)
        rows.append(row)
    if sheet:
        write_sheet(sheet, bench.args.out / f"quality_{of.name}.jpg")
    return rows, failed


def summary(row: Row) -> str:
    """One line of a table."""
    words = [f"{row['section'][8:]:9s} {row['label'][:52]:52s}"]
    for name, digits in (("psnr", 2), ("lpips", 4), ("fid", 2), ("fid_unmerged", 2)):
        words.append(f"{name} {row[name]:.{digits}f}" if row.get(name) is not None else f"{name} -")
    for name in ("speedup", "speedup_unfused"):
        if row.get(name) is not None:
            words.append(f"{name} {row[name]:.3f}")
    words.append(f"{row['images_per_second']:.1f} images/s")
    words.append(f"{row['seconds_row']:.0f} s, scoring {row['seconds_scoring']:.0f} s")
    return "  ".join(words)


def pareto(rows: list[Row], speed: str) -> list[Row]:
    """Those that no other is both faster than and closer to the unmerged image, slowest first."""
    rows = [row for row in rows if row.get(speed) and row.get("lpips") is not None]
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (-row[speed], row["lpips"])):
        if not best or row["lpips"] < best[-1]["lpips"]:
            best.append(row)
    return best[::-1]


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
    torch.backends.cudnn.benchmark = True
    # Images are judged in full precision, as the scenes that they are compared with were.
    torch.backends.cudnn.allow_tf32 = False
    if args.profile:
        from quality_profile import profile

        profile(args)
        return
    until = time.monotonic() + args.budget_seconds
    bench = Bench(args)
    rows: list[Row] = []
    failed: list[str] = []
    for name in args.sections:
        made, wrong = run_section(bench, section(name, args, bench.pipe), until)
        rows, failed = rows + made, failed + wrong
    print("\nAll rows of these sections")
    for row in rows:
        print(summary(row))
    searched = [row for row in rows if row["section"] == "quality-search"]
    for speed in ("speedup", "speedup_unfused"):
        if searched:
            print(f"\nPareto front, LPIPS against {speed}")
        for row in pareto(searched, speed):
            mark = "" if row["variant"] == OURS else "  (0.1.3)"
            print(f"{row[speed]:.3f}x  lpips {row['lpips']:.4f}  {row['label']}{mark}")
    if failed:
        sys.exit("\n".join(["", *failed]))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS[:4]))
    add("--images", type=int, default=2000, help="of a row of paper and front")
    add("--few", type=int, default=128, help="images of a row of the other sections")
    add("--steps", type=int, default=50)
    add("--search-steps", type=int, default=30)
    add("--size", type=int, default=256)
    add("--batch", type=int, default=250)
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--layout", choices=("channels_last", "contiguous"), default="channels_last")
    add("--compile", action="store_true", help="compile residual blocks, for sampling only")
    add("--original", type=Path, help="folder of tomesd 0.1.3")
    add("--inception", type=Path)
    add("--lpips-weights", type=Path)
    add("--reference-file", type=Path, help="from --make-reference")
    add("--reference", type=int, default=2000, help="how many composed scenes")
    add("--same-seeds", action="store_true", help="no second unmerged set")
    add("--resamples", type=int, default=12, help="for the intervals of FID")
    add("--time-images", type=int, default=64, help="enough that the GPU is slower than the host")
    add("--time-steps", type=int, default=12)
    add("--time-repeats", type=int, default=1)
    add("--front", type=Path, help="JSON list of settings")
    add("--out", type=Path, default=Path("benchmarks/results"))
    add("--done", type=Path, help="a quality.jsonl to go on from")
    add("--cache", type=Path, help="folder to keep unmerged images in")
    add("--budget-seconds", type=float, default=float("inf"))
    add("--profile", action="store_true", help="time a step in several ways, and no more")
    add("--make-reference", type=Path, help="compose scenes, save their features, and no more")
    add("--sprites", type=Path, help="sprites.npz of the training, for --make-reference")
    args = parser.parse_args(arguments)
    if "front" in args.sections and args.front is None:
        parser.error("--sections front: needs --front FILE")
    if args.make_reference and args.sprites is None:
        parser.error("--make-reference: needs --sprites FILE")
    return args


if __name__ == "__main__":
    main()
