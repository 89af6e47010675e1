"""Makes the pictures of the documents that are not drawn from rows.

    python scripts/record.py demo    of the README, with the demo's table
    python scripts/record.py ui      docs/figures/ui.png

The page is shown on the embedded model, in Chromium. Sheets of images with merging in many ways are
made by benchmarks/front.py.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tomesd.bench import RowFile

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs" / "figures"


def demo(out: Path) -> None:
    """Runs the demo and keeps its table and pictures."""
    command = [sys.executable, "-m", "tomesd", "demo", "--device", "cpu", "--out", str(out)]
    subprocess.run([*command, "--overwrite"], check=True)  # the folder is there already
    rows = ROOT / "benchmarks" / "results" / "demo_cpu.jsonl"
    rows.unlink(missing_ok=True)
    file = RowFile(rows, torch.device("cpu"))
    for line in (out / "results.jsonl").read_text().splitlines():
        file.add({"benchmark": "demo", "model": "embedded", **json.loads(line)})
    for name in ("comparison", "merged_tokens"):
        shutil.copy(out / f"{name}.png", FIGURES / f"demo_{name}.png")


def ui(folder: Path) -> None:
    from playwright.sync_api import sync_playwright
    from rich.console import Console

    from tomesd.cli.ui import Ui

    with sync_playwright() as playwright:
        served = Ui(port=7899).serve(Console(), folder)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.goto("http://127.0.0.1:7899/")
        page.fill("#seed input", "3")
        page.click("#generate")
        page.wait_for_selector("#status .note:has-text('Merged at')", timeout=0)
        page.wait_for_function("[...document.images].every(image => image.complete)")
        page.wait_for_timeout(1000)  # what fades in
        page.screenshot(path=FIGURES / "ui.png")
        browser.close()
        served.close(verbose=False)


def main() -> None:
    pictures = {"demo": demo, "ui": ui}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", choices=list(pictures))
    with tempfile.TemporaryDirectory() as folder:
        pictures[parser.parse_args().picture](Path(folder))


if __name__ == "__main__":
    main()
