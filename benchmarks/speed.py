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
from pathlib import Path

import compiled
import matching
import torch
from cases import CASES
from gpu_checks import check_gpu
from rows import RESULTS

from tomesd.bench import Case, Effort, RowFile, Subjects, run_cases
from tomesd.bench.rows import Row
from tomesd.bench.tables import HEADER, failures, markdown, result_table


def measure(name: str, cases: list[Case], file: RowFile, args: argparse.Namespace) -> list[Row]:
    """The rows of a table, in the file as soon as they are there."""
    effort = Effort(seconds=args.seconds, min_repeats=args.repeats)
    if name == "matching":
        return [file.add(row) for row in matching.rows(args.original, torch.device("cuda"))]
    if name.startswith("compile"):
        return compiled.run_cases(cases, file, effort, args.jobs)
    subjects = Subjects(keep=4)
    rows = []
    for case in cases:
        print(f"{name}: {case.setting}", flush=True)
        rows += run_cases([case], file, effort, subjects=subjects)
    return rows


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
