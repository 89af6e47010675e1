"""tomesd tune: the settings that keep a budget of quality or of time."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from .. import presets
from ..files import check_writable, read_json_lines, unused
from .options import MergeOptions, ModelOptions, PromptOptions, SamplingOptions
from .progress import about, progress_bar

if TYPE_CHECKING:
    from ..evaluation import Item, Sampling
    from ..evaluation.tuning import Budget, Log, Measure, Measurement
    from ..generation.progress import OnProgress

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
        from ..evaluation.search_space import can_be_coarse, levels_of
        from ..evaluation.tuning import Budget, SideBySide, choose, front_of
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
        with progress_bar(console) as on_progress, _log_to(path) as log:
            log(about_run)
            bar = _TrialBar(on_progress)

            def measures(items: "list[Item]", repeats: int) -> SideBySide:
                batch, on_call = self.batch, bar.on_call
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

            levels = levels_of(pipe, sampling)
            refused = set() if can_be_coarse(pipe) else {"coarse"}
            seen = self._search(first.measure, levels, refused, bar, log, known, on_interrupt)
            chosen = choose(seen, budget, again.measure, on_progress=bar.on_trial, log=log)
        console.print(_table(front_of(seen)), soft_wrap=False)
        if chosen is None:
            raise NothingFoundError(_nothing(budget, seen))
        out = unused(self.out, overwrite=self.overwrite)
        presets.save(out, chosen.options, **self._about(pipe, sampling, budget, chosen, seen))
        _tell(console, chosen, out)

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

    def _search(
        self,
        measure: "Measure",
        levels: list[int],
        refused: set[str],
        bar: "_TrialBar",
        log: "Log",
        known: "dict[str, Measurement]",
        on_interrupt: Callable[[int], None],
    ) -> "list[Measurement]":
        from ..evaluation.search_space import first_options, search_space
        from ..evaluation.tuning import search

        given = self.merge.given()
        base = self.merge.base("unet" if levels else "transformer")
        space = search_space(levels, given.keys() | refused)
        searched = {choice.name for choice in space}
        # Of a settings file, what the search does not try stays; the rest is where it starts.
        fixed = {name: value for name, value in base.items() if name not in searched} | given
        return search(
            measure,
            space,
            trials=self.trials,
            fixed=fixed,
            first=first_options(fixed, base, transformer=not levels),
            seed=self.search_seed,
            on_progress=bar.on_trial,
            log=log,
            known=known,
            on_interrupt=on_interrupt,
        )

    def _check(self) -> None:
        """What can be said before anything is loaded."""
        self.merge.checked()
        steps = self.sampling.steps
        counts = {
            "trials": self.trials,
            "repeats": self.repeats,
            "batch": self.batch,
            "steps": steps,
        }
        for name, count in counts.items():
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


class _TrialBar:
    """Shows the trials that are done, and the part that is done of the next."""

    def __init__(self, on_progress: "OnProgress") -> None:
        self._on_progress = on_progress
        self._words, self._done, self._total = "", 0.0, 0

    def on_trial(self, words: str, done: float, total: int) -> None:
        self._words, self._done, self._total = words, done, total
        self._on_progress(words, done, total)

    def on_call(self, share: float) -> None:
        self._on_progress(self._words, self._done + share, self._total)


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


@contextmanager
def _log_to(path: Path) -> "Iterator[Log]":
    """What to call with each line; after an interruption, all lines until then are there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        yield lambda line: print(json.dumps(line, default=str), file=file, flush=True)


def _table(front: "list[Measurement]") -> Table:
    table = Table(title="The best that was seen")
    table.add_column("settings", overflow="fold")
    for title in ("s / image", "speed-up", "LPIPS", "PSNR (dB)"):
        table.add_column(title, justify="right")
    table.add_row("no merging", "-", "1.00x", "0.0000", "-")
    for m in front:
        numbers = (f"{m.seconds:.3f}", f"{m.speedup:.2f}x", f"{m.lpips:.4f}", f"{m.psnr:.1f}")
        table.add_row(_arguments(m.options) or "the defaults", *numbers)
    return table


def _tell(console: Console, chosen: "Measurement", out: Path) -> None:
    console.print(f"{out}  on fresh images: {chosen}")
    arguments = ", ".join(["pipe", *filter(None, [_arguments(chosen.options)])])
    console.print(f"tomesd.apply_patch({arguments})")


def _arguments(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _nothing(budget: "Budget", seen: "list[Measurement]") -> str:
    kept = [measured for measured in seen if budget.kept_by(measured)]
    nearest = budget.nearest(seen)
    if nearest is None:
        return f"no settings keep a {budget}: none of {len(seen)} was faster than no merging"
    best = f"{nearest} ({_arguments(nearest.options) or 'the defaults'})"
    if kept:
        return f"no settings keep a {budget} on fresh images; nearest in the search: {best}"
    return f"no settings keep a {budget}; nearest of {len(seen)}: {best}"
