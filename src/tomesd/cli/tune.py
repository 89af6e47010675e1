"""tomesd tune: the settings that keep a budget of quality or of time."""

import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from .. import presets
from ..files import append_json_line, check_writable, read_json_lines, unused
from .options import MergeOptions, ModelOptions, PromptOptions, SamplingOptions
from .screen import about, number_table, progress_bar

if TYPE_CHECKING:
    from ..evaluation import Item, Sampling
    from ..evaluation.tuning import Budget, Measurement

_FRESH = 1 << 16
"""How far the seeds of the last check are from those of the search."""


class NothingFoundError(Exception):
    """No settings keep the budget."""


@dataclass(frozen=True)
class Tune:
    """Search the settings that are fastest within a budget of quality, or closest to the unmerged
    images at a speed-up. Give one budget.

    Merge options that are given stay as they are; the search tries the others. Ctrl-C ends it
    early, with the best that was seen until then; --resume goes on.
    """

    max_lpips: float | None = None
    """The fastest settings with at most this LPIPS to the unmerged images."""
    min_psnr: float | None = None
    """The fastest settings with at least this PSNR to the unmerged images, in dB."""
    speedup: float | None = None
    """The settings with the least LPIPS that are at least this many times as fast."""
    trials: int = 40
    """How many settings to measure."""
    repeats: int = 3
    """How many times to take the time of each. More: less noise."""
    search_seed: int = 0
    """Seed of the search."""
    batch: int = 4
    """Images made at a time. As many as you will make: how much merging gains depends on it."""
    lpips: Literal["alex", "vgg"] = "alex"
    """Network of LPIPS."""
    lpips_weights: Path | None = None
    """A file instead of the installed weights of LPIPS."""
    out: Path = Path("settings.json")
    """The settings file to write."""
    overwrite: bool = False
    """Replace files of these names. Otherwise new ones get a number."""
    log: Path | None = None
    """A file to write a line of JSON to for every trial. Next to --out if not given."""
    resume: bool = False
    """Go on with the search in the log: what it has measured is not measured again."""
    prompt: PromptOptions = field(default_factory=lambda: PromptOptions(count=4))
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    merge: MergeOptions = field(default_factory=MergeOptions)

    def run(self, console: Console) -> None:
        from ..evaluation import Sampling
        from ..evaluation.networks import Lpips
        from ..evaluation.tuning import Budget, SideBySide, choose, front_of, search
        from ..generation.lines import python_line
        from ..generation.loading import denoiser, need
        from ..generation.sampling import estimate_seconds

        need("optuna", "scipy", "torchmetrics")
        budget = Budget.of(max_lpips=self.max_lpips, min_psnr=self.min_psnr, speedup=self.speedup)
        self._check()
        path = self._log_path()
        network = Lpips(self.lpips, self.lpips_weights)
        console.print(f"Loading the model ({self.model.model})")
        pipe = self.model.load()
        network.to(denoiser(pipe).device)
        sampling = Sampling.of(pipe, **self.sampling.arguments())
        about_run = json.loads(json.dumps(self._about_run(sampling), default=str))
        known = _read_log(path, about_run) if self.resume else {}
        path.unlink(missing_ok=True)  # what is known of it is written again
        log = partial(append_json_line, path)
        with progress_bar(console) as on_progress:
            log(about_run)
            trial = ("", 0.0, 0)

            def on_trial(words: str, done: float, total: int) -> None:
                nonlocal trial
                trial = (words, done, total)
                on_progress(*trial)

            def on_call(share: float) -> None:
                words, done, total = trial
                on_progress(words, done + share, total)

            def measures(items: "list[Item]", repeats: int) -> SideBySide:
                batch = self.batch
                return SideBySide(pipe, items, sampling, network, batch, repeats, on_call)

            first = measures(self.prompt.items(), self.repeats)
            again = measures(self.prompt.items(_FRESH), max(self.repeats, 5))
            seconds = estimate_seconds(pipe, sampling, min(self.batch, first.images))
            trials = self.trials - len(known)
            console.print(
                f"{trials} trials of {first.calls * self.batch} images: "
                f"{about(trials * first.calls * seconds)}. Ctrl-C ends it early, --resume goes on."
            )

            def on_interrupt(done: int) -> None:
                console.print(
                    f"Interrupted after {done} trials, which are in {path}. Now the best is "
                    f"measured on fresh images: {about(again.calls * seconds)} or more. Ctrl-C "
                    "again ends it without."
                )

            seen = search(
                first.measure,
                **self._space(pipe, sampling),
                trials=self.trials,
                seed=self.search_seed,
                on_progress=on_trial,
                log=log,
                known=known,
                on_interrupt=on_interrupt,
            )
            chosen = choose(seen, budget, again.measure, on_progress=on_trial, log=log)
        console.print(_table(front_of(seen)), soft_wrap=False)
        if chosen is None:
            raise NothingFoundError(_nothing(budget, seen))
        out = unused(self.out, overwrite=self.overwrite)
        presets.save(out, chosen.options, **self._about(pipe, sampling, budget, chosen, seen))
        console.print(f"{out}  on fresh images: {chosen}")
        console.print(python_line(chosen.options))

    def _log_path(self) -> Path:
        """Where the log is, or is to be."""
        path = self.log or self.out.with_name(f"{self.out.stem}.trials.jsonl")
        check_writable(self.out, folder=False)
        check_writable(path, "log", folder=False)
        if not self.resume:
            return unused(path, overwrite=self.overwrite)
        if not path.is_file():
            raise ValueError(f"resume: there is no log of a search at {path}")
        return path

    def _about_run(self, sampling: "Sampling") -> dict[str, Any]:
        """What has to be the same for a search to go on."""
        return {
            "model": asdict(self.model),
            "sampling": asdict(sampling),
            "prompt": asdict(self.prompt),
            "merge": {"preset": self.merge.preset, **self.merge.base(), **self.merge.given()},
            "batch": self.batch,
            "repeats": self.repeats,
            "lpips": self.lpips,
            "search_seed": self.search_seed,
        }

    def _space(self, pipe: Any, sampling: "Sampling") -> dict[str, Any]:
        """Where to search, as `search` takes it."""
        from ..evaluation.search_space import (
            first_options,
            levels_of,
            refused_options,
            search_space,
        )
        from ..generation.loading import preset_traits

        levels = levels_of(pipe, sampling)
        given = self.merge.given()
        base = self.merge.base(**preset_traits(pipe))
        space = search_space(levels, given.keys() | refused_options(pipe))
        searched = {choice.name for choice in space}
        # Of a settings file, what the search does not try stays; the rest is where it starts.
        fixed = {name: value for name, value in base.items() if name not in searched} | given
        first = first_options(fixed, base, transformer=not levels)
        return {"space": space, "fixed": fixed, "first": first}

    def _check(self) -> None:
        """What can be said before anything is loaded."""
        self.merge.check()
        counts = {name: getattr(self, name) for name in ("trials", "repeats", "batch")}
        for name, count in {**counts, "steps": self.sampling.steps}.items():
            if count < 1:
                raise ValueError(f"{name}={count}: must be at least 1")
        if self.model.compile:
            raise ValueError(
                "compile: each trial would be compiled anew; tune without it, compile afterwards"
            )
        self.prompt.items()

    def _about(
        self,
        pipe: Any,
        sampling: "Sampling",
        budget: "Budget",
        chosen: "Measurement",
        seen: "list[Measurement]",
    ) -> dict[str, Any]:
        """What was measured, and on what."""
        from ..evaluation.runs import device_name, versions

        return {
            "budget": str(budget),
            "measured": {
                "speedup": round(chosen.speedup, 3),
                "seconds": round(chosen.seconds, 4),
                "lpips": round(chosen.lpips, 5),
                "psnr": round(chosen.psnr, 2),
            },
            "model": asdict(self.model),
            "sampling": asdict(sampling),
            "prompts": self.prompt.prompts,
            "images": len(self.prompt.items()),
            "batch": self.batch,
            "trials": len(seen),
            "device": device_name(pipe),
            "versions": versions(),
        }


