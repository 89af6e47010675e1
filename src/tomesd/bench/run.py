"""Measures settings: every variant of one is made ready, then they take turns."""

import functools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..patch import patch_of
from .calls import WHATS, Call, Step, make_call
from .measure import (
    Effort,
    MemoryProbe,
    attempt,
    free_memory,
    take_turns,
    time_calls,
    time_launches,
)
from .models import Subject, load_subject, shared_copy
from .modes import EAGER, GRAPH, MODES, Graph, compile_model, warm_up
from .rows import OUT_OF_MEMORY, Row, RowFile
from .variants import ORIGINAL, OURS, Variant

__all__ = ["Case", "Prepared", "Subjects", "measure_case", "prepare", "run_cases"]

Progress = Callable[["Case"], None]


@dataclass(frozen=True)
class Case:
    """A setting, and the variants that are compared in it."""

    model: str
    height: int
    width: int
    variants: tuple[Variant, ...]
    images: int = 1
    what: str = "step"
    steps: int = 50
    """Of a whole image."""
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "default"
    mode: str = EAGER
    section: str = ""
    """Which table it belongs to."""
    setting: str = ""
    """What the table calls it."""

    def __post_init__(self) -> None:
        for name, allowed in (("what", WHATS), ("mode", MODES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")
        for name in ("images", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.mode == GRAPH and self.what == "pipeline":
            raise ValueError("mode='graph': only a step can be captured, not a whole pipeline")

    def row(self, variant: Variant, subject: Subject | None = None) -> Row:
        """What identifies the measurement of a variant."""
        return {
            "section": self.section,
            "setting": self.setting,
            "model": self.model,
            "what": self.what,
            "steps": self.steps if self.what == "pipeline" else None,
            "height": self.height,
            "width": self.width,
            "images": self.images,
            "batch": 2 * self.images,
            "dtype": str(subject.dtype).removeprefix("torch.") if subject else self.dtype,
            "attention": self.attention,
            "mode": self.mode,
            "variant": variant.kind,
            "label": str(variant),
            "settings": None if variant.settings is None else asdict(variant.settings),
        }


@dataclass(eq=False)
class Prepared:
    """A variant that is ready to be timed: patched, compiled or captured, and warm."""

    call: Call
    device: torch.device
    peak_mib: float
    pool_mib: float | None = None
    """Of a CUDA graph: the memory that it keeps for itself."""
    finite: bool = True
    """Whether what the call returned is a number everywhere."""
    left_alone: bool | None = None
    """In eager mode: whether no layer was merged, because that would not be faster."""

    @torch.no_grad()
    def time(self, calls: int) -> float:
        return time_calls(self.call, calls, self.device)

    @torch.no_grad()
    def time_launches(self) -> float | None:
        return time_launches(self.call, self.device)


@torch.no_grad()
def prepare(subject: Subject, case: Case, variant: Variant) -> Prepared:
    """Everything that has to be done before `variant` can be timed."""
    device = subject.device
    probe = MemoryProbe(device)
    model = shared_copy(subject.model)
    variant.apply(model)
    if case.mode not in (EAGER, GRAPH):
        compile_model(model, case.mode, fullgraph=variant.kind != ORIGINAL)
    size = (case.height, case.width)
    call = make_call(subject, model, case.what, size, case.images, case.steps)
    warm_up(call, device, calls=1 if case.mode in (EAGER, GRAPH) else 2)
    prepared = Prepared(call, device, probe.peak_mib(call))
    patch = patch_of(model)
    if case.mode == EAGER and patch is not None and patch.pays is not None:
        prepared.left_alone = not patch.pays
    if case.mode == GRAPH:
        _load_kernels(subject, case, variant)
        assert isinstance(call, Step)
        graph = Graph(call, device)
        prepared.call, prepared.pool_mib = graph, graph.pool_mib
    prepared.finite = _is_finite(prepared.call())
    return prepared


def _is_finite(output: Any) -> bool:
    tensor = output if isinstance(output, torch.Tensor) else output[0]
    return bool(torch.isfinite(tensor).all())


def _load_kernels(subject: Subject, case: Case, variant: Variant) -> None:
    """Runs the kernels of merging once: none can be loaded or tuned while a graph is captured.

    A layer that is left alone in eager mode, where each launch costs time, may merge in a graph.
    """
    if variant.kind != OURS or variant.settings is None or variant.settings.when == "always":
        return
    model = shared_copy(subject.model)
    replace(variant, settings=replace(variant.settings, when="always")).apply(model)
    make_call(subject, model, "step", (case.height, case.width), case.images, 1)()


class Subjects:
    """Loads models, and keeps the last ones."""

    def __init__(self, keep: int = 1):
        self._keep = keep
        self._loaded: dict[tuple[str, ...], Subject] = {}

    def get(self, case: Case) -> Subject:
        key = (case.model, case.device, case.dtype, case.attention)
        if key not in self._loaded:
            while len(self._loaded) >= self._keep:
                old = self._loaded.pop(next(iter(self._loaded)))
                device = old.device
                del old
                free_memory(device)
            self._loaded[key] = load_subject(
                case.model, device=case.device, dtype=case.dtype, attention=case.attention
            )
        return self._loaded[key]


def measure_case(
    subject: Subject,
    case: Case,
    effort: Effort,
    on_progress: Progress | None = None,
) -> list[Row]:
    """One row per variant. Running out of memory is a result like any other."""
    results: dict[Variant, Row] = {}
    waiting = deque(case.variants)
    on_repeat = None if on_progress is None else functools.partial(on_progress, case)
    while waiting:
        ready: dict[Variant, Prepared] = {}
        while waiting:
            work = functools.partial(prepare, subject, case, waiting[0])
            outcome = attempt(work, subject.device)
            if outcome == OUT_OF_MEMORY and ready:
                break  # maybe only for what the others keep: again, when they are gone
            variant = waiting.popleft()
            if isinstance(outcome, Prepared):
                ready[variant] = outcome
            else:
                results[variant] = {"seconds": None, "error": outcome}
            del outcome
            if on_progress is not None:
                on_progress(case)
        results |= _time_together(ready, effort, subject.device, on_repeat)
        ready.clear()
        free_memory(subject.device)
    return [{**case.row(variant, subject), **results[variant]} for variant in case.variants]


def _time_together(
    ready: dict[Variant, Prepared],
    effort: Effort,
    device: torch.device,
    on_repeat: Callable[[], None] | None,
) -> dict[Variant, Row]:
    timers = {variant: item.time for variant, item in ready.items()}
    periods = {variant: variant.period for variant in ready}
    work = functools.partial(take_turns, timers, effort, periods=periods, on_repeat=on_repeat)
    outcome = attempt(work, device)
    if isinstance(outcome, str):
        return {variant: {"seconds": None, "error": outcome} for variant in ready}
    return {
        variant: {
            "seconds": outcome[variant].median,
            "spread": outcome[variant].spread,
            "repeats": len(outcome[variant].seconds),
            "calls": outcome[variant].calls,
            "host_seconds": item.time_launches(),
            "peak_mib": item.peak_mib,
            "pool_mib": item.pool_mib,
            "finite": item.finite,
            "left_alone": item.left_alone,
            "error": None,
        }
        for variant, item in ready.items()
    }


def run_cases(
    cases: Iterable[Case],
    file: RowFile,
    effort: Effort,
    *,
    subjects: Subjects | None = None,
    on_progress: Progress | None = None,
) -> list[Row]:
    """Measures `cases` and writes their rows to `file`, each case as it is done.

    Args:
        on_progress: called with the case whenever a variant of it is ready or was timed once.

    Returns:
        The rows of these cases, including those that the file had from the run that it continues.
    """
    subjects = subjects or Subjects()
    rows: list[Row] = []
    for case in cases:
        subject = subjects.get(case)
        _check_device(case, subject.device)
        found = [file.find(case.row(variant, subject)) for variant in case.variants]
        measured = [row for row in found if row is not None]
        if len(measured) < len(found):
            # All of them again: what is compared has to be measured together.
            measured = [file.add(row) for row in measure_case(subject, case, effort, on_progress)]
        rows += measured
    return rows


def _check_device(case: Case, device: torch.device) -> None:
    if case.mode == GRAPH and device.type != "cuda":
        raise ValueError(f"mode='graph': CUDA graphs need a GPU, and the device is {device.type}")
