"""Looks for the settings that keep a budget: the search behind `tomesd tune`.

Optuna proposes settings; each is measured against no merging on the same few images; what looks
best is measured once more on images that the search has not seen, and only then believed.
"""

import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

import tomesd

from ..generation import Sampling, sample_batch
from ..generation.lines import arguments
from ..generation.loading import denoiser
from ..generation.progress import OnProgress, silent
from ..presets import options_of
from ..settings import MergeWarning, Settings
from .estimates import speedup_estimate
from .figures import pareto_front
from .metrics import PSNR_CAP, paired_scores, to_pixels
from .prompts import Item
from .search_space import Choice, Options

_ASKS_PER_TRIAL = 20
"""Proposals that are refused or known already cost no trial, but there has to be an end."""


@dataclass(frozen=True)
class Measurement:
    """What settings do, beside no merging."""

    options: Options
    """Those that differ from the defaults."""
    seconds: float
    """Of one image."""
    speedup: float
    lpips: float
    psnr: float
    merges: bool = True
    """Whether anything is merged at all."""

    @property
    def gains(self) -> bool:
        return self.merges and self.speedup > 1

    def __str__(self) -> str:
        lpips, psnr = f"LPIPS {self.lpips:.4f}", f"PSNR {self.psnr:.1f} dB"
        return f"{self.speedup:.2f}x as fast, {lpips}, {psnr}"


Measure = Callable[[Options], Measurement]
Log = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Budget:
    """What settings have to keep; among those that do, the one to prefer."""

    kind: Literal["max_lpips", "min_psnr", "speedup"]
    limit: float

    @classmethod
    def of(cls, **limits: float | None) -> "Budget":
        """From `max_lpips`, `min_psnr` and `speedup`, all of them None but one."""
        given = [(kind, limit) for kind, limit in limits.items() if limit is not None]
        if len(given) != 1:
            raise ValueError("give one budget: --max-lpips, --min-psnr or --speedup")
        kind, limit = given[0]
        least = 1 if kind == "speedup" else 0
        if not least < limit < float("inf"):
            raise ValueError(f"{kind}={limit:g}: must be more than {least}")
        return cls(kind, limit)  # type: ignore[arg-type]

    def _distance(self, measured: Measurement) -> float:
        """How far it is beyond the limit; the budget is kept up to 0."""
        if self.kind == "max_lpips":
            return measured.lpips - self.limit
        return self.limit - (measured.psnr if self.kind == "min_psnr" else measured.speedup)

    def kept_by(self, measured: Measurement) -> bool:
        """Settings that are slower than no merging keep no budget."""
        return measured.gains and self._distance(measured) <= 0

    def cost(self, measured: Measurement) -> tuple[float, float]:
        """Less is better, among those that keep it."""
        lpips, speedup = measured.lpips, measured.speedup
        return (lpips, -speedup) if self.kind == "speedup" else (-speedup, lpips)

    def nearest(self, seen: Iterable[Measurement]) -> Measurement | None:
        """The one that comes closest, of those that gain anything."""
        return min((m for m in seen if m.gains), key=self._distance, default=None)

    def __str__(self) -> str:
        words = {"max_lpips": "LPIPS of at most", "min_psnr": "PSNR of at least"}
        return f"{words.get(self.kind, 'speed-up of at least')} {self.limit:g}"


