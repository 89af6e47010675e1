"""Writes docs/quality.md and its figures from the rows in benchmarks/results/quality.jsonl.

    python scripts/update_quality.py           update the files
    python scripts/update_quality.py --check   fail if the document is out of date

What the document says about the numbers is found out from them. Of a row that was made several
times, the last counts.
"""

import argparse
import itertools
import textwrap
from pathlib import Path
from typing import Any

from quality_figures import plot_front, plot_paper, plot_search
from quality_rows import (
    ORIGINAL,
    OURS,
    SPEEDS,
    clearly_below,
    gave_up_evenly,
    has,
    last_of_each,
    listed,
    name_of,
    pareto,
    same_settings,
    speeds,
    value,
    with_speed,
)

from tomesd.bench.rows import Row, read_rows
from tomesd.bench.tables import markdown, percent, times, versions
from tomesd.presets import PRESETS, changed
from tomesd.settings import Settings

ROOT = Path(__file__).parent.parent
SHEET, GALLERY = "images.jpg", "gallery.jpg"

# FID at r = 0.5 on Stable Diffusion, from the tables of the paper (Bolya & Hoffman 2023).
PAPER = {
    "partition": {"random in 2x2": 35.66, "strided 2x2": 36.12},
    "layers": {"self-attention": 33.73, "everything": 35.66},
    "levels": {"level 1": 33.29, "levels 1-4": 35.66},
    "schedule": {"60 to 40 %": 35.53, "flat 50 %": 35.66},
}
FULLY_RANDOM = 46.08

INTRODUCTION = """\
# Quality

What merging does to images. Every table and every sentence on a number is written from rows in
[benchmarks/results/quality.jsonl](../benchmarks/results/quality.jsonl) by
[scripts/update_quality.py](../scripts/update_quality.py), the bad results with the good.

**These are images of the embedded model, not of Stable Diffusion**: a small latent diffusion model
that draws one to four objects on a background, at 256 px. Its numbers tell which of two ways to
merge is better; how large the difference is on another model, they do not tell. `tomesd eval`
measures that.

- Image i of every row has held-out caption i and seed i, so rows differ by the merging alone.
- **PSNR**, **SSIM**, **LPIPS** (AlexNet): each image against the unmerged one of the same seed.
- **FID**, **KID**: the set of images against scenes composed as those of the training, of other
  held-out captions. **FID to unmerged**: against unmerged images of the same captions; each table
  says of which seeds. FID depends on the number of images: compare it within a table.
- **±** is half of the 95 % interval, over images.
- **Speed-up**: GPU time of the UNet's steps, with guidance, many images at a time, unmerged against
  merged, taking turns at every step, in eager mode. With PyTorch's fused attention; and unfused,
  as when the paper was written. Where one repeat took half as long again as another, something
  disturbed it, and no speed-up is given.
"""


class Document:
    """Collects sections; knows the rows."""

    def __init__(self, results: Path, figures: Path):
        if not results.is_file():
            raise SystemExit(f"{results}: no such file; benchmarks/quality.py makes it")
        rows = last_of_each(read_rows(results))
        if not rows:
            raise SystemExit(f"{results}: has no rows; benchmarks/quality.py makes them")
        self._timed = speeds(rows)
        self.rows = [with_speed(row, self._timed) for row in rows]
        self.figures = figures
        self.parts = [INTRODUCTION]

    def section(self, name: str) -> list[Row]:
        found = [row for row in self.rows if row["section"] == f"quality-{name}"]
        return sorted(found, key=lambda row: row.get("place", 0))

    def add(self, title: str, *parts: str, rows: list[Row] | None = None) -> None:
        self.parts += [f"## {title}\n", *(part.strip() + "\n" for part in parts if part)]
        if rows:
            others = [row for row in rows if row["section"] != "quality-search"]
            timed = [self._timed[key] for key in map(same_settings, others) if key in self._timed]
            self.parts.append(f"{versions([*rows, *timed])}.\n")

    def missing(self, title: str) -> None:
        self.add(title, "Not measured yet.")

    def text(self) -> str:
        return "\n".join(self.parts)


