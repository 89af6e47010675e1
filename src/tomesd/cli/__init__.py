"""The command `tomesd`."""

import os
import sys

__all__ = ["main"]

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def main() -> None:
    # Threads that wait for one another keep their cores busy unless told otherwise. Where other
    # programs run, the one waited for may not get a core. It has to be said before torch is loaded.
    if not any(name in os.environ for name in _WAITING):
        os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        try:
            from .run import run
        except ImportError as error:
            needed = "the commands need: pip install 'tomesd[cli]'"
            sys.exit(f"tomesd: {error.name} is missing; {needed}")
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        print("tomesd: interrupted", file=sys.stderr)
        sys.exit(130)
