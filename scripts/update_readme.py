"""Writes the generated parts of README.md: the options and the results.

    python scripts/update_readme.py           update the file
    python scripts/update_readme.py --check   fail if it is out of date

A generated part stands between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import sys
from pathlib import Path

from performance_docs.document import EVERY_BLOCK, ORIGINAL, OURS, Document, gained
from performance_docs.sizes import paper_table
from quality_docs.rows import SPEEDS, last_of_each, speeds, value, with_speed

from tomesd import Settings
from tomesd.bench.tables import markdown, times
from tomesd.bench.variants import UNPATCHED
from tomesd.presets import PRESETS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a class, on one line."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    docs = {}
    for field, doc in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
            docs[field.target.id] = " ".join(doc.value.value.split())
    return docs


def options() -> str:
    docs = field_docs(Settings)
    rows = [[f"`{f.name}`", f"`{f.default}`", docs[f.name]] for f in dataclasses.fields(Settings)]
    return markdown(["option", "default", "meaning"], rows)


def results(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def demo() -> str:
    measured = results("demo_cpu")
    base = measured[0]["step_seconds"]
    rows = []
    for row in measured:
        quality = ["-", "-"]
        if row["psnr"] is not None:
            quality = [f"{row['psnr']:.1f} dB", f"{row['ssim']:.3f}"]
        step = f"{row['step_seconds']:.2f} s ({base / row['step_seconds']:.2f}x)"
        rows.append([f"{row['ratio']:g}", f"{row['tokens']:,}", step, *quality])
    return markdown(["ratio", "tokens", "a step on two CPU cores", "PSNR", "SSIM"], rows)


def speed() -> str:
    """A step replayed as a CUDA graph, as it is and compiled; defaults but for what rows say."""
    document = Document(RESULTS, figures=Path())
    compiled = {
        one.first["setting"]: one
        for one in document.settings("compile")
        if one.first["mode"] == "compile-autotune"
    }
    lines = []
    for graph in document.settings("graph"):
        setting = graph.first["setting"]
        tuned = compiled[setting]
        cells = [gained(graph, graph.find(label)) for label in (UNPATCHED, "original", EVERY_BLOCK)]
        cells += [gained(tuned, tuned.find(label)) for label in (UNPATCHED, EVERY_BLOCK)]
        lines.append([setting, *cells])
    names = [UNPATCHED, ORIGINAL, OURS, "compiled", f"compiled, {OURS}"]
    return markdown(["one step of, ms", *names], lines)


def paper() -> str:
    """Time and memory per image of the paper's set-up, at its ratios."""
    return paper_table(Document(RESULTS, figures=Path()).settings("paper"))


def quality() -> str:
    """The unmerged model, the original and this library at half the tokens, and the presets."""
    labels = {
        "unmerged": ("front", "unmerged"),
        "tomesd 0.1.3, `ratio=0.5`": ("front", "0.1.3 0.5"),
        "`ratio=0.5`": ("paper", "this library 0.5"),
        **{f'`preset="{name}"`': ("front", f"preset {name}") for name in PRESETS},
    }
    rows = last_of_each(results("quality"))
    timed = speeds(rows)
    found = {(row["section"], row["label"]): with_speed(row, timed) for row in rows}
    lines = []
    for name, (section, label) in labels.items():
        row = found[f"quality-{section}", label]
        speed = [times(row.get(speed)) if row["settings"] else "1" for speed in SPEEDS]
        scores = [("fid", 1), ("lpips", 3), ("psnr", 1)]
        lines.append([name, *(value(row, *score) for score in scores), *speed])
    return markdown(["", "FID", "LPIPS", "PSNR", "speed-up", "with unfused attention"], lines)


def memory() -> str:
    measured = results("memory_cpu")
    base = {row["grid"]: row["forward_mib"] for row in measured if row["library"] == "none"}
    rows = []
    for grid, unpatched in base.items():
        for merged in ("attention", "everything"):
            found = {
                row["library"]: row["forward_mib"]
                for row in measured
                if row["grid"] == grid and row["merged"] == merged
            }
            values = [f"{unpatched:,} MiB"]
            for library in ("tomesd 0.1.3", "tomesd"):
                mib = found[library]
                values.append(f"{mib:,} MiB ({mib / unpatched:.2f}x)")
            rows.append([grid, merged, *values])
    return markdown(
        ["tokens", "merged, r = 0.5", "unpatched", "tomesd 0.1.3", "this library"], rows
    )


def fill(text: str, name: str, content: str) -> str:
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    filled, count = re.subn(pattern, lambda m: f"{m[1]}{content}\n{m[2]}", text, flags=re.S)
    if count != 1:
        raise SystemExit(f"README.md must have one part named {name}, not {count}")
    return filled


def main() -> None:
    old = README.read_text()
    new = old
    for make in (demo, options, quality, paper, speed, memory):
        new = fill(new, make.__name__, make())
    if "--check" in sys.argv:
        if new != old:
            raise SystemExit("README.md is out of date: run python scripts/update_readme.py")
    else:
        README.write_text(new)


if __name__ == "__main__":
    main()
