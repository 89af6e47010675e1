"""Time and memory by ratio, resolution and number of images."""

from tomesd.bench.rows import Row
from tomesd.bench.tables import Comparison, markdown, times
from tomesd.presets import PRESETS

from .document import EVERY_BLOCK, KEPT, ORIGINAL, OURS, Document, gained, mib, ms, spread, title_of

STEPS = 50  # of the images in the paper


def paper(document: Document) -> None:
    found = document.settings("paper")
    if not found:
        return
    words = f"""
The table of the original's README: Stable Diffusion 1.5 at 512 px, attention that is not fused, r
from 10 to 60 %. Time of the UNet for {STEPS} steps, and memory, both per image, of
{found[0].first["images"]} images at a time, in eager mode at default settings; in brackets, how
many times as fast as unpatched, and how much of its memory."""
    document.add("The table of the paper", words, paper_table(found), found)


def paper_table(found: list[Comparison]) -> str:
    """Time and memory per image by ratio, of the original and of this library."""
    lines = []
    for one in found:
        lines.append(["unpatched", *per_image(one, one.find("unpatched")), "-", "-"])
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
    return markdown(header, lines)


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


def left_alone(found: Comparison) -> bool:
    """Whether nothing was merged, as that would not be faster; in eager mode."""
    ours = found.find("tomesd")
    return ours is not None and bool(ours.get("left_alone"))


def merged(found: Comparison) -> bool:
    """Whether it is known that something was merged."""
    ours = found.find("tomesd")
    return ours is not None and ours.get("left_alone") is False


def cost(found: Comparison) -> float:
    """The share of a step that the patch adds."""
    return (found.seconds("tomesd") or 0) / (found.seconds("unpatched") or 1) - 1


def from_to(found: Comparison) -> str:
    base, ours = found.find("unpatched"), found.find("tomesd")
    spreads = f"spreads {spread(base)} and {spread(ours)} ms"
    return f"{title_of(found)}, {ms(base)} to {ms(ours)} ms ({spreads})"


def pipelines(document: Document) -> None:
    found = document.settings("pipelines")
    if not found:
        return
    kinds = ("unpatched", "original", "tomesd")
    lines = [
        [one.first["setting"], *(gained(one, one.find(kind), spreads=True) for kind in kinds)]
        for one in found
    ]
    words = """
Milliseconds for one image, with scheduler and decoder, eager, at default settings; ± is the spread.
Where the model was left alone, what differs is noise, and what is left of the patch."""
    header = ["setting", "unpatched", ORIGINAL, OURS]
    document.add("Whole images", words, markdown(header, lines), found)


def presets(document: Document) -> None:
    found = document.settings("presets")
    if not found:
        return
    labels = ["default", *PRESETS]
    lines = [
        [
            title_of(one),
            ms(one.find("unpatched")),
            *(gained(one, one.find(label)) for label in labels),
        ]
        for one in found
    ]
    words = f"""
Milliseconds for images in {found[0].first["steps"]} steps, with scheduler and decoder, eager, with
fused attention. What the presets do to images: [quality](quality.md).{fastest_words(found)}"""
    document.add("Presets", words, markdown(["setting", "unpatched", *labels], lines), found)


def fastest_words(found: list[Comparison]) -> str:
    """Where another preset is the fastest than the one that is called so."""
    others: dict[str, list[str]] = {}
    for one in found:
        rows = [row for name in PRESETS if (row := one.find(name)) and row["seconds"]]
        fastest = min(rows, key=lambda row: row["seconds"], default=None)
        if fastest and fastest["label"] != "fast" and not fastest.get("left_alone"):
            others.setdefault(fastest["label"], []).append(title_of(one))
    return "".join(
        f" In {' and '.join(titles)}, `{label}` is faster than `fast`."
        for label, titles in others.items()
    )


def memory(document: Document) -> None:
    found = document.settings("eager") or document.settings("graph")
    if not found:
        return
    labels = ("unpatched", "original", KEPT, EVERY_BLOCK)
    lines = [[one.first["setting"], *(mib(one.find(label)) for label in labels)] for one in found]
    header = ["setting", "unpatched", ORIGINAL, KEPT, EVERY_BLOCK]
    words = f"""
Peak memory of a step beyond the weights, in MiB, with fused attention. PyTorch does not divide a
block of memory where less than 1 MiB would be left; differences below that
may be no more than that.
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
