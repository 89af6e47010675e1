"""What the benchmarks share: where things are, and their command line."""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "demo_model" / "training"))  # parts of it serve front.py


class Arguments(argparse.ArgumentParser):
    """The command line of a benchmark, with what several have in common."""

    def __init__(self, doc: str | None, *, device: str = "", seconds: float = 0) -> None:
        super().__init__(description=(doc or "").splitlines()[0])
        add = self.add_argument
        if device:
            add("--device", default=device)
        if seconds:  # settings are timed, each for so long if nothing else is said
            add("--only", default="", help="of the settings, those with this in their name")
            add("--seconds", type=float, default=seconds, help="of timing per setting")
            add("--out", type=Path, default=RESULTS, help="folder of the rows")
        add("--commit", help="of the sources, where there is no git")

    def read(self, arguments: list[str] | None) -> argparse.Namespace:
        """What was given, and as `spent` a function that returns the seconds since."""
        args, start = self.parse_args(arguments), time.monotonic()
        args.spent = lambda: time.monotonic() - start
        if args.commit:
            os.environ["TOMESD_COMMIT"] = args.commit
        return args
