"""Writes docs/quality.md and its figures from the rows in benchmarks/results/quality.jsonl.

    python scripts/update_quality.py           update the files
    python scripts/update_quality.py --check   fail if the document is out of date

What the document says about the numbers is found out from them. Of a row that was made several
times, the last counts.
"""

import argparse
import tempfile
from pathlib import Path

from quality_docs.document import Document, filled
from quality_docs.front import front, searched
from quality_docs.paper import SHEET, ablations, paper, windows
from quality_docs.variants import seed

ROOT = Path(__file__).parent.parent
GALLERY = "gallery.jpg"


def gallery(document: Document) -> None:
    if (document.figures / GALLERY).exists():
        words = """
The first held-out captions, not picked: unmerged, with tomesd 0.1.3, with this library at the same
ratio, and with the presets. 20 DDIM steps on a CPU, by
[scripts/record_gallery.py](../scripts/record_gallery.py)."""
        picture = f"![Images with every preset](figures/quality/{GALLERY})"
        document.add("Some images", filled(words), picture)


def build(document: Document) -> str:
    for section in (gallery, paper, windows, front, searched, ablations, seed):
        section(document)
    return document.text()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results" / "quality.jsonl"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args(arguments)
    path = args.docs / "quality.md"
    if args.check:
        check(args, path)
        return
    text = build(Document(args.results, args.docs / "figures" / "quality"))
    path.write_text(text, encoding="utf-8")


def check(args: argparse.Namespace, path: Path) -> None:
    """Figures may differ in a detail from one matplotlib to the next: only the text is compared."""
    figures = args.docs / "figures" / "quality"
    with tempfile.TemporaryDirectory() as folder:
        for picture in (SHEET, GALLERY):
            if (figures / picture).exists():
                (Path(folder) / picture).touch()
        text = build(Document(args.results, Path(folder)))
        made = {figure.name for figure in Path(folder).glob("*")}
    there = {figure.name for figure in figures.glob("*")}
    if not path.exists() or path.read_text(encoding="utf-8") != text or made != there:
        raise SystemExit(f"{path.name} is out of date: run python scripts/update_quality.py")


if __name__ == "__main__":
    main()
