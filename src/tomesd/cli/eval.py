"""tomesd eval: what merging costs, and what it does to images."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from .. import evaluation
from ..evaluation import Result
from ..evaluation.results import labels_of, metrics_in
from ..generation.loading import denoiser
from .options import MergeOptions, ModelOptions, PromptOptions, SamplingOptions
from .progress import progress_bar


@dataclass(frozen=True)
class Eval:
    """Make the same images with and without merging, many of them, and measure how they differ.

    An interrupted run goes on when the same command is given again. Several GPUs:
    accelerate launch -m tomesd eval ...
    """

    out: Path = Path("evaluation")
    """Folder of the run."""
    ratios: tuple[float, ...] | None = None
    """Shares of the tokens to remove: 0.25, 0.5 and 0.75 if not given, or with --settings or
    --preset what these say."""
    vary: tuple[str, ...] = ()
    """Other settings to try, in all combinations: NAME=VALUE,VALUE ... as in
    --vary max_downsample=1,2 use_rand=true,false"""
    original: Path | None = None
    """Folder of tomesd 0.1.3, to compare with."""
    batch: int = 8
    """Images made at a time."""
    reference: Path | None = None
    """Folder of real images for FID and KID. Both are always measured to the unmerged images."""
    lpips: Literal["alex", "vgg", "none"] = "alex"
    """Network of LPIPS."""
    lpips_weights: Path | None = None
    """A file instead of the installed weights of LPIPS."""
    inception: Path | None = None
    """A TorchScript file instead of the installed Inception network."""
    sets: bool = True
    """Measure FID and KID."""
    clip: Path | None = None
    """Folder of a CLIP model, to measure how well images follow their prompts."""
    extend: bool = False
    """Add settings to a run that was started without them."""
    prompt: PromptOptions = field(default_factory=PromptOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    merge: MergeOptions = field(default_factory=MergeOptions)

    def run(self, console: Console) -> None:
        processes = evaluation.Processes(self.model.device)
        if not processes.is_main:
            console = Console(quiet=True)
        original = None if self.original is None else evaluation.load_original(self.original)
        variants, items = self._variants(original), self.prompt.items()
        reference = None if self.reference is None else evaluation.Reference.of(self.reference)
        console.print(f"Loading the model ({self.model.model})")
        pipe = replace(self.model, device=processes.device(self.model.device)).load()
        definition = evaluation.define(
            pipe,
            model={key: value for key, value in asdict(self.model).items() if key != "device"},
            prompts=self.prompt.prompts,
            items=items,
            variants=variants,
            batch=self.batch,
            **self.sampling.arguments(),
        )
        judges = self._judges(denoiser(pipe).device)
        suffix = "" if processes.count == 1 else f" (1 of {processes.count} processes)"
        try:
            with progress_bar(console, suffix) as on_progress:
                results = evaluation.evaluate(
                    pipe,
                    evaluation.Run(self.out),
                    definition,
                    judges,
                    reference=reference,
                    original=original,
                    processes=processes,
                    extend=self.extend,
                    on_progress=on_progress,
                )
        except KeyboardInterrupt:
            console.print(f"What is made is in {self.out}. The same command goes on with it.")
            raise
        if processes.is_main:
            _print(console, results, self.out)
        processes.close()

    def _variants(self, original: ModuleType | None) -> list[evaluation.Variant]:
        merge = self.merge.checked()
        if "ratio" in self.merge.given():
            raise ValueError(f"ratio={merge.ratio:g}: an evaluation takes --ratios")
        ratios = self.ratios
        if ratios is None:
            ratios = (merge.ratio,) if self.merge.base() else (0.25, 0.5, 0.75)
        vary = evaluation.parse_vary(self.vary)
        return evaluation.make_variants(ratios, merge, vary, original)

    def _judges(self, device: Any) -> evaluation.Judges:
        return evaluation.Judges.load(
            device,
            inception=(self.inception or True) if self.sets else None,
            lpips=None if self.lpips == "none" else self.lpips,
            lpips_weights=self.lpips_weights,
            clip=self.clip,
        )


def _print(console: Console, results: Sequence[Result], out: Path) -> None:
    for table in _tables(results):
        console.print(table, soft_wrap=False)
    console.print("± is half the width of the 95 % confidence interval.")
    flagged = sum(result.flagged for result in results)
    if flagged:
        console.print(f"{flagged} images were blacked out by the safety checker, and distort this.")
    console.print(f"{out}: images and numbers. For a page with pictures: tomesd report {out}")


def _tables(results: Sequence[Result]) -> list[Table]:
    labels = labels_of(results)
    tables = []
    for title, of_sets in (("Sets of images", True), ("Single images", False)):
        shown = [m for m in metrics_in(results) if (m.distance is not None) == of_sets]
        if shown:
            table = _table(title, *(f"{metric.title} {metric.arrow}" for metric in shown))
            for result in results:
                numbers = (metric.with_margin(result.metrics) for metric in shown)
                table.add_row(labels[result.variant.name], *numbers)
            tables.append(table)
    cost = _table("Cost", "s / image", "speed-up", "MiB / image")
    for result in results:
        seconds = "-" if result.seconds is None else f"{result.seconds:.3f}"
        speedup = "-" if result.speedup is None else f"{result.speedup.value:.2f}x"
        memory = "-" if result.peak_mib is None else f"{result.peak_mib:.0f}"
        cost.add_row(labels[result.variant.name], seconds, speedup, memory)
    return [*tables, cost]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    return table
