"""tomesd bench: seconds and memory, with and without merging."""

from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table

from ..choices import DEMO_MODEL, EMBEDDED, Dtype, Mode
from ..files import check_writable, write_text
from ..settings import Settings
from .options import RatiosOptions, Size, parse_size, warn_of_dtype
from .screen import about, progress_bar

if TYPE_CHECKING:
    from ..bench import Case, Contender
    from ..bench.rows import Row


@dataclass(frozen=True)
class Bench:
    """Measure seconds and memory with and without merging. Every combination of model, size,
    images, attention and mode is a setting; in each, all that is compared takes turns."""

    model: tuple[str, ...] = (DEMO_MODEL,)
    """`sd15`, `sd21`, `sdxl`: these architectures with random weights, nothing to download. `unet`
    or `transformer` for an embedded model, or a folder, a file or a hub id."""
    sizes: tuple[str, ...] = ()
    """Pixels: sides of squares, or width x height as in 768x512. The model's own if not given."""
    images: tuple[int, ...] = (1,)
    """Images at a time. A step runs on twice as many, with guidance."""
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
    bound: bool = False
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
    merge: RatiosOptions = field(default_factory=RatiosOptions)

    def run(self, console: Console) -> None:
        self.merge.check()
        sizes = [self._parse_size(words) for words in self.sizes]
        check_writable(self.out, folder=True)
        from ..bench import Effort, RowFile, run_cases
        from ..generation.loading import pick_device

        cases = self._cases(sizes)
        device = pick_device(self.device)
        warn_of_dtype(self.dtype, device.type)
        effort = Effort(seconds=self.seconds, min_repeats=3)
        file = RowFile(self.out / "rows.jsonl", device, resume=self.resume)
        try:
            with progress_bar(console) as on_progress:

                def on_case(case: "Case", share: float) -> None:
                    done = next(n for n, other in enumerate(cases) if other is case)
                    on_progress(_words(case), done + share, len(cases))

                def on_first(case: "Case", seconds: float) -> None:
                    whole = about(effort.least(len(case.contenders), seconds))
                    told = f"one call takes {seconds:.2g} s, the whole {whole}"
                    console.print(f"{_words(case)}: {told}")

                console.print(f"Loading the model ({', '.join(self.model)})")
                rows = run_cases(cases, file, effort, on_progress=on_case, on_first=on_first)
        except KeyboardInterrupt:
            console.print(f"{len(file.rows)} rows are in {file.path}; --resume goes on from there")
            raise
        self._report(console, rows, file.path)

    def _parse_size(self, words: str) -> Size:
        try:
            return parse_size([words])
        except ValueError as error:
            raise ValueError(f"sizes={words!r}: {error}") from error

    def _settings(self, model: str) -> list[Settings]:
        """What to measure on a model. Where a preset depends on the model, it is loaded."""
        from ..bench import ARCHITECTURES
        from ..generation.loading import load_pipeline, preset_traits

        if self.merge.preset is None or model in ARCHITECTURES:
            return self.merge.each()
        return self.merge.each(**preset_traits(load_pipeline(model, device="cpu")))

    def _cases(self, sizes: list[Size]) -> "list[Case]":
        from ..bench import Case, load_original

        if self.original is not None:
            load_original(self.original)  # refuse a wrong folder before the work begins
        axes = product(self.model, self.images, self.attention, self.mode)
        each = {model: self._settings(model) for model in self.model}
        cases = [
            Case(
                model=model,
                height=height,
                width=width,
                contenders=self._contenders(each[model], mode),
                images=images,
                what=self.what,
                steps=self.steps,
                device=self.device,
                dtype=self.dtype,
                attention=attention,
                mode=mode,
            )
            for model, images, attention, mode in axes
            for width, height in sizes or (_own_size(model),)
        ]
        if not cases:
            raise ValueError("nothing to measure: model, images, attention and mode need values")
        return cases

    def _contenders(self, each: list[Settings], mode: str) -> "tuple[Contender, ...]":
        from ..bench import Contender

        contenders = [Contender("unpatched")]
        for settings in each:
            contenders.append(Contender("tomesd", settings))
            if self.original is not None:
                # Its random numbers cannot be drawn inside a CUDA graph.
                use_rand = settings.use_rand and mode != "graph"
                original = replace(settings, use_rand=use_rand)
                contenders.append(Contender("original", original, folder=str(self.original)))
            if self.bound:
                contenders.append(Contender("free", replace(settings, when="always")))
        return tuple(contenders)

    def _report(self, console: Console, rows: "list[Row]", path: Path) -> None:
        from ..bench.plots import plot_rows
        from ..bench.tables import HEADER, failures, markdown, result_table, split_common, versions

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
        used = [row["settings"] or {} for row in rows]
        if self.what == "step" and any(one.get("reuse") or one.get("coarse") for one in used):
            notes.append(
                "the steps of an image differ with reuse and coarse, and these are the first of "
                "many: --what pipeline measures whole images"
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


def _own_size(model: str) -> Size:
    from ..bench import ARCHITECTURES

    side = 256 if model in EMBEDDED else 512
    if model in ARCHITECTURES:
        side = 8 * ARCHITECTURES[model]["sample_size"]
    return side, side


def _words(case: "Case") -> str:
    return f"{case.model} {case.width}x{case.height}, {case.images} images, {case.mode}"
