"""torch.compile alone against torch.compile with merging.

    python benchmarks/compiled.py [--settings 2 3 6] [--modes compile compile-autotune]

Compiling a large model takes minutes, so every variant of every setting is compiled in a process of
its own, all at the same time. When they are ready (or `--prepare-seconds` are over), they are timed
in turn, one at a time on the GPU. Rows go to FOLDER/compiled.jsonl.
"""

import argparse
import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from eight_settings import SETTINGS, make_case

from tomesd.bench import Case, Effort, Variant
from tomesd.bench.rows import Row

SECTION = "compile"
BACKENDS = ("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS", "TORCHINDUCTOR_MAX_AUTOTUNE_CONV_BACKENDS")
"""Variables by which PyTorch is told what max-autotune chooses matrix products from."""


@dataclass
class Worker:
    """A process that compiles one variant of one case, and times it when told to."""

    case: Case
    variant: Variant
    process: Any
    connection: Connection
    other_end: Connection
    ready: Row | None = None
    error: str | None = None

    def start(self) -> None:
        self.process.start()
        self.other_end.close()  # or nobody would notice if the process died

    def time(self, calls: int) -> float:
        return self._ask("time", calls)

    def time_launches(self) -> float | None:
        return self._ask("time_launches")

    def _ask(self, method: str, *args: int) -> Any:
        self.connection.send((method, args))
        if not self.connection.poll(120):
            raise RuntimeError(f"{self.case.setting}, {self.variant}: no answer")
        return self.connection.recv()


def work(case: Case, variant: Variant, connection: Connection) -> None:
    """In the process: makes the variant ready, then does what it is asked to with it."""
    from tomesd.bench import load_subject, prepare

    try:
        start = time.monotonic()
        subject = load_subject(
            case.model, device=case.device, dtype=case.dtype, attention=case.attention
        )
        prepared = prepare(subject, case, variant)
        connection.send(
            {
                **case.row(variant, subject),
                "peak_mib": prepared.peak_mib,
                "finite": prepared.finite,
                "prepare_seconds": time.monotonic() - start,
                "autotuned": os.environ.get(BACKENDS[0]),
            }
        )
    except Exception as error:
        connection.send(f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}")
        return
    while True:
        method, args = connection.recv()
        connection.send(getattr(prepared, method)(*args))


def make_workers(cases: list[Case]) -> dict[Any, Worker]:
    """One for each variant; settings that differ in what is merged share the unpatched one."""
    context = multiprocessing.get_context("spawn")
    workers: dict[Any, Worker] = {}
    for one in cases:
        for variant in one.variants:
            if key(one, variant) not in workers:
                here, there = context.Pipe()
                process = context.Process(target=work, args=(one, variant, there), daemon=True)
                workers[key(one, variant)] = Worker(one, variant, process, here, there)
    return workers


def key(one: Case, variant: Variant) -> tuple[Case, Variant]:
    return replace(one, setting="", variants=()), variant


def compile_all(workers: list[Worker], jobs: int, seconds: float) -> None:
    """Waits until each worker is ready or has failed, or the time is over."""
    deadline, start = time.monotonic() + seconds, time.monotonic()
    waiting, running = list(workers), []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(waiting.pop(0))
            running[-1].start()
        left = deadline - time.monotonic()
        if left <= 0:
            break
        for connection in wait([worker.connection for worker in running], timeout=left):
            worker = next(worker for worker in running if worker.connection is connection)
            running.remove(worker)
            _note(worker, time.monotonic() - start)
    for worker in [*running, *waiting]:
        worker.error = f"not compiled within {seconds:.0f} s"
        if worker.process.pid is not None:
            worker.process.kill()


def _note(worker: Worker, seconds: float) -> None:
    try:
        answer = worker.connection.recv()
    except EOFError:
        answer = "the process ended"
    if isinstance(answer, dict):
        worker.ready = answer
    else:
        worker.error = answer
    words = worker.error or "ready"
    name = f"{worker.case.setting}, {worker.case.mode}, {worker.variant}"
    print(f"{seconds:4.0f} s: {name}: {words}", flush=True)


def time_case(one: Case, workers: dict[Any, Worker], effort: Effort) -> list[Row]:
    """The variants of one case take turns; all others wait."""
    from tomesd.bench.measure import take_turns

    mine = {variant: workers[key(one, variant)] for variant in one.variants}
    ready = {variant: worker for variant, worker in mine.items() if worker.ready is not None}
    timings = take_turns(
        {variant: worker.time for variant, worker in ready.items()},
        effort,
        periods={variant: variant.period for variant in ready},
    )
    rows = []
    for variant, worker in mine.items():
        row = {**(worker.ready or {}), **one.row(variant), "seconds": None, "error": worker.error}
        if variant in timings:
            timing = timings[variant]
            row |= {
                "seconds": timing.median,
                "spread": timing.spread,
                "repeats": len(timing.seconds),
                "calls": timing.calls,
                "host_seconds": worker.time_launches(),
            }
        rows.append(row)
    return rows


def main() -> None:
    import torch

    from tomesd.bench import RowFile
    from tomesd.bench.tables import HEADER, failures, markdown, result_table

    args = parse()
    # Each process compiles with few threads: there are many processes.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(args.threads))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(dict.fromkeys(BACKENDS, args.backends) if args.backends else {})
    cases = [
        smaller(make_case(SETTINGS[number - 1], mode, args.original, SECTION), args)
        for number in args.settings
        for mode in args.modes
    ]
    workers = make_workers(cases)
    print(f"compiling {len(workers)} variants, {args.jobs} at a time", flush=True)
    file = RowFile(args.out / "compiled.jsonl", torch.device(args.device))
    try:
        compile_all(list(workers.values()), args.jobs, args.prepare_seconds)
        for one in cases:
            for row in time_case(one, workers, Effort(seconds=args.seconds)):
                file.add(row)
    finally:
        for worker in workers.values():
            if worker.process.pid is not None and worker.process.is_alive():
                worker.process.kill()
    print(markdown(HEADER, result_table(file.rows)))
    print("\n".join(failures(file.rows)))


def smaller(one: Case, args: argparse.Namespace) -> Case:
    """The case on the device and with the variants that were asked for."""
    wanted = [v for v in one.variants if str(v) in args.variants]
    return replace(one, device=args.device, dtype=args.dtype, variants=tuple(wanted))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", help="folder with tomesd 0.1.3, to compare with it too")
    parser.add_argument("--settings", type=int, nargs="+", default=[2, 3, 5, 6], help="1 to 8")
    parser.add_argument("--modes", nargs="+", default=["compile", "compile-autotune"])
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[
            "unpatched",
            "original",
            "plan kept",
            "plan every block",
            "whole stacks",
            "if faster",
        ],
    )
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile at a time")
    parser.add_argument("--threads", type=int, default=2, help="compile threads per process")
    parser.add_argument(
        "--backends", help="what max-autotune chooses matrix products from, such as ATEN or TRITON"
    )
    parser.add_argument("--prepare-seconds", type=float, default=420)
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing per setting")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "bench_output")))
    args = parser.parse_args()
    if any(not 1 <= number <= len(SETTINGS) for number in args.settings):
        parser.error(f"--settings: must be 1 to {len(SETTINGS)}")
    return args


if __name__ == "__main__":
    main()
