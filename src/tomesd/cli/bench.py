"""tomesd bench: seconds and memory, with and without merging."""

import re
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from ..bench import ARCHITECTURES, Case, Contender, Effort, RowFile, load_original, run_cases
from ..bench.modes import Mode
from ..bench.plots import plot_rows
from ..bench.rows import Row
from ..bench.tables import HEADER, failures, markdown, result_table, split_common, versions
from ..files import write_text
from ..generation.loading import DEMO_MODEL, EMBEDDED, Dtype, pick_device
from ..settings import Settings
from .options import MergeOptions
from .progress import progress_bar

_SMALLEST, _MULTIPLE = 64, 8


@dataclass(frozen=True)
class Bench:
    """Measure seconds and memory with and without merging. Every combination of --model, --sizes,
    --images, --attention and --mode is a setting; in each, all that is compared takes turns."""

    model: tuple[str, ...] = (DEMO_MODEL,)
    """`sd15`, `sd21`, `sdxl`: these architectures with random weights, nothing to download. `unet`
    or `transformer` for an embedded model, or a folder, a file or a hub id."""
    sizes: tuple[str, ...] = ()
    """Side of the image in pixels, or width and height as 768x512. The model's own if not given."""
    images: tuple[int, ...] = (1,)
    """Images at a time. A step runs on twice as many, with guidance."""
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Shares of the tokens to remove."""
    attention: tuple[str, ...] = ("default",)
    """default, eager, sdpa, xformers, or attention backends of diffusers by name."""
    mode: tuple[Mode, ...] = ("eager",)
    """eager; compiled, in one of the modes of torch.compile; or replayed as a CUDA graph."""
    what: Literal["step", "pipeline"] = "step"
    """One step of the denoising model, or whole images with scheduler and decoder."""
    steps: int = 20
    """Steps of a whole image."""
    original: Path | None = None
    """Compare with tomesd 0.1.3 in this folder: pip install --no-deps --target FOLDER
    tomesd==0.1.3"""
    bound: bool = True
    """Measure also what merging would take if nothing had to be matched."""
    seconds: float = 10.0
    """Time to measure each setting for, once all is warm. More: less noise."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda, cuda:1, mps."""
    dtype: Dtype = "auto"
    """Precision. auto: float16 on a GPU, float32 on a CPU."""
    out: Path = Path("bench_output")
    """Folder for the rows, the table and the plot. Rows are added to those that are there."""
    resume: bool = False
    """Go on with the last run in the folder: what it has measured is not measured again."""
    merge: MergeOptions = field(default_factory=MergeOptions)

    def run(self, console: Console) -> None:
        cases = self._cases(self.merge.checked())
        device = pick_device(self.device)
        effort = Effort(seconds=self.seconds, min_repeats=3)
        file = RowFile(self.out / "rows.jsonl", device, resume=self.resume)
        total = sum(len(case.contenders) * (1 + effort.min_repeats) for case in cases)
        seen: list[Case] = []
        try:
            with progress_bar(console) as on_progress:

                def on_case(case: Case) -> None:
                    seen.append(case)
                    on_progress(_words(case), len(seen), max(total, len(seen) + 1))

                rows = run_cases(cases, file, effort, on_progress=on_case)
        except KeyboardInterrupt:
            console.print(f"{len(file.rows)} rows are in {file.path}; --resume goes on from there")
            raise
        self._report(console, rows, file.path)

    def _cases(self, merge: Settings) -> list[Case]:
        if self.original is not None:
            load_original(self.original)  # refuse a wrong folder before the work begins
        axes = product(self.model, self.images, self.attention, self.mode)
        cases = [
            Case(
                model=model,
                height=height,
                width=width,
                contenders=self._contenders(merge, mode),
                images=images,
                what=self.what,
                steps=self.steps,
                device=self.device,
                dtype=self.dtype,
                attention=attention,
                mode=mode,
            )
            for model, images, attention, mode in axes
            for width, height in map(_parse_size, self.sizes or (_own_size(model),))
        ]
        if not cases:
            raise ValueError("nothing to measure: model, images, attention and mode need values")
        return cases

    def _contenders(self, merge: Settings, mode: str) -> tuple[Contender, ...]:
        contenders = [Contender("unpatched")]
        for ratio in self.ratios:
            settings = replace(merge, ratio=ratio)
            contenders.append(Contender("tomesd", settings))
            if self.original is not None:
                # Its random numbers cannot be drawn inside a CUDA graph.
                use_rand = merge.use_rand and mode != "graph"
                original = replace(settings, use_rand=use_rand)
                contenders.append(Contender("original", original, folder=str(self.original)))
            if self.bound:
                contenders.append(Contender("free", replace(settings, when="always")))
        return tuple(contenders)

    def _report(self, console: Console, rows: list[Row], path: Path) -> None:
        always = ("variant", "ratio", "ms", "speed-up")
        common, header, lines = split_common(HEADER, result_table(rows), always)
        table = Table(*header)
        for line in lines:
            table.add_row(*line)
        said = (f"{name}: {value}" for name, value in common.items() if value != "-")
        notes = [", ".join(said), versions(rows)]
        notes += failures(rows)
        if self.bound:
            notes.append(
                "free: the same without matching, the bound; recovered: the share of what the "
                "bound saves that is saved"
            )
        console.print(table, soft_wrap=False)
        for note in notes:
            console.print(note)
        document, picture = path.with_name("results.md"), path.with_name("results.png")
        text = [markdown(header, lines), *notes]
        write_text(document, "\n\n".join(text) + "\n")
        plot_rows(rows, picture)
        for written, words in ((path, "the rows"), (document, "the table"), (picture, "a plot")):
            console.print(f"  {written}  {words}")


def _own_size(model: str) -> str:
    if model in ARCHITECTURES:
        return str(8 * ARCHITECTURES[model]["sample_size"])
    return "256" if model in EMBEDDED else "512"


def _parse_size(words: str) -> tuple[int, int]:
    """Width and height."""
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", words)
    sides = [int(side) for side in found.groups() if side] if found else []
    if not sides or any(side < _SMALLEST or side % _MULTIPLE for side in sides):
        raise ValueError(
            f"sizes={words!r}: must be a number of pixels, or two as in 768x512; each a multiple "
            f"of {_MULTIPLE} and at least {_SMALLEST}"
        )
    return sides[0], sides[-1]


def _words(case: Case) -> str:
    return f"{case.model} {case.width}x{case.height}, {case.images} images, {case.mode}"
