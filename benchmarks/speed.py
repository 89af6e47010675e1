"""Time and memory: the rows of docs/performance.md.

    python benchmarks/speed.py graph eager [--original FOLDER]     the eight settings
    python benchmarks/speed.py compile compile-autotune --only "SDXL 1024"
    OMP_NUM_THREADS=2 python benchmarks/speed.py cpu

FOLDER holds tomesd 0.1.3 (`pip install --no-deps --target FOLDER tomesd==0.1.3`). Rows are added to
gpu.jsonl, or cpu.jsonl of what is measured on a CPU, as they are measured. Before anything is
measured on a GPU, gpu_checks.py runs.
"""

import argparse
import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import matching
import torch
from cases import CASES
from common import RESULTS
from gpu_checks import check_gpu

from tomesd.bench import Case, Contender, Effort, RowFile, Subjects, prepare, run_cases
from tomesd.bench.measure import attempt, free_memory
from tomesd.bench.rows import Row
from tomesd.bench.tables import HEADER, failures, markdown, result_table


def measure(name: str, cases: list[Case], file: RowFile, args: argparse.Namespace) -> list[Row]:
    """The rows of a table, in the file as soon as they are there."""
    if name == "matching":
        rows = matching.image_rows(args.original, torch.device("cuda"))
        return [file.add(row) for row in rows]
    if name.startswith("compile"):
        compile_ahead(cases, args.jobs)
    effort = Effort(seconds=args.seconds, min_repeats=args.repeats)
    subjects = Subjects(keep=4)
    rows = []
    for case in cases:
        print(f"{name}: {case.setting}", flush=True)
        rows += run_cases([case], file, effort, subjects=subjects)
    return rows


def compile_ahead(cases: list[Case], jobs: int) -> None:
    """Fills PyTorch's cache of compiled code: compiling a large model takes minutes."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # of each of many processes
    work = [(case, variant) for case in cases for variant in case.contenders]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        outcomes = [pool.submit(compile_one, *one) for one in work]
        for (case, variant), outcome in zip(work, outcomes, strict=True):
            words = outcome.exception() or outcome.result()
            print(f"{case.setting}, {case.mode}, {variant}: {words}", flush=True)


def compile_one(case: Case, variant: Contender) -> str:
    """In a process of its own. What fails here fails again when it is to be measured."""
    device = torch.device(case.device)

    def work() -> str:
        prepare(Subjects().get(case), case, variant)
        return "compiled"

    words = attempt(work, device)
    torch._dynamo.reset()
    free_memory(device)
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="+", choices=[*CASES, "matching"])
    parser.add_argument("--original", help="folder with tomesd 0.1.3")
    parser.add_argument("--only", default="", help="of the settings, those with this in their name")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing per setting")
    parser.add_argument("--repeats", type=int, default=4, help="at least, per variant")
    parser.add_argument("--jobs", type=int, default=16, help="models to compile at a time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--resume", action="store_true", help="go on with the last run there")
    parser.add_argument("--no-check", action="store_true", help="do not check the kernels first")
    args = parser.parse_args()
    if args.tables != ["cpu"] and not args.no_check:
        check_gpu(torch.device("cuda"))
    rows: list[Row] = []
    for device, names in itertools.groupby(args.tables, lambda name: name == "cpu"):
        place, stem = ("cpu", "cpu") if device else ("cuda", "gpu")
        file = RowFile(args.out / f"{stem}.jsonl", torch.device(place), resume=args.resume)
        for name in names:
            found = [] if name == "matching" else CASES[name](args.original)
            cases = [case for case in found if args.only in case.setting]
            rows += measure(name, cases, file, args)
    print(markdown(HEADER, result_table(rows)))
    print("\n".join(failures(rows)))


if __name__ == "__main__":
    main()
