"""What matching takes, and what cheaper matching does to images."""

from tomesd.bench.tables import markdown, percent, versions

from .document import ORIGINAL, OURS, Document, gained, mib, ms, wrapped
from .figures import plot_matching


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
