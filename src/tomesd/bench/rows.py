"""Rows of results in a file: written as they come, read back, continued."""

import json
import os
import platform
import subprocess
import sys
import uuid
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..files import append_json_line, read_json_lines

Row = dict[str, Any]

OUT_OF_MEMORY = "OOM"
"""The error of a row whose contender needed more memory than there is."""

SETTING = (
    *("section", "setting", "model", "what", "steps", "height", "width"),
    *("images", "dtype", "attention", "mode"),
)
"""What is measured. Rows of one run that agree in these can be compared."""

# What tells one measurement from another. The rest of a row is its result, and where it was made.
IDENTITY = (*SETTING, "variant", "label", "settings")


def environment(device: torch.device) -> Row:
    """Hardware and versions."""
    return {
        "hardware": _hardware(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "diffusers": _version("diffusers"),
        "tomesd": __version__,
        "commit": _commit(),
    }


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{threads} thread{'s' if threads > 1 else ''}, {platform.machine()} CPU"
    return device.type


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a folder on the path, not installed
        return getattr(sys.modules.get(package), "__version__", None)


def _commit() -> str | None:
    """Of the working copy that this code lies in, if it lies in one."""
    given = os.environ.get("TOMESD_COMMIT")
    if given:
        return given
    try:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        found = subprocess.run(git, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, none if it is not there. A last line that was cut short is left out."""
    return read_json_lines(path) if path.exists() else []


class RowFile:
    """Appends rows to a file, each whole and at once. What is in the file stays."""

    def __init__(self, path: Path, device: torch.device, *, resume: bool = False):
        """
        Args:
            resume: go on with the last run in the file. What it has measured is not measured again.
        """
        self.path = path
        before = read_rows(path)
        runs = [row["run"] for row in before if "run" in row]
        self.run = runs[-1] if resume and runs else uuid.uuid4().hex[:12]
        self.rows = [row for row in before if row.get("run") == self.run]
        self._environment = environment(device)

    def find(self, row: Row) -> Row | None:
        """What this run has measured of what `row` identifies."""
        wanted = _identity(row)
        return next((done for done in self.rows if _identity(done) == wanted), None)

    def add(self, row: Row) -> Row:
        """Adds what it was measured with; a row that tells that already keeps it."""
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        row = {"run": self.run, "date": date, **row, **{**self._environment, **row}}
        row = json.loads(json.dumps(row))  # as it will be read
        append_json_line(self.path, row)
        self.rows.append(row)
        return row


def _identity(row: Row) -> str:
    return json.dumps([row.get(name) for name in IDENTITY], sort_keys=True)
