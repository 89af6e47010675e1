"""Writes docs/performance.md and its figures from the rows in benchmarks/results.

    python scripts/update_performance.py           update the files
    python scripts/update_performance.py --check   fail if the document is out of date

A section is there if its rows are. Of a setting that was measured several times, the last counts.
"""

import argparse
import tempfile
from pathlib import Path

from performance_docs.document import Document
from performance_docs.matching import cpu, matching, sharing
from performance_docs.modes import compiled, eight_settings
from performance_docs.sizes import by_batch, memory, paper, pipelines, presets

ROOT = Path(__file__).parent.parent


def build(document: Document) -> str:
    eight_settings(
        document,
        "graph",
        "The bound, and how close we come",
        "Milliseconds per step, replayed as a CUDA graph: the time of the GPU alone. The original "
        "runs without random destinations, which it cannot draw inside a graph.",
    )
    eight_settings(
        document,
        "eager",
        "The same in eager mode",
        "Milliseconds per step. The host starts every kernel, and at small sizes that takes longer "
        "than the kernels do. Where even the bound is slower than unpatched, there is no share to "
        "recover.",
    )
    compiled(document)
    paper(document)
    by_batch(
        document,
        "batches",
        "Resolution and batch size",
        "Stable Diffusion 1.5, fused attention, default settings, r = 0.5: milliseconds per "
        "step, and how many times as fast as unpatched. Where the host is the bottleneck (few "
        "images, small sizes), times vary by a tenth and more from run to run, and merging is "
        "left out.",
    )
    by_batch(
        document,
        "sdxl",
        "Stable Diffusion XL at default settings",
        "There is no attention at full resolution, and merging can hardly pay: by default, it is "
        "left out where it does not, as with one image in eager mode, where the host is the "
        "bottleneck. Milliseconds per step.",
    )
    pipelines(document)
    presets(document)
    memory(document)
    matching(document)
    sharing(document)
    cpu(document)
    return document.text()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args(arguments)
    path = args.docs / "performance.md"
    if args.check:
        check(args, path)
        return
    document = Document(args.results, args.docs / "figures" / "performance")
    path.write_text(build(document), encoding="utf-8")


def check(args: argparse.Namespace, path: Path) -> None:
    """Figures may differ in a detail from one matplotlib to the next: only the text is compared."""
    with tempfile.TemporaryDirectory() as folder:
        text = build(Document(args.results, Path(folder)))
        drawn = {figure.name for figure in Path(folder).glob("*")}
    there = {figure.name for figure in (args.docs / "figures" / "performance").glob("*")}
    if not path.exists() or path.read_text(encoding="utf-8") != text or drawn != there:
        raise SystemExit(f"{path.name} is out of date: run python scripts/update_performance.py")


if __name__ == "__main__":
    main()
