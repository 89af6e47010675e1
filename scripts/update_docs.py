"""Writes the tables and figures of README.md and docs/ from the rows in benchmarks/results.

    python scripts/update_docs.py           update the files
    python scripts/update_docs.py --check   fail if one is out of date

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; everything around it is written by
hand.
"""

import argparse
import re
from pathlib import Path

from doc_tables import FIGURES, TABLES, Results

from tomesd.bench.plots import save_figure

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "docs/options.md", "docs/performance.md", "docs/quality.md")
MARKED = re.compile(r"<!-- table: (?P<name>.*?) -->\n.*?<!-- end -->", re.DOTALL)


def filled(text: str, results: Results, *, sources: bool) -> str:
    """The text with its tables as the rows have them now.

    Args:
        sources: write below each table what its rows were measured with.
    """

    def table(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in TABLES:
            raise SystemExit(f"there is no table {name!r}: must be one of {', '.join(TABLES)}")
        content = TABLES[name](results).text(sources=sources)
        return f"<!-- table: {name} -->\n{content}\n<!-- end -->"

    return MARKED.sub(table, text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the project")
    args = parser.parse_args(arguments)
    results = Results(args.root / "benchmarks" / "results")
    figures = args.root / "docs" / "figures"
    stale = []
    for name in DOCUMENTS:
        path = args.root / name
        old = path.read_text(encoding="utf-8")
        new = filled(old, results, sources=name.startswith("docs/"))
        if not args.check:
            path.write_text(new, encoding="utf-8")
        elif new != old:
            stale.append(name)
    for name, draw in FIGURES.items():
        if not args.check:
            save_figure(draw(results), figures / name)
        elif not (figures / name).is_file():  # one matplotlib may draw a detail unlike the next
            stale.append(name)
    if stale:
        raise SystemExit(f"{', '.join(stale)}: out of date; run python scripts/update_docs.py")


if __name__ == "__main__":
    main()
