"""What the benchmarks share: where rows go, their command line, and calls as CUDA graphs."""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tomesd.bench.modes import Graph

RESULTS = Path(__file__).parent / "results"


class Arguments(argparse.ArgumentParser):
    """The command line of a benchmark, with what several have in common."""

    def __init__(self, doc: str | None, *, device: str = "") -> None:
        super().__init__(description=(doc or "").splitlines()[0])
        if device:
            self.add_argument("--device", default=device)
        self.add_argument("--commit", help="of the sources, where there is no git")

    def read(self, arguments: list[str] | None) -> argparse.Namespace:
        """What was given, and as `spent` a function that returns the seconds since."""
        args, start = self.parse_args(arguments), time.monotonic()
        args.spent = lambda: time.monotonic() - start
        if args.commit:
            os.environ["TOMESD_COMMIT"] = args.commit
        return args


def replayed(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """A CUDA graph of a call, where there is a GPU; what it reads may be overwritten in place."""
    if device.type != "cuda":
        return call
    return Graph(SimpleNamespace(run=call, advance=lambda: None), device)
