"""Makes the pictures of the documents that are not drawn from rows.

    python scripts/record.py demo                         of the README, with the demo's table
    python scripts/record.py gallery --original FOLDER    docs/figures/quality/gallery.jpg
    python scripts/record.py ui                           docs/figures/ui.png

The gallery has the first held-out captions, not picked, with every preset: 20 DDIM steps, guidance
5, on a CPU. FOLDER holds tomesd 0.1.3. The page is shown on the embedded model, in Chromium.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tomesd_demo_model
import torch

import tomesd
from tomesd.bench import RowFile, load_original
from tomesd.generation import Sampling, load_pipeline, sample_batch
from tomesd.generation.comparison import label_grid
from tomesd.presets import MERGING_PRESETS

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


def gallery(folder: str) -> None:
    captions = tomesd_demo_model.held_out_captions()[:3]
    original, pipe = load_original(folder), load_pipeline("demo", device="cpu")
    sampling, columns = Sampling.of(pipe, steps=20), {}

    def add(name: str) -> None:
        columns[name] = sample_batch(pipe, captions, range(len(captions)), sampling).images

    add("unmerged")
    torch.manual_seed(0)  # the original draws from the global generator
    original.apply_patch(pipe, ratio=0.5)
    add("0.1.3, r = .5")
    original.remove_patch(pipe)
    for name, options in {"r = .5": {"ratio": 0.5}, **MERGING_PRESETS}.items():
        with tomesd.patched(pipe, **options, when="always"):
            add(name)
    picture = label_grid(list(zip(*columns.values(), strict=True)), list(columns), captions)
    picture.save(FIGURES / "quality" / "gallery.jpg", quality=92)


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", choices=["demo", "gallery", "ui"])
    parser.add_argument("--original", help="folder with tomesd 0.1.3, for the gallery")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.picture == "gallery":
            gallery(args.original or parser.error("gallery: needs --original"))
        else:
            {"demo": demo, "ui": ui}[args.picture](Path(folder))


if __name__ == "__main__":
    main()
