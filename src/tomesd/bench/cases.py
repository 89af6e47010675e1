"""Measures settings: every contender in one is made ready, then they take turns."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial

import psutil
import torch

from ..generation.memory import MemoryProbe
from ..generation.sampling import check_size, least_bytes
from .calls import WHATS, make_call
from .contenders import ORIGINAL, OURS, Contender
from .measure import Effort, free_memory
from .models import Subject, load_subject, shared_copy
from .modes import EAGER, GRAPH, MODES, compile_model
from .rows import SETTING, Row, RowFile
from .together import Prepared, make_ready, measure_together

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
    if case.mode == GRAPH:
        _load_kernels(subject, case, contender)
    call = make_call(subject, model, case.what, size[::-1], case.images, case.steps)
    return make_ready(call, model, case.mode, probe, device, captured=case.mode == GRAPH)


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
    """One row per contender."""
    # A call that makes whole images has all steps in it.
    periods = {n: 1 if case.what == "pipeline" else c.period for n, c in enumerate(case.contenders)}
    results = measure_together(
        {n: partial(prepare, subject, case, one) for n, one in enumerate(case.contenders)},
        subject.device,
        effort,
        periods=periods,
        on_progress=partial(on_progress, case),
        on_first=partial(on_first, case),
    )
    return [
        {**case.row(contender, subject), **results[number]}
        for number, contender in enumerate(case.contenders)
    ]


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
