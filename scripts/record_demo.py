"""Runs the demo and keeps its table and pictures for the README.

python scripts/record_demo.py
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tomesd.bench import RowFile

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "demo_cpu.jsonl"
FIGURES = ROOT / "docs" / "figures"


def main() -> None:
    out = Path(tempfile.mkdtemp())
    command = [sys.executable, "-m", "tomesd", "demo", "--device", "cpu", "--out", str(out)]
    command.append("--overwrite")  # the folder is there already
    subprocess.run(command, check=True)
    RESULTS.unlink(missing_ok=True)
    file = RowFile(RESULTS, torch.device("cpu"))
    for line in (out / "results.jsonl").read_text().splitlines():
        file.add({"benchmark": "demo", "model": "embedded", **json.loads(line)})
    for name in ("comparison", "merged_tokens"):
        shutil.copy(out / f"{name}.png", FIGURES / f"demo_{name}.png")


if __name__ == "__main__":
    main()