def filled(words: str) -> str:
    """A paragraph in lines of at most 100 characters."""
    return textwrap.fill(" ".join(words.split()), 100, break_long_words=False)


def images_of(rows: list[Row]) -> str:
    first = rows[0]
    solver = "PLMS" if first["scheduler"] == "plms" else "DDIM"
    counts = " or ".join(f"{n:,}" for n in dict.fromkeys(row["images"] for row in rows))
    return (
        f"{counts} images a row, {first['height']} px, {first['steps']} {solver} steps, guidance "
        f"{first['guidance']:g}"
    )


def how_made(rows: list[Row]) -> str:
    """Whether the model was compiled; of merged rows."""
    if all(row["mode"] == "compiled" for row in rows):
        return "For the images, the model is compiled."
    if any(row["mode"] != "eager" for row in rows):
        return (
            "For the images, the model is compiled in whole or in part, and so it is for the "
            "unmerged ones that they are compared with."
        )
    return ""


def which_seeds(rows: list[Row]) -> str:
    seeds = {row.get("unmerged_set") for row in rows} - {None}
    words = sorted(seed.replace("same", "the same") for seed in seeds)
    return f"FID to unmerged: of {listed(words)}." if seeds else ""


def paper(document: Document) -> None:
    title, rows = "The table of the paper", of_the_paper(document)
    merged = sorted(
        (row for row in rows if row["settings"]), key=lambda row: row["settings"]["ratio"]
    )
    if not merged:
        document.missing(title)
        return
    header = ["r %", "", "FID", "FID to unmerged", "KID x 1000", "PSNR", "SSIM", "LPIPS"]
    header += ["time, unfused", "memory, unfused", "speed-up, fused"]
    base = [row for row in rows if not row["settings"]]
    lines = [["0", "unmerged", *paper_cells(row, row), "1"] for row in base]
    for row in merged:
        first = [f"{100 * row['settings']['ratio']:.0f}", name_of(row)]
        cells = paper_cells(row, base[0] if base else {})
        lines.append([*first, *cells, value(row, "speedup", 2)])
    how = f"""
{images_of(rows)}; {rows[0].get("reference_scenes") or "no"} composed scenes. {which_seeds(merged)}
{how_made(merged)}
Both libraries at default settings, and merging everywhere they say, also where it does not pay.
Time is that of the UNet in a step with guidance, per image, and memory its peak beyond the weights,
both with unfused attention, as in the paper; in brackets, as a share of the unmerged model's. ± of
a speed-up is half of its range over repeats."""
    pictures = [f"![FID and LPIPS against the ratio]({plot_paper(rows, document.figures)})"]
    if (document.figures / SHEET).exists():
        pictures.append(
            f"![Some of the images, one line for each setting](figures/quality/{SHEET})"
        )
    table = markdown(header, lines)
    document.add(title, filled(how), table, filled(side_by_side(merged)), *pictures, rows=rows)


def of_the_paper(document: Document) -> list[Row]:
    """Rows of today's default; images that were made for another table count too."""
    rows = [row for row in document.section("paper") if not gave_up_evenly(row)]
    known = {same_settings(row) for row in rows}
    plain = [row for row in document.section("front") if set(row["settings"]) <= {"ratio", "when"}]
    tenths = {tenth / 10 for tenth in range(1, 7)}
    more = [row for row in plain if row["settings"].get("ratio") in tenths]
    return rows + [row for row in more if same_settings(row) not in known]


def score_cells(row: Row) -> list[str]:
    return [
        value(row, "fid", 2),
        value(row, "fid_unmerged", 2),
        value(row, "kid", 2, 1000),
        value(row, "psnr", 2),
        value(row, "ssim", 3),
        value(row, "lpips", 4),
    ]


def paper_cells(row: Row, base: Row) -> list[str]:
    return [
        *score_cells(row),
        share_of(row, "step_ms_unfused", "ms", 1 / row.get("speedup_unfused", 1.0)),
        share_of(row, "mib_unfused", "MiB", ratio_of(row, base, "mib_unfused")),
    ]


