"""What all benchmarks write."""

from pathlib import Path

from tomesd.bench.measure import Timing
from tomesd.bench.rows import Row

__all__ = ["RESULTS", "timed"]

RESULTS = Path(__file__).parent / "results"


def timed(timing: Timing) -> Row:
    """The fields of a row that tell how long a call takes."""
    return {
        "seconds": timing.median,
        "spread": timing.spread,
        "repeats": len(timing.seconds),
        "calls": timing.calls,
    }
