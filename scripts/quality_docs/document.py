"""The document while it is written, and what several of its sections say."""

import textwrap
from pathlib import Path

from tomesd.bench.rows import Row, read_rows
from tomesd.bench.tables import versions

from .rows import last_of_each, listed, same_settings, speeds, with_speed

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
  disturbed it, and no speed-up is given. That cannot be told where the ratio changes on the way.
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