def share_of(row: Row, name: str, unit: str, share: float | None) -> str:
    """With its share of what the unmerged model takes."""
    if not has(row, name):
        return "-"
    text = f"{row[name]:.2f} {unit}" if unit == "ms" else f"{row[name]:.1f} {unit}"
    return text if share is None or not row["settings"] else f"{text} ({percent(share)})"


def ratio_of(row: Row, base: Row, name: str) -> float | None:
    return row[name] / base[name] if has(row, name) and base.get(name) else None


def side_by_side(rows: list[Row]) -> str:
    """In which ratios one library is clearly better."""
    pairs = {}
    for row in rows:
        pairs.setdefault(row["settings"]["ratio"], {})[row["variant"]] = row
    full = {r: pair for r, pair in pairs.items() if {"original", "tomesd"} <= pair.keys()}
    sentences = []
    for name, label in (("lpips", "LPIPS"), ("fid", "FID"), *SPEEDS.items()):
        known = {r: p for r, p in full.items() if all(has(row, name) for row in p.values())}
        mine = [r for r, p in known.items() if clearly_below(p["tomesd"], p["original"], name)]
        theirs = [r for r, p in known.items() if clearly_below(p["original"], p["tomesd"], name)]
        rest = [r for r in known if r not in mine and r not in theirs]
        word = "is lower"
        if name in SPEEDS:
            mine, theirs, word, label = theirs, mine, "is faster", f"speed with {label}"
        parts = [
            f"{words} at {listed(f'{100 * r:.0f} %' for r in ratios)}"
            for words, ratios in (
                (f"{OURS} {word}", mine),
                (f"{ORIGINAL} {word}", theirs),
                ("the intervals overlap", rest),
            )
            if ratios
        ]
        if parts:
            sentences.append(f"By {label}, {'; '.join(parts)}.")
    return " ".join(sentences)


def windows(document: Document) -> None:
    title = "Where tokens look for their like"
    near = by_place(document, 0.3, "paper", "front", "windows")
    if len(near) < 2:
        document.missing(title)
        return
    how = f"""
{images_of(list(near.values()))}. In the whole image, as in the paper, or in a window of 8x8 tokens,
which takes far fewer comparisons. In both, the most similar tokens of the image are merged. That
every window gives up the same share of its tokens was tried, and dropped."""
    parts = [filled(how), place_table("r = 0.3", near)]
    far = by_place(document, 0.75, "far")
    if far:
        how = f"""
At the cap, where every source has to merge, and on more tokens ({images_of(list(far.values()))}; a
size that the model was not trained for):"""
        parts += [filled(how), place_table("r = 0.75", far)]
    document.add(title, *parts, rows=[*near.values(), *far.values()])


def by_place(document: Document, ratio: float, *sections: str) -> dict[str, Row]:
    """The rows at a ratio that differ by where tokens look, by words for that."""
    rows = [row for name in sections for row in document.section(name)]
    rows = [row for row in rows if row["settings"].get("ratio") == ratio]
    places = {words: row for row in rows if (words := where_it_looks(row)) is not None}
    return dict(sorted(places.items()))


def place_table(first: str, places: dict[str, Row]) -> str:
    header = [first, "FID", "FID to unmerged", "KID x 1000", "PSNR", "SSIM", "LPIPS"]
    return markdown(header, [[words, *score_cells(row)] for words, row in places.items()])


def where_it_looks(row: Row) -> str | None:
    if row["variant"] == "original":
        return ORIGINAL
    if set(row["settings"]) - {"ratio", "when", "window"}:
        return None
    side = row["settings"].get("window", 8)
    words = f"windows of {side}x{side}" if side else "the whole image"
    return f"{words}, the same share of each" if gave_up_evenly(row) else words


