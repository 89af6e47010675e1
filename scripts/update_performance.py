"""Writes docs/performance.md and its figures from the rows in benchmarks/results.

    python scripts/update_performance.py           update the files
    python scripts/update_performance.py --check   fail if the document is out of date

A section is there if its rows are. Of a setting that was measured several times, the last counts.
"""

import argparse
import textwrap
from pathlib import Path

from performance_figures import EVERY_BLOCK, KEPT, ORIGINAL, plot_matching, plot_recovered

from tomesd.bench.rows import Row, read_rows
from tomesd.bench.tables import (
    Comparison,
    comparisons,
    duration,
    failures,
    markdown,
    percent,
    times,
    versions,
)

ROOT = Path(__file__).parent.parent
EVERY_STEP, STACKS = "plan every step", "whole stacks"
OURS = "this library"
STEPS = 50  # of the images in the paper

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

    def add(self, title: str, words: str, table: str, found: list[Comparison]) -> None:
        rows = [row for comparison in found for row in comparison]
        self.parts += [f"## {title}\n", wrapped(words) + "\n", table + "\n"]
        failed = dict.fromkeys(f"- failed: {line}" for line in failures(rows))
        if failed:
            self.parts.append("\n".join(failed) + "\n")
        self.parts.append(f"{origins(found)}.\n")

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


def gained(found: Comparison, row: Row | None) -> str:
    """Milliseconds, and how many times as fast as unpatched."""
    if row is None or row["seconds"] is None:
        return ms(row)
    return f"{ms(row)} ({times(found.speedup(row))})"


def mib(row: Row | None) -> str:
    if row is None or row["seconds"] is None:
        return ms(row)
    return f"{row['peak_mib']:,.0f}"


def measured(found: list[Comparison], labels: list[str]) -> list[str]:
    """Those variants that there are rows of."""
    return [label for label in labels if any(one.find(label) for one in found)]


def eight_settings(document: Document, section: str, title: str, words: str) -> None:
    found = document.settings(section)
    if not found:
        return
    stacks = measured(found, [STACKS])
    header = ["setting", "unpatched", ORIGINAL, "bound", KEPT, EVERY_STEP, EVERY_BLOCK, *stacks]
    header += ["recovered: kept", "every step", "every block", "0.1.3"]
    lines = []
    for one in found:
        shown = ["unpatched", "original", "free", KEPT, EVERY_STEP, EVERY_BLOCK, *stacks]
        line = [one.first["setting"], *(ms(one.find(label)) for label in shown)]
        for label in (KEPT, EVERY_STEP, EVERY_BLOCK, "original"):
            row = one.find(label)
            line.append("-" if row is None else percent(one.recovered(row)))
        lines.append(line)
    document.add(title, words + stack_words(found), markdown(header, lines), found)
    name = f"{section}.svg"
    plot_recovered(found, document.figures / name)
    document.picture(name, f"Share of the possible gain that is recovered, {section} mode")


def stack_words(found: list[Comparison]) -> str:
    """On the settings in which whole stacks beat the bound."""
    ahead = []
    for one in found:
        row, free = one.find(STACKS), one.seconds("free")
        if row is not None and row["seconds"] is not None and free and row["seconds"] < free:
            times_ms = f"{ms(one.find('unpatched'))} to {ms(row)} ms"
            ahead.append(f"{times_ms} ({times(one.speedup(row))}) in {one.first['setting']}")
    if not ahead:
        return ""
    return f" Whole stacks are faster than the bound: {'; '.join(ahead)}."


def compiled(document: Document) -> None:
    last = document.settings("compile")
    if not last:
        return
    found = [one for runs in document.runs("compile").values() for one in not_replaced(runs)]
    labels = measured(found, ["original", KEPT, EVERY_BLOCK, STACKS])
    names = ["0.1.3" if label == "original" else label for label in labels]
    header = ["setting", "mode", "compiled", *(f"with {name}" for name in names), "commit"]
    lines = []
    for one in found:
        mode = one.first["mode"].removeprefix("compile").removeprefix("-") or "default"
        shown = [with_spread(one, one.find(label)) for label in ("unpatched", *labels)]
        lines.append([one.first["setting"], mode, *shown, one.first.get("commit") or "-"])
    words = """
Milliseconds per step, everything compiled in one piece; ± is the spread (interquartile range), and
in brackets, how many times as fast as compiled alone. In the default mode, the host launches the
kernels, those of this library too, past PyTorch's dispatcher. *Autotune* is max-autotune without
coordinate descent, which takes too long to compile here, with matrix products of ATen; it replays
CUDA graphs."""
    if any(one not in last for one in found):
        words += """ A second line of a setting is from an earlier commit, and another host: it is
there for the variants that have no newer row."""
    words += "".join(slower_compiled(one) for one in last)
    document.add("torch.compile", words, markdown(header, lines), found)


