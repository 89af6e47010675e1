"""Makes docs/figures/ui.png: the page on the embedded model, as a browser shows it.

python scripts/record_ui.py
"""

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

from tomesd.cli.ui import Ui

_OUT = Path(__file__).parents[1] / "docs" / "figures" / "ui.png"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        served = Ui(port=7899).serve(Console(), Path(folder))
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
        page.screenshot(path=_OUT)
        browser.close()
        served.close(verbose=False)


if __name__ == "__main__":
    main()
