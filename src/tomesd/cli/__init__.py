"""The command `tomesd`."""

import sys

__all__ = ["main"]


def main() -> None:
    try:
        from .run import run
    except ImportError as error:
        sys.exit(f"tomesd: {error.name} is missing; the commands need: pip install 'tomesd[cli]'")
    sys.exit(run(sys.argv[1:]))
