"""Measures settings: every contender in one is made ready, then they take turns."""

import functools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import torch

from ..generation.memory import MemoryProbe
from ..generation.sampling import check_size, least_bytes
from ..patch import patch_of
from .calls import WHATS, Call, Step, make_call
from .contenders import ORIGINAL, OURS, Contender
from .measure import (
    Effort,
    attempt,
    free_memory,
    is_finite,
    take_turns,
    time_calls,
    time_launches,
)
from .models import Subject, load_subject, shared_copy
from .modes import EAGER, GRAPH, MODES, Graph, compile_model, warm_up
from .rows import OUT_OF_MEMORY, SETTING, Row, RowFile

OnCase = Callable[["Case", float], None]
"""Called with a case and the share of it that is done, 0 to 1."""
OnFirst = Callable[["Case", float], None]
"""Called with a case and the seconds of one call in it, once that is known."""


@dataclass(frozen=True)
class Case:
    """A setting, and what is compared in it."""

    model: str
    height: int
    width: int
    contenders: tuple[Contender, ...]
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

    def row(self, contender: Contender, subject: Subject | None = None) -> Row:
        """What identifies the measurement of a contender."""
        settings = contender.settings
        return {
            **{name: getattr(self, name) for name in SETTING},
            "steps": self.steps if self.what == "pipeline" else None,
            "batch": 2 * self.images,
            "dtype": str(subject.dtype).removeprefix("torch.") if subject else self.dtype,
            "variant": contender.kind,
            "label": str(contender),
            "settings": None if settings is None else asdict(settings),
        }


@dataclass(eq=False)
class Prepared:
    """A contender that is ready to be timed: patched, compiled or captured, and warm."""

    call: Call
    device: torch.device
    peak_mib: float | None
    """None on a CPU."""
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
def prepare(subject: Subject, case: Case, contender: Contender) -> Prepared:
    """Everything that has to be done before `contender` can be timed."""
    device = subject.device
    size, decode = (case.width, case.height), case.what == "pipeline"
    needed = least_bytes(subject.pipe, size, 2 * case.images, decode=decode)
    if device.type == "cpu" and needed > psutil.virtual_memory().total:
        raise MemoryError  # the system would end the process
    probe = MemoryProbe(device)
    model = shared_copy(subject.model)
    contender.apply(model)
    if case.mode not in (EAGER, GRAPH):
        compile_model(model, case.mode, fullgraph=contender.kind != ORIGINAL)
    call = make_call(subject, model, case.what, size[::-1], case.images, case.steps)
    warm_up(call, device, calls=1 if case.mode in (EAGER, GRAPH) else 2)
    outputs: list[Any] = []
    prepared = Prepared(call, device, probe.peak_mib(lambda: outputs.append(call())))
    patch = patch_of(model)
    if case.mode == EAGER and patch is not None:
        merged = any(decision.merges for decision in patch.decisions)
        prepared.left_alone = not merged and any(d.left_alone for d in patch.decisions)
    if case.mode == GRAPH:
        _load_kernels(subject, case, contender)
        assert isinstance(call, Step)
        graph = Graph(call, device)
        prepared.call, prepared.pool_mib = graph, graph.pool_mib
        outputs = [graph()]
    prepared.finite = is_finite(outputs[-1])
    return prepared


def _load_kernels(subject: Subject, case: Case, contender: Contender) -> None:
    """Runs the kernels of merging once: none can be loaded or tuned while a graph is captured.

    A layer that is left alone in eager mode, where each launch costs time, may merge in a graph.
    """
    settings = contender.settings
    if contender.kind != OURS or settings is None or settings.when == "always":
        return
    model = shared_copy(subject.model)
    replace(contender, settings=replace(settings, when="always")).apply(model)
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
    on_progress: OnCase = lambda case, share: None,
    on_first: OnFirst = lambda case, seconds: None,
) -> list[Row]:
    """One row per contender. Running out of memory is a result like any other."""
    results: dict[int, Row] = {}
    waiting = deque(range(len(case.contenders)))
    while waiting:
        ready: dict[int, Prepared] = {}
        while waiting:
            work = functools.partial(prepare, subject, case, case.contenders[waiting[0]])
            outcome = attempt(work, subject.device)
            if outcome == OUT_OF_MEMORY and ready:
                break  # maybe only for what the others keep: again, when they are gone
            number = waiting.popleft()
            if isinstance(outcome, Prepared):
                ready[number] = outcome
                if number == 0:
                    on_first(case, outcome.time(1))
            else:
                results[number] = {"seconds": None, "error": outcome}
            del outcome
            on_progress(case, (len(ready) + len(results)) / len(case.contenders) / 2)
        results |= _time_together(ready, case, effort, subject.device, on_progress)
        ready.clear()
        free_memory(subject.device)
    return [
        {**case.row(contender, subject), **results[number]}
        for number, contender in enumerate(case.contenders)
    ]


def _time_together(
    ready: dict[int, Prepared],
    case: Case,
    effort: Effort,
    device: torch.device,
    on_progress: OnCase,
) -> dict[int, Row]:
    """Rows of the contenders with these numbers in the case."""
    work = functools.partial(
        take_turns,
        {number: item.time for number, item in ready.items()},
        effort,
        periods={number: case.contenders[number].period for number in ready},
        on_repeat=lambda share: on_progress(case, 0.5 + share / 2),
    )
    outcome = attempt(work, device)
    if isinstance(outcome, str):
        return {number: {"seconds": None, "error": outcome} for number in ready}
    return {
        number: {
            **outcome[number].row(),
            "host_seconds": item.time_launches(),
            "peak_mib": item.peak_mib,
            "pool_mib": item.pool_mib,
            "finite": item.finite,
            "left_alone": item.left_alone,
            "error": None,
        }
        for number, item in ready.items()
    }


def run_cases(
    cases: Iterable[Case],
    file: RowFile,
    effort: Effort,
    *,
    subjects: Subjects | None = None,
    on_progress: OnCase = lambda case, share: None,
    on_first: OnFirst = lambda case, seconds: None,
) -> list[Row]:
    """Measures `cases` and writes their rows to `file`, each case as it is done.

    Returns:
        The rows of these cases, including those that the file had from the run that it continues.
    """
    subjects = subjects or Subjects()
    rows: list[Row] = []
    for case in cases:
        subject = subjects.get(case)
        check_size(subject.pipe, (case.width, case.height))
        if case.mode == GRAPH and subject.device.type != "cuda":
            raise ValueError(
                f"mode='graph': CUDA graphs need a GPU, and the device is {subject.device.type}"
            )
        found = [file.find(case.row(contender, subject)) for contender in case.contenders]
        measured = [row for row in found if row is not None]
        if len(measured) < len(found):
            # All of them again: what is compared has to be measured together.
            found_now = measure_case(subject, case, effort, on_progress, on_first)
            measured = [file.add(row) for row in found_now]
        rows += measured
    return rows
