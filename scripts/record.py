"""Takes the picture of the page in the browser, docs/figures/ui.png.

    python scripts/record.py

The page is shown on the embedded model, in Chromium. Other pictures that are not drawn from rows
are made by `tomesd demo`, and by benchmarks/front.py.
"""

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

from tomesd.cli.ui import Ui

PICTURE = Path(__file__).parent.parent / "docs" / "figures" / "ui.png"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        served = Ui(port=7899).serve(Console(), Path(folder))
        chromium, options = shutil.which("chromium"), ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.goto("http://127.0.0.1:7899/")
        page.fill("#seed input", "3")
        page.click("#generate")
        page.wait_for_selector("#status .note:has-text('times as fast')", timeout=0)
        page.wait_for_function("[...document.images].every(image => image.complete)")
        page.wait_for_timeout(1000)  # what fades in
        page.screenshot(path=PICTURE)
        browser.close()
        served.close(verbose=False)


if __name__ == "__main__":
    main()
