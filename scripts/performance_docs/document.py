"""The document while it is written, and how it writes numbers."""

import textwrap
from pathlib import Path

from tomesd.bench.rows import Row, read_rows
from tomesd.bench.tables import Comparison, comparisons, duration, failures, times, versions

ORIGINAL, OURS = "tomesd 0.1.3", "this library"
KEPT, EVERY_STEP, EVERY_BLOCK = "plan kept", "plan every step", "plan every block"
STACKS, IF_FASTER = "whole stacks", "if faster"

INTRODUCTION = """\
# Performance

Measured, not promised: every table is written from rows in
[benchmarks/results](../benchmarks/results) by
[scripts/update_performance.py](../scripts/update_performance.py), the bad results with the good.

The models are Stable Diffusion's architectures with random weights: time and memory do not depend
on the values of the weights; quality does, and is not shown here. Times are medians; all variants
of a setting are warm and take turns within one run. A step is one call of the UNet with guidance,
on two latents per image. Memory is the peak of a step beyond the weights.

- **unpatched**: the model as it is. **tomesd 0.1.3**: the original library.
- **bound**: the same tokens are removed in the same layers, but nothing is matched and as little as
  possible is moved. No way of choosing tokens can be faster if every layer merges and restores.
- **recovered**: the share of what the bound saves that is saved, (unpatched - ours) / (unpatched -
  bound). Where the bound saves little, the noise of a measurement is many per cent of it, and can
  lift the share above 100 %.
- **plan kept**: which tokens merge is found out once per image (`share="steps"` with a `refresh`
  beyond the number of steps); **every step**: once per level and step (`share="level"`); **every
  block**: in each block, as the paper does and by default (`share="block"`). The first two cost
  quality; see below.
- **whole stacks**: `target="stack"` merges once before a run of blocks and restores once after it,
  so it can be faster than the bound, which moves data in every layer.

Before it measures, [benchmarks/gpu.py](../benchmarks/gpu.py) checks on the GPU that the kernels do
what they should, and stops if they do not: that plans are those of float64 up to ties, and the same
bits in every run; that merging and restoring are as exact as the PyTorch reference in the same
precision; and that a CUDA graph replays eager steps bit for bit.

Repeat it: `tomesd bench` for a model and settings of your own, [benchmarks/](../benchmarks) for
these tables.
"""


class Document:
    """Collects sections; knows the rows."""

    def __init__(self, results: Path, figures: Path):
        rows = [row for path in sorted(results.glob("*.jsonl")) for row in read_rows(path)]
        self.rows = [row for row in rows if "section" in row]
        self.figures = figures
        self.parts = [INTRODUCTION]

    def runs(self, section: str) -> dict[tuple[str, str], list[Comparison]]:
        """All measurements of each setting of a section, by setting and mode, the last first."""
        chosen = [row for row in self.rows if row["section"] == section]
        found: dict[tuple[str, str], list[Comparison]] = {}
        for one in comparisons(chosen):
            found.setdefault(name_of(one), []).append(one)
        for runs in found.values():
            runs.sort(key=lambda one: one.first["date"], reverse=True)
        return found

    def settings(self, section: str) -> list[Comparison]:
        """The last measurement of each setting of a section."""
        return [runs[0] for runs in self.runs(section).values()]

    def add(
        self,
        title: str,
        words: str,
        table: str,
        found: list[Comparison],
        *,
        shows_commits: bool = False,
    ) -> None:
        """Adds a section.

        Args:
            found: what the table is made of.
            shows_commits: whether the table tells itself which line comes from where.
        """
        rows = [row for comparison in found for row in comparison]
        self.parts += [f"## {title}\n", wrapped(words) + "\n", table + "\n"]
        failed = dict.fromkeys(f"- failed: {line}" for line in failures(rows))
        if failed:
            self.parts.append("\n".join(failed) + "\n")
        self.parts.append(f"{versions(rows) if shows_commits else origins(found)}.\n")

    def picture(self, name: str, words: str) -> None:
        self.parts.insert(-1, f"![{words}](figures/performance/{name})\n")

    def text(self) -> str:
        return "\n".join(self.parts)


def wrapped(words: str) -> str:
    paragraphs = words.strip().split("\n\n")
    fill = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False).fill
    return "\n\n".join(fill(paragraph) for paragraph in paragraphs)


def name_of(found: Comparison) -> tuple[str, str]:
    return found.first["setting"], found.first["mode"]


def origins(found: list[Comparison]) -> str:
    """Where rows come from; what only a few come from is named."""
    by_origin: dict[str, list[str]] = {}
    for one in found:
        by_origin.setdefault(versions(list(one)), []).append(one.first["setting"])
    most = max(by_origin, key=lambda origin: len(by_origin[origin]))
    others = [
        f"{' and '.join(names)}: {origin}" for origin, names in by_origin.items() if origin != most
    ]
    return "; ".join([most, *others])


def title_of(found: Comparison) -> str:
    return found.first["setting"].replace(" 1 images", " one image")


def spread(row: Row) -> str:
    return f"{1000 * row['spread']:.1f}"


def ms(row: Row | None) -> str:
    return "-" if row is None else duration(row)


def gained(found: Comparison, row: Row | None, *, spreads: bool = False) -> str:
    """Milliseconds, with their spread if asked for, and how many times as fast as unpatched."""
    if row is None or row["seconds"] is None:
        return ms(row)
    cell = f"{ms(row)} ± {spread(row)}" if spreads else ms(row)
    if row["variant"] == "unpatched":
        return cell
    alone = ", left alone" if row.get("left_alone") else ""
    return f"{cell} ({times(found.speedup(row))}{alone})"


def mib(row: Row | None) -> str:
    if row is None or row["seconds"] is None:
        return ms(row)
    return f"{row['peak_mib']:,.0f}"


def measured(found: list[Comparison], labels: list[str]) -> list[str]:
    """Those variants that there are rows of."""
    return [label for label in labels if any(one.find(label) for one in found)]