def _read_log(path: Path, about_run: dict[str, Any]) -> "dict[str, Measurement]":
    """The trials of a search, which has to be the same as this one but for their number."""
    from ..evaluation.tuning import Measurement, key_of

    first, *lines = read_json_lines(path) or [{}]
    for name, value in about_run.items():
        if first.get(name) != value:
            was = f"{path} was made with {name} = {first.get(name)!r}"
            raise ValueError(f"resume: {was}, and this is {name} = {value!r}")
    trials = [{k: v for k, v in line.items() if k != "trial"} for line in lines if "trial" in line]
    return {key_of(line["options"]): Measurement(**line) for line in trials}


def _table(front: "list[Measurement]") -> Table:
    from ..generation.lines import arguments

    header = ("settings", "s / image", "speed-up", "LPIPS", "PSNR (dB)")
    rows = [("no merging", "-", "1.00x", "0.0000", "-")]
    for m in front:
        numbers = (f"{m.seconds:.3f}", f"{m.speedup:.2f}x", f"{m.lpips:.4f}", f"{m.psnr:.1f}")
        rows.append((arguments(m.options), *numbers))
    return number_table("The best that was seen", header, rows)


def _nothing(budget: "Budget", seen: "list[Measurement]") -> str:
    from ..generation.lines import arguments

    kept = [measured for measured in seen if budget.kept_by(measured)]
    nearest = budget.nearest(seen)
    if nearest is None:
        return f"no settings keep a {budget}: none of {len(seen)} was faster than no merging"
    best = f"{nearest} ({arguments(nearest.options)})"
    if kept:
        return f"no settings keep a {budget} on fresh images; nearest in the search: {best}"
    return f"no settings keep a {budget}; nearest of {len(seen)}: {best}"
