"""What the paper measured: its table, where tokens look for their like, its ablations."""

import itertools

from tomesd.bench.rows import Row
from tomesd.bench.tables import markdown, percent

from .document import Document, filled, how_made, images_of, which_seeds
from .figures import plot_paper
from .rows import (
    ORIGINAL,
    OURS,
    SPEEDS,
    clearly_below,
    gave_up_evenly,
    has,
    listed,
    name_of,
    same_settings,
    value,
)

SHEET = "images.jpg"

# FID at r = 0.5 on Stable Diffusion, from the tables of the paper (Bolya & Hoffman 2023).
PAPER = {
    "partition": {"random in 2x2": 35.66, "strided 2x2": 36.12},
    "layers": {"self-attention": 33.73, "everything": 35.66},
    "levels": {"level 1": 33.29, "levels 1-4": 35.66},
    "schedule": {"60 to 40 %": 35.53, "flat 50 %": 35.66},
}


FULLY_RANDOM = 46.08


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