class SideBySide:
    """Makes the same images with and without merging, in turn, and measures both.

    Args:
        batch: how many images to make at a time.
        repeats: how many times to take the time.
        on_call: told how much of a measurement is done, 0 to 1.
    """

    def __init__(
        self,
        pipe: Any,
        items: Sequence[Item],
        sampling: Sampling,
        lpips: Any,
        batch: int = 4,
        repeats: int = 3,
        on_call: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.pipe, self.sampling, self.lpips = pipe, sampling, lpips
        self.batches = [items[i : i + batch] for i in range(0, len(items), batch)]
        self.images, self.repeats, self.on_call = len(items), repeats, on_call
        self.calls = len(self.batches) * (1 + 2 * repeats)
        """Calls of the pipeline in a measurement."""
        self._unmerged: list[torch.Tensor] | None = None

    def measure(self, options: Mapping[str, Any]) -> Measurement:
        """Seconds are medians over the repeats; a speed-up is the ratio of two medians."""
        if self._unmerged is None:  # it is the warm-up too
            self._unmerged = [self._run(batch, None)[0] for batch in self.batches]
        scores: dict[str, list[float]] = {}
        calls, done = self.calls, 0
        # The first images with new settings are slow: they are looked at, but not timed.
        for batch, unmerged in zip(self.batches, self._unmerged, strict=True):
            merged, _ = self._run(batch, options)
            for name, values in paired_scores(merged, unmerged, self.lpips).items():
                scores.setdefault(name, []).extend(values)
            done += 1
            self.on_call(done / calls)
        seconds = np.zeros((2, self.repeats))
        for repeat, batch in itertools.product(range(self.repeats), self.batches):
            for row, setting in enumerate((None, options)):
                seconds[row, repeat] += self._run(batch, setting)[1]
                done += 1
                self.on_call(done / calls)
        merges = bool(min(scores["psnr"]) < PSNR_CAP)
        return Measurement(
            dict(options),
            seconds=float(np.median(seconds[1])) / self.images,
            # If nothing is merged, all that differs is the noise.
            speedup=speedup_estimate(seconds[0], seconds[1]).value if merges else 1.0,
            lpips=float(np.mean(scores["lpips"])),
            psnr=float(np.mean(scores["psnr"])),
            merges=merges,
        )

    def _run(self, batch: Sequence[Item], options: Mapping[str, Any] | None) -> Any:
        """Pixels `[B, 3, H, W]` of uint8 and seconds; `None` merges nothing."""
        merging = nullcontext() if options is None else tomesd.patched(self.pipe, **options)
        prompts, seeds = [item.prompt for item in batch], [item.seed for item in batch]
        with warnings.catch_warnings():
            # One that says that nothing is merged is heard from the images.
            warnings.simplefilter("ignore", MergeWarning)
            with merging:
                made = sample_batch(self.pipe, prompts, seeds, self.sampling)
        return to_pixels(made.images, denoiser(self.pipe).device), made.seconds


def search(
    measure: Measure,
    space: Sequence[Choice],
    *,
    trials: int,
    fixed: Options | None = None,
    first: Sequence[Options] = (),
    seed: int = 0,
    on_progress: OnProgress = silent,
    log: Log = lambda line: None,
    known: Mapping[str, Measurement] | None = None,
    on_interrupt: Callable[[int], None] = lambda trials: None,
) -> list[Measurement]:
    """Measures `trials` different settings: `first`, then what a sampler makes of the results.

    With the same seed and the same measurements it proposes the same. Ctrl-C ends it early.

    Args:
        fixed: options of every proposal.
        log: called with what is known of each trial.
        known: measurements of an earlier search, by `key_of` their options: not made again.
        on_interrupt: told how many trials were done when Ctrl-C ended it.
    """
    from optuna.trial import TrialState

    study = _study(space, first, seed)
    seen: dict[str, Measurement] = {}
    refusal: ValueError | None = None
    try:
        for _ in range(_ASKS_PER_TRIAL * trials):
            trial = study.ask()
            proposed = {**_propose(trial, space, fixed or {}), **(fixed or {})}
            proposed = trial.user_attrs.get("options", proposed)
            try:
                options = options_of(Settings(**proposed))
                key = key_of(options)
                if key not in seen:
                    on_progress(arguments(options), len(seen), trials)
                    seen[key] = (known or {}).get(key) or measure(options)
                    log({"trial": len(seen), **vars(seen[key])})
            except ValueError as error:  # these do not go together, or not with this model
                refusal = error
                study.tell(trial, state=TrialState.FAIL)
                log({"refused": str(error), "options": proposed})
                continue
            # The time is relative to that of no merging, which drifts the same way.
            study.tell(trial, [1 / seen[key].speedup, seen[key].lpips])
            if len(seen) == trials:
                break
    except KeyboardInterrupt:
        if not seen:
            raise
        on_interrupt(len(seen))
    if refusal is not None and not seen:
        raise refusal
    return list(seen.values())


def key_of(options: Options) -> str:
    return json.dumps(options, sort_keys=True)


def _study(space: Sequence[Choice], first: Sequence[Options], seed: int) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    for options in first:
        # The sampler learns from the place in the space that is next to them.
        places = {c.name: c.place_of(options.get(c.name, _DEFAULTS[c.name])) for c in space}
        study.enqueue_trial(places, user_attrs={"options": options})
    return study


_DEFAULTS: Options = vars(Settings())


def _propose(trial: Any, space: Sequence[Choice], fixed: Options) -> Options:
    known, proposed = {**_DEFAULTS, **fixed}, Options()
    for choice in space:
        if not choice.only_if({**known, **proposed}):
            continue
        places = range(len(choice.values))
        if choice.ordered:
            place = trial.suggest_int(choice.name, 0, places[-1])
        else:
            place = trial.suggest_categorical(choice.name, places)
        proposed[choice.name] = choice.values[place]
    return proposed


def front_of(seen: Sequence[Measurement]) -> list[Measurement]:
    """Those that gain, and that no other beats in both speed and LPIPS; slowest first."""
    gaining = [measured for measured in seen if measured.gains]
    places = pareto_front([(m.speedup, m.lpips) for m in gaining], "less")
    return [gaining[place] for place in places]


def choose(
    seen: Iterable[Measurement],
    budget: Budget,
    measure: Measure,
    *,
    on_progress: OnProgress = silent,
    log: Log = lambda line: None,
) -> Measurement | None:
    """The best that keeps the budget also when measured again, with what was measured then.

    Args:
        measure: on images that the search has not seen. The best of many was lucky, too.
    """
    candidates = sorted((m for m in seen if budget.kept_by(m)), key=budget.cost)
    for number, candidate in enumerate(candidates):
        on_progress(f"checking {arguments(candidate.options)}", number, len(candidates))
        again = measure(candidate.options)
        kept = budget.kept_by(again)
        log({"check": number + 1, "kept": kept, **vars(again)})
        if kept:
            return again
    return None