def ablations(document: Document) -> None:
    title, rows = "The ablations of the paper", document.section("ablations")
    rows = [row for row in rows if row["settings"]]
    if not rows:
        document.missing(title)
        return
    parts = [
        filled(f"""
{images_of(rows)}, r = 0.5. Each starts from what the paper starts from: all layers and all levels
are merged, with random destinations in 2x2 cells, and the whole image is searched. The paper's FIDs
are of Stable Diffusion: only their order can be compared. Destinations drawn anywhere (the paper:
{FULLY_RANDOM}) cannot be had here, as every cell has one; long cells stand for them.
{which_seeds(rows)} {how_made(rows)}""")
    ]
    for group, theirs in PAPER.items():
        found = [row for row in rows if row["setting"] == group]
        if found:
            header = [group, "paper: FID", "FID", "FID to unmerged", "LPIPS", "PSNR"]
            lines = [
                [
                    row["label"],
                    f"{theirs[row['label']]:.2f}" if row["label"] in theirs else "-",
                    value(row, "fid", 2),
                    value(row, "fid_unmerged", 2),
                    value(row, "lpips", 4),
                    value(row, "psnr", 2),
                ]
                for row in found
            ]
            parts += [markdown(header, lines), filled(compared_order(found, theirs))]
    document.add(title, *parts, rows=rows)


def compared_order(rows: list[Row], theirs: dict[str, float]) -> str:
    """Whether the rows that the paper has are in its order, and how sure that is."""
    by_label = {row["label"]: row for row in rows}
    order = [
        by_label[label] for label in sorted(theirs, key=theirs.__getitem__) if label in by_label
    ]
    if len(order) < 2:
        return "The rows of the paper are not measured yet."
    sentences = []
    for name, label in (("fid", "FID"), ("lpips", "LPIPS")):
        if not all(has(row, name) for row in order):
            continue
        pairs = list(itertools.pairwise(order))
        same = all(a[name] < b[name] for a, b in pairs)
        clear = all(clearly_below(a, b, name) or clearly_below(b, a, name) for a, b in pairs)
        sure = "" if clear else ", but the intervals overlap"
        words = "the same order as" if same else "not the order of"
        sentences.append(f"By {label}: **{words} the paper**{sure}.")
    return " ".join(sentences)


def seed(document: Document) -> None:
    title, rows = "K-means, similarity to the mean, a noise threshold", document.section("seed")
    rows = [row for row in rows if row["settings"]]
    if not rows:
        document.missing(title)
        return
    known = [row for row in rows if row["setting"] == "paper"]
    header = ["", "LPIPS", "PSNR", "FID"]
    for name in SPEEDS.values():
        header += [f"speed-up, {name.split()[0]}", "at equal time"]
    lines = []
    found: dict[str, list[str]] = {speed: [] for speed in SPEEDS}
    for row in rows:
        line = [row["label"], value(row, "lpips", 4), value(row, "psnr", 2), value(row, "fid", 2)]
        for speed in SPEEDS:
            words = "-" if row["setting"] == "paper" else verdict(row, known, speed)
            found[speed].append(words.split(":")[0])
            line += [times(row.get(speed)), words]
        lines.append(line)
    how = f"""
{images_of(rows)}. A summary of the paper describes another algorithm: clusters from
k-means, similarity to the mean token of the image, and merging only below a noise level at which 40
% of the steps lie. All are options here (`selector="kmeans"`, `metric="mean"`, `tau`), and are
compared with the paper's (`bipartite`, `input`) at equal measured time: with the LPIPS that it has
at the same speed-up, between its rows on a straight line (unmerged: speed-up 1, LPIPS 0), or at a
higher one if that is lower. {how_made(rows)}"""
    document.add(title, filled(how), markdown(header, lines), filled(counted(found)), rows=rows)


def counted(found: dict[str, list[str]]) -> str:
    """How many of the variants are better, worse and so on."""
    sentences = []
    for speed, name in SPEEDS.items():
        kinds = [kind for kind in found[speed] if kind != "-"]
        if kinds:
            parts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
            sentences.append(f"With {name}, of {len(kinds)} variants: {', '.join(parts)}.")
    return " ".join(sentences)


UNMERGED = {"lpips": 0.0, "lpips_low": 0.0, "lpips_high": 0.0, **dict.fromkeys(SPEEDS, 1.0)}


