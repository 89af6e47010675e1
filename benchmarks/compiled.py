"""Times compiled models.

Compiling a large model takes minutes, so every variant of every case is compiled in a process of
its own, many at the same time. When all are ready they are timed in turn, one at a time.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from rows import timed

from tomesd.bench import Case, Contender, Effort, Prepared, RowFile, load_subject, prepare
from tomesd.bench.measure import attempt, take_turns
from tomesd.bench.rows import Row

__all__ = ["run_cases"]

_here: dict[str, Any] = {}
"""Of a worker process: its turn to compile, and the model that it has made ready."""


class Worker:
    """A process that compiles one variant of a case, and times it when told to."""

    def __init__(self, case: Case, variant: Contender, turns: Any):
        # Each process compiles with few threads: there are many processes.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, _start, (turns,))
        self._ready: Future[Row] = self._pool.submit(_prepare, case, variant)

    def row(self) -> Row:
        """What is known before it is timed; waits for it."""
        error = self._ready.exception()
        return self._ready.result() if error is None else {"error": repr(error)[:200]}

    def time(self, calls: int) -> float:
        return self._pool.submit(_call, "time", calls).result()

    def time_launches(self) -> float | None:
        return self._pool.submit(_call, "time_launches").result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _start(turns: Any) -> None:
    _here["turns"] = turns


def _prepare(case: Case, variant: Contender) -> Row:
    """In the worker: loads, patches, compiles and warms up a model."""

    def work() -> tuple[Any, Prepared]:
        subject = load_subject(
            case.model, device=case.device, dtype=case.dtype, attention=case.attention
        )
        return subject, prepare(subject, case, variant)

    with _here["turns"]:
        start = time.monotonic()
        outcome = attempt(work, torch.device(case.device))
        seconds = time.monotonic() - start
    if isinstance(outcome, str):
        return {"error": outcome}
    subject, _here["prepared"] = outcome
    return {
        "dtype": str(subject.dtype).removeprefix("torch."),
        "peak_mib": _here["prepared"].peak_mib,
        "finite": _here["prepared"].finite,
        "prepare_seconds": seconds,
        "autotuned": os.environ.get("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS"),
        "error": None,
    }


def _call(method: str, *args: int) -> Any:
    """In the worker: something of the model that it has made ready."""
    return getattr(_here["prepared"], method)(*args)


def run_cases(cases: list[Case], file: RowFile, effort: Effort, jobs: int) -> list[Row]:
    """Compiles all variants of all cases, `jobs` at a time, then times them case by case."""
    turns = multiprocessing.get_context("spawn").Semaphore(jobs)
    workers: dict[Any, Worker] = {}
    rows = []
    try:
        for case in cases:
            for variant in case.contenders:
                if _key(case, variant) not in workers:
                    workers[_key(case, variant)] = Worker(case, variant, turns)
        for (case, variant), worker in workers.items():
            words = worker.row()["error"] or "ready"
            print(f"{case.model}, {case.width} px, {case.mode}, {variant}: {words}", flush=True)
        for case in cases:
            mine = {variant: workers[_key(case, variant)] for variant in case.contenders}
            rows += [file.add(row) for row in _time_case(case, mine, effort)]
    finally:
        for worker in workers.values():
            worker.close()
    return rows


def _key(case: Case, variant: Contender) -> tuple[Case, Contender]:
    """Settings that differ in what is merged share the unpatched model."""
    return replace(case, setting="", contenders=()), variant


def _time_case(case: Case, workers: dict[Contender, Worker], effort: Effort) -> list[Row]:
    """The variants of one case take turns; all others wait."""
    ready = {v: worker for v, worker in workers.items() if worker.row()["error"] is None}
    timers: dict[Contender, Callable[[int], float]] = {v: w.time for v, w in ready.items()}
    timings = take_turns(timers, effort, periods={v: v.period for v in ready})
    rows = []
    for variant, worker in workers.items():
        row = {**case.row(variant), "seconds": None, **worker.row()}
        if variant in timings:
            row |= {**timed(timings[variant]), "host_seconds": worker.time_launches()}
        rows.append(row)
    return rows