def not_replaced(runs: list[Comparison]) -> list[Comparison]:
    """Of the runs of a setting, the last, and earlier ones that have variants it lacks."""
    shown: list[Comparison] = []
    seen: set[str] = set()
    for one in runs:
        labels = {row["label"] for row in one}
        if labels - seen:
            shown.append(one)
        seen |= labels
    return shown


def with_spread(found: Comparison, row: Row | None) -> str:
    if row is None or row["seconds"] is None:
        return ms(row)
    cell = f"{ms(row)} ± {spread(row)}"
    return cell if row["variant"] == "unpatched" else f"{cell} ({times(found.speedup(row))})"


def slower_compiled(found: Comparison) -> str:
    """A sentence where no variant is faster than the compiled model alone."""
    base = found.find("unpatched")
    merged = sorted(
        (row for row in found if row["variant"] == "tomesd" and row["seconds"] is not None),
        key=lambda row: row["seconds"],
    )
    if base is None or not merged or base["seconds"] is None:
        return ""
    if merged[0]["seconds"] <= base["seconds"]:
        return ""
    cells = ", ".join(f"{row['label']} {ms(row)} ± {spread(row)}" for row in merged)
    return f"""

In {title_of(found)}, no merged variant was faster than the compiled model alone in the last run:
{ms(base)} ± {spread(base)} ms, and {cells}. The spreads point to the host, which launches kernels
more slowly than the GPU runs them: then no layer gets faster by doing less. CUDA graphs help. These
rows merge with `when="always"`."""


def paper(document: Document) -> None:
    found = document.settings("paper")
    if not found:
        return
    lines = []
    for one in found:
        lines.append(["0", *per_image(one, one.find("unpatched")), "-", "-"])
        ratios = {row["settings"]["ratio"] for row in one if row["settings"]}
        for ratio in sorted(ratios):
            by_kind = {
                row["variant"]: row
                for row in one
                if row["settings"] and row["settings"]["ratio"] == ratio
            }
            original = per_image(one, by_kind.get("original"))
            lines.append([f"{100 * ratio:.0f}", *original, *per_image(one, by_kind.get("tomesd"))])
    header = ["r %", f"{ORIGINAL}: s / image", "GiB / image", f"{OURS}: s / image", "GiB / image"]
    words = f"""
The table of the original's README: Stable Diffusion 1.5 at 512 px, attention that is not fused, r
from 10 to 60 %. Time of the UNet for {STEPS} steps, and memory, both per image, of
{found[0].first["images"]} images at a time, in eager mode at default settings. The row r = 0 is the
unpatched model; in brackets, how many times as fast, and how much of its memory."""
    document.add("The table of the paper", words, markdown(header, lines), found)


def per_image(found: Comparison, row: Row | None) -> list[str]:
    if row is None or row["seconds"] is None:
        return [ms(row), "-"]
    base = found.find("unpatched")
    seconds, memory = row["seconds"] * STEPS / row["images"], row["peak_mib"] / row["images"] / 1024
    cells = [f"{seconds:.2f}", f"{memory:.2f}"]
    if base is None or base["seconds"] is None or base is row:
        return cells
    factors = (base["seconds"] / row["seconds"], row["peak_mib"] / base["peak_mib"])
    return [f"{cell} ({times(factor)})" for cell, factor in zip(cells, factors, strict=True)]


def left_alone(found: Comparison) -> bool:
    """Whether nothing was merged, as that would not be faster; in eager mode."""
    ours = found.find("tomesd")
    return ours is not None and bool(ours.get("left_alone"))


def merged(found: Comparison) -> bool:
    """Whether it is known that something was merged."""
    ours = found.find("tomesd")
    return ours is not None and ours.get("left_alone") is False