def as_fast(row: Row, known: list[Row], speed: str) -> Row | None:
    """The lowest LPIPS that `known` has at the speed of `row` or above, with its interval."""
    points = [k for k in known if has(k, speed, "lpips", "lpips_low", "lpips_high")]
    points = [UNMERGED, *sorted(points, key=lambda k: k["settings"]["ratio"])]
    found = [k for k in points if k[speed] >= row[speed]]
    for a, b in itertools.pairwise(points):
        if a[speed] != b[speed] and 0 <= (way := along(row[speed], a[speed], b[speed])) <= 1:
            names = ("lpips", "lpips_low", "lpips_high")
            found.append({name: a[name] + way * (b[name] - a[name]) for name in names})
    return min(found, key=lambda k: k["lpips"], default=None)


def along(x: float, first: float, last: float) -> float:
    return (x - first) / (last - first)


def verdict(row: Row, known: list[Row], speed: str) -> str:
    if not has(row, speed, "lpips"):
        return "-"
    if row[speed] <= 1:
        return "no gain"
    rival = as_fast(row, known, speed)
    if rival is None:
        return "faster than all of the paper's"
    words = "no clear difference"
    if clearly_below(row, rival, "lpips"):
        words = "better"
    elif clearly_below(rival, row, "lpips"):
        words = "worse"
    return f"{words}: the paper's has {value(rival, 'lpips', 4)}"


def front(document: Document) -> None:
    title, rows = "Quality against speed", document.section("front")
    base = [row for row in rows if not row["settings"]]
    rows = [row for row in rows if row["settings"]]
    rows.sort(key=lambda row: (row["variant"] != "original", row.get("lpips", 0.0)))
    if not any(row.get(speed) for row in rows for speed in SPEEDS):
        document.missing(title)
        return
    header = ["", "LPIPS", "PSNR", "FID", "FID to unmerged", "KID x 1000", "speed-up", "unfused"]
    lines = [
        [
            f"{ORIGINAL}: {original_setting(row)}"
            if row["variant"] == "original"
            else row["label"],
            value(row, "lpips", 4),
            value(row, "psnr", 2),
            value(row, "fid", 2),
            value(row, "fid_unmerged", 2),
            value(row, "kid", 2, 1000),
            *(times(row.get(name)) for name in SPEEDS),
        ]
        for row in rows
    ]
    for row in base:
        scores = [value(row, n, 2, s) for n, s in (("fid", 1), ("fid_unmerged", 1), ("kid", 1000))]
        lines.insert(0, ["unmerged", "0", "-", *scores, "1", "1"])
    how = f"{images_of(rows)}. Everything: all layers, levels 1 to 4. {which_seeds(rows)}"
    how += f" {how_made(rows)}"
    parts = [filled(how)]
    parts.append(markdown(header, lines))
    for speed, name in SPEEDS.items():
        parts += statement(rows, speed, name)
    parts += presets(rows)
    parts.append(f"![LPIPS and FID against speed-up]({plot_front(rows, document.figures)})")
    document.add(title, *parts, rows=rows)


def statement(
    rows: list[Row], speed: str, name: str, scores: tuple[str, ...] = ("lpips", "fid")
) -> list[str]:
    """Of each of the original's rows, whether a row of ours beats it in all scores."""
    theirs = [row for row in rows if row["variant"] == "original" and has(row, speed, "lpips")]
    mine = [row for row in rows if row["variant"] == "tomesd" and has(row, speed, "lpips")]
    if not theirs or not mine:
        return []
    slower = [row for row in theirs if row[speed] <= 1]
    judged = [(row, judge(row, mine, speed, scores)) for row in theirs if row[speed] > 1]
    beaten = sum(words.startswith("beaten") for _, words in judged)
    if not judged:
        settings = f"in {len(slower)} setting{'s' if len(slower) > 1 else ''}"
        every = (
            f"it never makes the model faster, {settings}: the unmerged one is as fast, and better."
        )
    else:
        reached = (
            "every speed-up" if beaten == len(judged) else f"{beaten} of {len(judged)} speed-ups"
        )
        every = f"""at {reached} that it reaches, a setting of {OURS} is at least as fast with lower
{listed(map(str.upper, scores))}, and no intervals overlap."""
    if judged and slower:
        every += f" It does not make the model faster at {listed(map(original_setting, slower))}."
    intro = filled(f"**With {name}**, compared with {ORIGINAL}: {every}")
    lines = [f"- {original_setting(row)}: {words}" for row, words in judged]
    return [intro, "\n".join(lines)] if lines else [intro]


