"""tomesd eval: what merging costs, and what it does to images."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table

from ..files import check_writable
from .options import ModelOptions, PromptOptions, RatiosOptions, SamplingOptions
from .screen import about, number_table, progress_bar

if TYPE_CHECKING:
    from ..evaluation import Result


@dataclass(frozen=True)
class Eval:
    """Make the same images with and without merging, many of them, and measure how they differ.

    An interrupted run goes on when the same command is given again. Several GPUs:
    accelerate launch -m tomesd eval ...
    """

    out: Path = Path("evaluation")
    """Folder of the run."""
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
    merge: RatiosOptions = field(default_factory=RatiosOptions)

    def run(self, console: Console) -> None:
        self.merge.check()
        check_writable(self.out, folder=True)
        from .. import evaluation
        from ..generation.loading import denoiser, preset_traits

        processes = evaluation.Processes(self.model.device)
        if not processes.is_main:
            console = Console(quiet=True)
        original = None if self.original is None else evaluation.load_original(self.original)
        items = self.prompt.items()
        reference = None if self.reference is None else evaluation.Reference.of(self.reference)
        console.print(f"Loading the model ({self.model.model})")
        pipe = replace(self.model, device=processes.device(self.model.device)).load()
        each = self.merge.each(**preset_traits(pipe))
        ratios = [settings.ratio for settings in each]
        vary = evaluation.parse_vary(self.vary)
        definition = evaluation.define(
            pipe,
            model={key: value for key, value in asdict(self.model).items() if key != "device"},
            prompts=self.prompt.prompts,
            items=items,
            variants=evaluation.make_variants(ratios, each[0], vary, original),
            batch=self.batch,
            command=shlex.join(["tomesd", *sys.argv[1:]]),
            **self.sampling.arguments(),
        )
        judges = evaluation.Judges.load(
            denoiser(pipe).device,
            inception=(self.inception or True) if self.sets else None,
            lpips=None if self.lpips == "none" else self.lpips,
            lpips_weights=self.lpips_weights,
            clip=self.clip,
        )
        suffix = "" if processes.count == 1 else f" (1 of {processes.count} processes)"

        def on_estimate(seconds: float, images: int) -> None:
            words = f"{images} images of {self.sampling.steps} steps to make: {about(seconds)}"
            console.print(f"{words}, then the scores. Ctrl-C stops; the same command goes on.")

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
                    on_estimate=on_estimate,
                )
        except KeyboardInterrupt:
            console.print(f"What is made is in {self.out}. The same command goes on with it.")
            raise
        if processes.is_main:
            _print(console, results, self.out)
        processes.close()


def _print(console: Console, results: "Sequence[Result]", out: Path) -> None:
    for table in _tables(results):
        console.print(table, soft_wrap=False)
    console.print("± is half the width of the 95 % confidence interval.")
    flagged = sum(result.flagged for result in results)
    if flagged:
        console.print(f"{flagged} images were blacked out by the safety checker, and distort this.")
    console.print(f"{out}: images and numbers. For a page with pictures: tomesd report {out}")


def _tables(results: "Sequence[Result]") -> list[Table]:
    from ..evaluation.results import labels_of, metrics_in

    labels = labels_of(results)

    def name(result: "Result") -> str:
        return labels[result.variant.name]

    tables = []
    for title, of_sets in (("Sets of images", True), ("Single images", False)):
        shown = [m for m in metrics_in(results) if (m.distance is not None) == of_sets]
        if shown:
            header = ["", *(f"{metric.title} {metric.arrow}" for metric in shown)]
            rows = [[name(r), *(m.with_margin(r.metrics) for m in shown)] for r in results]
            tables.append(number_table(title, header, rows))
    cost = {
        "": [name(r) for r in results],
        "s / image": ["-" if r.seconds is None else f"{r.seconds:.3f}" for r in results],
        "s / step": ["-" if r.step_seconds is None else f"{r.step_seconds:.3f}" for r in results],
        "speed-up": ["-" if r.speedup is None else r.speedup.times_faster() for r in results],
    }
    if any(r.peak_mib is not None for r in results):  # not on a CPU
        memory = ["-" if r.peak_mib is None else f"{r.peak_mib:.0f}" for r in results]
        cost["MiB / image"] = memory
    return [*tables, number_table("Cost", list(cost), zip(*cost.values(), strict=True))]