def eager_losses(found: list[Comparison]) -> str:
    """What the patch cost where nothing was merged, and where merging made a step slower."""
    eager = [one for one in found if one.first["mode"] == "eager"]
    eager = [one for one in eager if one.seconds("unpatched") and one.seconds("tomesd")]
    words = ""
    idle = [one for one in eager if left_alone(one)]
    if idle:
        worst, best = max(idle, key=cost), min(idle, key=cost)
        least = "" if len(idle) == 1 else f"{1 + cost(best):.2f} to "
        words += f""" Where nothing is merged, what is left of the patch made a step take
{least}{1 + cost(worst):.2f} times as long; at worst, {from_to(worst)}."""
    slower = [one for one in eager if cost(one) > 0 and not left_alone(one)]
    for what, ones in (
        ("Merging", [one for one in slower if merged(one)]),
        ("The patch, whether it merged or not,", [one for one in slower if not merged(one)]),
    ):
        if ones:
            words += f" {what} made it slower: {'; '.join(map(from_to, ones))}."
    for one in eager:
        original = one.find("original")
        if left_alone(one) and original is not None and (one.speedup(original) or 0) > 1.02:
            words += f""" {title_of(one)}, was left alone, although {ORIGINAL} made it
{times(one.speedup(original))} as fast."""
    return words


def cost(found: Comparison) -> float:
    """The share of a step that the patch adds."""
    return (found.seconds("tomesd") or 0) / (found.seconds("unpatched") or 1) - 1


def from_to(found: Comparison) -> str:
    base, ours = found.find("unpatched"), found.find("tomesd")
    spreads = f"spreads {spread(base)} and {spread(ours)} ms"
    return f"{title_of(found)}, {ms(base)} to {ms(ours)} ms ({spreads})"


def by_batch(document: Document, section: str, title: str, words: str) -> None:
    found = document.settings(section)
    if not found:
        return
    header = ["size", "images", "mode", "unpatched", ORIGINAL, OURS]
    lines = []
    for one in found:
        first = one.first
        shown = [gained(one, one.find(kind)) for kind in ("original", "tomesd")]
        size = f"{first['width']} px"
        lines.append([size, str(first["images"]), first["mode"], ms(one.find("unpatched")), *shown])
    document.add(title, words + eager_losses(found), markdown(header, lines), found)


def memory(document: Document) -> None:
    found = document.settings("eager") or document.settings("graph")
    if not found:
        return
    labels = ("unpatched", "original", KEPT, EVERY_BLOCK)
    lines = [[one.first["setting"], *(mib(one.find(label)) for label in labels)] for one in found]
    header = ["setting", "unpatched", ORIGINAL, KEPT, EVERY_BLOCK]
    words = f"""
Peak memory of a step beyond the weights, in MiB, with fused attention. PyTorch does not divide a
block of memory where less than 1 MiB would be left, so that differences below that mean nothing.
{above_words(found)}"""
    document.add("Memory", words, markdown(header, lines), found)


def above_words(found: list[Comparison]) -> str:
    """By how much the patch can lift the peak."""
    most = {}
    for label in (EVERY_BLOCK, KEPT):
        pairs = [(one.find("unpatched"), one.find(label)) for one in found]
        above = [
            mine["peak_mib"] - base["peak_mib"]
            for base, mine in pairs
            if base is not None and mine is not None and mine.get("peak_mib") is not None
        ]
        most[label] = max(above, default=0.0)
    return (
        f"Above the unpatched model: at most {most[EVERY_BLOCK]:.1f} MiB with a plan for every "
        f"block, as by default; {most[KEPT]:.1f} MiB with a plan that is kept, which takes memory "
        "itself."
    )


