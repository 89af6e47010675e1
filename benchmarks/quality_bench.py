"""Makes, judges and times the images of quality.py: the rows of its sections."""

import argparse
import json
import time
from collections import defaultdict
from functools import cached_property
from typing import Any

import tomesd_demo_model
import torch
from quality_jobs import Job, Section, identity, made_once, take_over
from quality_reference import load_reference
from quality_sampling import (
    GUIDANCE,
    Images,
    Sampler,
    compiled,
    compiled_in_parts,
    features,
    fields,
    pair_estimates,
    unfused,
)
from quality_settings import ORIGINAL, UNMERGED, Candidate
from torch import Tensor

from tomesd.bench import RowFile, load_original
from tomesd.bench.models import shared_copy
from tomesd.bench.rows import Row, read_rows
from tomesd.evaluation.metrics import fid_estimate, kid_estimate
from tomesd.evaluation.networks import Inception, Lpips
from tomesd.generation import load_pipeline

OTHER_SEEDS = 1 << 20
MODES = ("in parts", "compiled", "eager")
SHOWN = 10
# Compiling takes longer than it saves for fewer images, and, as it is done for each ratio, for more
# ratios.
IMAGES_TO_COMPILE = 1000
RATIOS_TO_COMPILE = 2


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
        path = args.out / "quality.jsonl"
        take_over(path, args.done)
        self.known = {identity(row): row for row in read_rows(path)}
        self.file = RowFile(path, self.device, resume=True)
        self.unmerged_images: dict[str, int] = defaultdict(int)
        """How many there will be of a seed, so that the first who needs some makes them all."""
        self._bases: dict[Any, Images] = {}
        self._features: dict[Any, Tensor] = {}

    @cached_property
    def inception(self) -> Any:
        return Inception(self.args.inception).to(self.device)

    @cached_property
    def lpips(self) -> Any:
        return Lpips(path=self.args.lpips_weights).to(self.device)

    @cached_property
    def reference(self) -> Tensor | None:
        args = self.args
        if args.reference_file is None:
            return None
        return load_reference(args.reference_file, args.reference, self.device)

    @cached_property
    def unfused(self) -> Any:
        return unfused(self.unet)

    def add(self, row: Row) -> Row:
        added = self.file.add(row)
        self.known[identity(added)] = added
        return added

    def expect(self, sections: list[Section]) -> None:
        """Has unmerged images made for all of these sections at once."""
        counts = self.unmerged_images
        for of in sections:
            mode = self.section_mode(of)
            if of.scheduler == "plms":
                counts[mode] = max(counts[mode], of.images)

    def find(self, of: Section, candidate: Candidate) -> Row | None:
        """A row that is there already: how its images were made does not matter."""
        for mode in MODES:
            row = self.known.get(identity(as_read(self.identity(of, candidate, mode))))
            if row is not None:
                return row
        return None

    def mode(self, job: Job) -> str:
        """How its images are made, and the unmerged ones that they are compared with."""
        mode = self.section_mode(job.largest)
        if mode != "compiled":
            return mode
        slow = job.candidate.variant == ORIGINAL and self.args.eager_original
        many = len(job.candidate.ratios(self.pipe)) > RATIOS_TO_COMPILE
        return "eager" if slow or many else mode

    def section_mode(self, of: Section) -> str:
        if self.args.compile == "parts":
            return "in parts"
        many = of.images >= IMAGES_TO_COMPILE
        return "compiled" if self.args.compile == "whole" and many else "eager"

    def base(self, of: Section, mode: str, seed: int = 0) -> Images:
        """Unmerged images, at least as many as a section has, made once."""
        count = max(of.images, self.unmerged_images[mode] if of.scheduler == "plms" else 0)
        key = (of.steps, of.scheduler, seed, mode)
        if key not in self._bases:
            self._bases[key] = self._shared(key, count, of)
        return self._bases[key]

    def _shared(self, key: tuple[int, str, int, str], count: int, of: Section) -> Images:
        """Kept in the folder of `--cache`, from one call to the next and for other processes."""

        def make() -> Images:
            return self._sample(shared_copy(self.unet), count, of, key[3], seed=key[2])

        args = self.args
        if args.cache is None:
            return make()
        dtype = str(self.unet.dtype).removeprefix("torch.")
        words = (*key, args.size, args.batch, args.layout, dtype)
        name = "_".join(str(word) for word in words)
        return made_once(args.cache, name, count, self.device, make)

    def base_features(self, of: Section, mode: str) -> Tensor:
        """Of the unmerged set that the images of a section are compared with."""
        key = (of.steps, of.scheduler, of.other_seeds, mode)
        if key not in self._features:
            made = self.base(of, mode, OTHER_SEEDS if of.other_seeds else 0)
            self._features[key] = features(made.pixels, self.inception)
        return self._features[key][: of.images]

    def _sample(self, unet: Any, count: int, of: Section, mode: str, *, seed: int = 0) -> Images:
        make = {"compiled": compiled, "in parts": compiled_in_parts}.get(mode)
        model = unet if make is None else make(unet)
        return self.sampler.images(
            model, count, of.steps, of.scheduler, seed=seed, whole_batches=make is not None
        )

    def identity(self, of: Section, candidate: Candidate, mode: str) -> Row:
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
            "mode": mode,
            "variant": candidate.variant,
            "label": candidate.label,
            "settings": candidate.settings,
            "scheduler": of.scheduler,
            "guidance": GUIDANCE,
            "layout": self.args.layout,
            "place": of.place(candidate),
        }

    def adopt(self, of: Section, candidate: Candidate) -> Row | None:
        """A row of the same images by another name or in another table, made one of this table.

        However they were made: it tells that.
        """
        place = {
            "section": f"quality-{of.name}",
            "setting": candidate.group,
            "label": candidate.label,
            "place": of.place(candidate),
        }
        free = (*place, "mode", "layout")
        wanted = as_read(self.identity(of, candidate, mode=""))
        wanted = {name: value for name, value in wanted.items() if name not in free}
        if of.name != "search":
            wanted["unmerged_set"] = _unmerged_set(of)
        for row in self.known.values():
            if all(row.get(name) == value for name, value in wanted.items()):
                return self.add({**row, **place})
        return None

    def rows(self, job: Job, mode: str) -> tuple[list[Row], Tensor]:
        """Makes the images of a job and judges them for each of its rows; some come along."""
        of, candidate = job.largest, job.candidate
        if candidate.variant == UNMERGED:
            made = self.base(of, mode)
        else:
            patched = candidate.apply(self.pipe, self.unet, self.original)
            made = self._sample(patched, of.images, of, mode)
        common: Row = {}
        if self.args.speed:
            common |= {
                "seconds_per_image": made.seconds / len(made.pixels),
                "images_per_second": len(made.pixels) / made.seconds,
                "peak_mib": made.peak_mib,
            }
            if candidate.variant != UNMERGED:
                common |= self.speed(candidate)
        judged = any(section.name != "search" for section, _ in job.rows)
        seen = features(made.pixels, self.inception) if judged else None
        found = []
        for section, named in job.rows:
            began = time.perf_counter()
            row = self.identity(section, named, mode) | common
            row |= self._scores(section, row, made.pixels, seen)
            row["seconds_scoring"] = time.perf_counter() - began
            found.append(row)
        return found, made.pixels[:SHOWN].cpu()

    def _scores(self, of: Section, row: Row, pixels: Tensor, seen: Tensor | None) -> Row:
        """Of the first of the images, as many as the section has."""
        merged, mode = row["variant"] != UNMERGED, row["mode"]
        found: Row = {}
        if merged:
            pair = pixels[: of.images], self.base(of, mode).pixels[: of.images]
            found |= fields(pair_estimates(*pair, self.lpips))
        if of.name == "search" or seen is None:
            return found
        mine = seen[: of.images]
        sets = {"": self.reference}
        # Against itself, the unmerged set would be at distance 0.
        if of.other_seeds or merged:
            sets["_unmerged"] = self.base_features(of, mode)
        for name, theirs in sets.items():
            if theirs is None:
                continue
            paired = name != "" and not of.other_seeds
            draws = self.args.resamples
            estimates = {
                f"fid{name}": fid_estimate(mine, theirs, paired=paired, resamples=draws),
                f"kid{name}": kid_estimate(mine, theirs, paired=paired),
            }
            found |= fields(estimates)
        found["reference_scenes"] = None if self.reference is None else len(self.reference)
        found["unmerged_set"] = _unmerged_set(of)
        return found

    def speed_identity(self, candidate: Candidate) -> Row:
        args = self.args
        return {
            "section": "quality-speed",
            "setting": "",
            "model": "demo",
            "what": "steps",
            "steps": args.time_steps,
            "height": args.size,
            "width": args.size,
            "images": args.time_images,
            "dtype": str(self.unet.dtype).removeprefix("torch."),
            "attention": "default",
            "mode": "eager",
            "variant": candidate.variant,
            "label": candidate.label,
            "settings": candidate.settings,
            "guidance": GUIDANCE,
            "layout": args.layout,
        }

    def speed(self, candidate: Candidate, *, alone: bool = False) -> Row:
        """How many times as fast the steps are, with attention as it is now and as it was then.

        Args:
            alone: nothing else is on the GPU: the peak of memory is measured too. The steps are
                shared out to the repeats, so that a candidate takes a few seconds.
        """
        args = self.args
        found: Row = {"timed_images": args.time_images, "timed_steps": args.time_steps}
        ratios = candidate.ratios(self.pipe)
        for attention, base, images in (
            ("fused", self.unet, args.time_images),
            ("unfused", self.unfused, max(1, args.time_images // 2)),
        ):
            models = {"mine": candidate.apply(self.pipe, base, self.original)}
            if candidate.variant != UNMERGED:
                models["base"] = base
            times = self.sampler.step_times(
                models,
                images,
                args.time_steps,
                args.time_repeats,
                spread=alone,
                every_step_first=len(ratios) > 2,
            )
            calls = args.time_steps * (1 if alone else args.time_repeats)
            found[f"step_ms_{attention}"] = 1000 * sum(times["mine"]) / calls / images
            if candidate.variant != UNMERGED:
                # Repeats of a part of the steps each differ by more than chance if these do.
                found |= _speedups(attention, times, interval=len(ratios) == 1 or not alone)
            if alone:
                del models
                found[f"mib_{attention}"] = self.sampler.step_peak(
                    lambda base=base: candidate.apply(self.pipe, base, self.original), images
                )
        return found


def _speedups(attention: str, times: dict[str, list[float]], *, interval: bool) -> Row:
    name = "speedup" if attention == "fused" else "speedup_unfused"
    found: Row = {name: sum(times["base"]) / sum(times["mine"])}
    ratios = [base / mine for base, mine in zip(times["base"], times["mine"], strict=True)]
    if interval and len(ratios) > 1:
        found |= {f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
    return found


def _unmerged_set(of: Section) -> str:
    return "other seeds" if of.other_seeds else "same seeds"


def as_read(row: Row) -> Row:
    """As a file of rows gives it back: levels become words."""
    return json.loads(json.dumps(row))
