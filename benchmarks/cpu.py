"""The embedded model on a CPU: speed-up against ratio, and the share of time spent in matching.

    python benchmarks/cpu.py [--original FOLDER] [--threads 2] [--out FOLDER]

Rows go to benchmarks/results/cpu.jsonl unless `--out` says otherwise, in place of those there.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tomesd import Settings
from tomesd.bench import Case, Effort, RowFile, Subjects, Variant, load_original, measure_case
from tomesd.bench.calls import make_call
from tomesd.bench.models import Subject, shared_copy
from tomesd.bench.tables import HEADER, markdown, result_table
from tomesd.hosts import find_targets
from tomesd.patch import patch_of

RATIOS = (0.25, 0.5, 0.75)
SIDE = 256
RESULTS = Path(__file__).parent / "results"


class Stopwatch:
    """Adds up the time inside a function."""

    def __init__(self, function: Callable):
        self.function = function
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


def variants(original: str | None) -> tuple[Variant, ...]:
    found = [Variant("unpatched")]
    for ratio in RATIOS:
        settings = Settings(ratio=ratio)
        found.append(Variant("tomesd", settings))
        if original is not None:
            found.append(Variant("original", settings, folder=original))
    return tuple(found)


@torch.no_grad()
def matching_share(subject: Subject, variant: Variant, calls: int = 4) -> float:
    """Which share of a step goes into finding out what to merge."""
    model = shared_copy(subject.model)
    variant.apply(model)
    call = make_call(subject, model, "step", (SIDE, SIDE), 1, 1)
    call()
    if variant.kind == "original":
        module = load_original(variant.folder).merge
        function = module.bipartite_soft_matching_random2d
        watch = module.bipartite_soft_matching_random2d = Stopwatch(function)
    else:
        patch = patch_of(find_targets(model)[0].module)
        watch = patch.planner = Stopwatch(patch.planner)
    try:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return watch.seconds / (time.perf_counter() - start)
    finally:
        if variant.kind == "original":
            module.bipartite_soft_matching_random2d = function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", help="folder with tomesd 0.1.3")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="of timing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    case = Case(
        model="demo",
        height=SIDE,
        width=SIDE,
        device="cpu",
        variants=variants(args.original),
        section="cpu",
        setting="embedded model, 256 px",
    )
    subject = Subjects().get(case)
    rows = measure_case(subject, case, Effort(seconds=args.seconds, min_repeats=7))
    for row, variant in zip(rows, case.variants, strict=True):
        if variant.kind != "unpatched":
            row["matching_share"] = matching_share(subject, variant)
    path = args.out / "cpu.jsonl"
    path.unlink(missing_ok=True)
    file = RowFile(path, subject.device)
    for row in rows:
        file.add(row)
    print(markdown(HEADER, result_table(file.rows)))
    for row in file.rows:
        if "matching_share" in row:
            print(
                f"{row['label']} {row['settings']['ratio']}: {row['matching_share']:.1%} matching"
            )


if __name__ == "__main__":
    main()