def matching(document: Document) -> None:
    found = document.settings("matching")
    if not found:
        return
    modes = {one.first["mode"] for one in found}
    mode = "graph" if "graph" in modes else "eager"
    found = [one for one in found if one.first["mode"] == mode]
    labels = ("triton", "triton, one window", "reference", "original")
    names = {
        "triton": "Triton",
        "triton, one window": "Triton, one window",
        "reference": "PyTorch",
        "original": "0.1.3",
    }
    lines = [
        [
            f"{one.first['tokens']:,}",
            *(ms(one.find(label)) for label in labels),
            *(mib(one.find(label)) for label in labels),
        ]
        for one in found
    ]
    header = ["tokens", *(f"{names[label]}: ms" for label in labels)]
    header += [f"{names[label]}: MiB" for label in labels]
    first = found[0].first
    words = f"""
What it takes to find out which tokens belong together, once, for {first["batch"]} x N tokens of
{first["channels"]} channels at r = {first["settings"]["ratio"]:g}, in {mode} mode: with the Triton
kernels of this library, with its plain PyTorch, and with {ORIGINAL}. By default, this library
compares sources and destinations within windows of 8x8 tokens; "one window" and the original
compare all with all. The original writes all similarities down; this library holds a tile of them
at a time."""
    document.add("How matching grows", words, markdown(header, lines), found)
    plot_matching(found, labels, names, document.figures / "matching.svg")
    document.picture("matching.svg", "Time and memory of matching against the number of tokens")


def cpu(document: Document) -> None:
    found = document.settings("cpu")
    if not found:
        return
    lines = []
    for one in found:
        lines.append(["0", "-", ms(one.find("unpatched")), "-"])
        for row in one:
            if row["variant"] != "unpatched":
                name = ORIGINAL if row["variant"] == "original" else OURS
                share = percent(row.get("matching_share"))
                lines.append([f"{row['settings']['ratio']:g}", name, gained(one, row), share])
    header = ["ratio", "library", "ms per step", "of it in matching"]
    words = "The embedded model at 256 px, one image, default settings."
    document.add("On a CPU", words, markdown(header, lines), found)


def pipelines(document: Document) -> None:
    found = document.settings("pipelines")
    if not found:
        return
    lines = [
        [
            one.first["setting"],
            ms(one.find("unpatched")),
            *(gained(one, one.find(kind)) for kind in ("original", "tomesd")),
        ]
        for one in found
    ]
    words = "Milliseconds for one image, with scheduler and decoder, eager, at default settings."
    header = ["setting", "unpatched", ORIGINAL, OURS]
    document.add("Whole images", words, markdown(header, lines), found)


def sharing(document: Document) -> None:
    """What the ways to save matching do to images; rows of another kind than the others."""
    rows = [row for row in document.rows if row["section"] == "sharing" and "psnr" in row]
    if not rows:
        return
    lines = []
    for row in rows:
        gain = "-"
        if "psnr_gain" in row:
            gain = f"{row['psnr_gain']:+.2f} ± {row['psnr_gain_ci95']:.2f}"
        name = ORIGINAL if row["variant"] == "original" else row["variant"]
        if row["settings"].get("use_rand") is False:
            name += ", not random"
        layers = "everything, levels 1-4" if row["layers"] == "all" else "self-attention, level 1"
        lines.append(
            [f"{row['ratio']:g}", layers, name, f"{row['psnr']:.2f}", f"{row['ssim']:.3f}", gain]
        )
    header = ["ratio", "merged", "matching", "PSNR", "SSIM", "PSNR to 0.1.3's, image by image"]
    words = f"""
Images of the embedded model (not Stable Diffusion), {rows[0]["images"]} held-out captions at
{rows[0]["height"]} px, {rows[0]["steps"]} steps, against the unmerged image of the same seed; ± is
the 95 % interval. *block*, *run*, *level*: a plan is used in one block, in all that follow each
other at a level, or in all of a level. *Kept*: for some steps, or for the image. *Tiles*: the grid
is searched in so many parts; *ranked by tile*: each part removes the same share, otherwise the most
similar tokens of the whole image go. 8x8 tiles here are windows of 8x8 tokens, which became the
default for ratios up to two thirds of the cap; sharing plans costs quality, and is left to those
who ask for it."""
    part = f"## What cheaper matching does to the images\n\n{wrapped(words)}\n"
    document.parts += [part, markdown(header, lines) + "\n", f"{versions(rows)}.\n"]


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
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        text = build(Document(args.results, Path(folder)))
        drawn = {figure.name for figure in Path(folder).glob("*")}
    there = {figure.name for figure in (args.docs / "figures" / "performance").glob("*")}
    if not path.exists() or path.read_text(encoding="utf-8") != text or drawn != there:
        raise SystemExit(f"{path.name} is out of date: run python scripts/update_performance.py")


if __name__ == "__main__":
    main()
