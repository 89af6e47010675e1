"""The variants of a summary of the paper, at equal time."""

import itertools

from tomesd.bench.rows import Row
from tomesd.bench.tables import markdown, times

from .document import Document, filled, how_made, images_of
from .rows import SPEEDS, clearly_below, has, value


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