def original_setting(row: Row) -> str:
    return row["label"].removeprefix("0.1.3 ")


def judge(row: Row, mine: list[Row], speed: str, scores: tuple[str, ...]) -> str:
    """What ours do where the original has `row`."""
    where = f"{times(row[speed])}, LPIPS {value(row, 'lpips', 4)}"
    fast = [r for r in mine if r[speed] >= row[speed]]
    closer = [r for r in mine if r["lpips"] <= row["lpips"]]
    both = [r for r in fast if all(clearly_below(r, row, name) for name in scores)]
    fastest = max(closer, key=lambda r: r[speed], default=None)
    gain = "none of ours has its LPIPS"
    if fastest is not None:
        gain = f"at no more than its LPIPS, ours reach {times(fastest[speed])} ({fastest['label']})"
    if both:
        best = min(both, key=lambda r: r["lpips"])
        return f"beaten ({where}) by {best['label']}, LPIPS {value(best, 'lpips', 4)}; {gain}"
    if not fast:
        return f"not reached ({where}): none of ours is as fast; {gain}"
    best = min(fast, key=lambda r: r["lpips"])
    found = [
        f"{n.upper()} {'lower' if clearly_below(best, row, n) else 'not clearly lower'}"
        for n in scores
    ]
    return f"not clearly beaten ({where}): {best['label']} has {listed(found)}; {gain}"


EVENLY = """ They are of the time when every window gave up the same share of its tokens, which has
been dropped since."""


def searched(document: Document) -> None:
    title, rows = "The search", document.section("search")
    rows = [row for row in rows if row["settings"] and has(row, "lpips", "speedup")]
    if not rows:
        document.missing(title)
        return
    parts = [
        filled(f"""
{images_of(rows)}, {len(rows)} settings, of which the tables show those that no other is both faster
and closer than.{EVENLY if any(map(gave_up_evenly, rows)) else ""}""")
    ]
    for speed, name in SPEEDS.items():
        lines = []
        for row in pareto(rows, speed):
            scores = [value(row, "lpips", 4), value(row, "psnr", 2)]
            lines.append([name_of(row), row["label"], times(row[speed]), *scores])
        parts.append(markdown([name, "settings", "speed-up", "LPIPS", "PSNR"], lines))
        parts += statement(rows, speed, name, scores=("lpips",))
    parts.append(f"![LPIPS against speed-up]({plot_search(rows, document.figures)})")
    document.add(title, *parts, rows=rows)


def presets(rows: list[Row]) -> list[str]:
    """The presets, from the rows that have their settings."""
    lines = []
    for name, options in PRESETS.items():
        same = changed(Settings(**options))
        for row in rows:
            if row["variant"] == "tomesd" and changed_in(row) == same:
                speed = [times(row.get(speed)) for speed in SPEEDS]
                settings = ", ".join(f"`{key}={value!r}`" for key, value in options.items())
                scores = [value(row, "lpips", 4), value(row, "fid", 2)]
                lines.append([f"`{name}`", settings, *speed, *scores])
    if not lines:
        return []
    words = """
The presets of `apply_patch(model, preset=...)` are taken from here. A model of this size at 256 px
leaves little to gain with fused attention; docs/performance.md has larger ones."""
    speeds = [f"speed-up, {name}" for name in SPEEDS.values()]
    header = ["preset", "settings", *speeds, "LPIPS", "FID"]
    return [filled(words), markdown(header, lines)]


def changed_in(row: Row) -> dict[str, Any]:
    """The options of a row that are not the defaults."""
    options = {key: value for key, value in row["settings"].items() if key != "when"}
    if isinstance(options.get("level_ratios"), dict):
        options["level_ratios"] = {int(k): r for k, r in options["level_ratios"].items()}
    return changed(Settings(**options))


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
    import tempfile

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
