"""Runs the demo and keeps its table and pictures for the README.

python scripts/record_demo.py
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import diffusers
import torch

import tomesd

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "demo_cpu.jsonl"
FIGURES = ROOT / "docs" / "figures"


def main() -> None:
    out = Path(tempfile.mkdtemp())
    command = [sys.executable, "-m", "tomesd", "demo", "--device", "cpu", "--out", str(out)]
    subprocess.run(command, check=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    setting = {
        "benchmark": "demo",
        "model": "embedded",
        "machine": f"{os.cpu_count()} cores, {platform.machine()} CPU",
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "tomesd": tomesd.__version__,
        "commit": commit,
    }
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    RESULTS.write_text("".join(json.dumps({**setting, **row}) + "\n" for row in rows))
    for name in ("comparison", "merged_tokens"):
        shutil.copy(out / f"{name}.png", FIGURES / f"demo_{name}.png")


if __name__ == "__main__":
    main()
