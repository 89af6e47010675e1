"""tomesd eval: what merging costs, and what it does to images."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..generation.loading import denoiser
from .options import MergeOptions, ModelOptions
from .progress import progress_bar, shorten

__all__ = ["Eval"]


@dataclass(frozen=True)
class Eval:
    """Make the same images with and without merging, many of them, and measure how they differ.

    An interrupted run goes on when the same command is given again. Several GPUs:
    accelerate launch -m tomesd eval ...
    """

    out: Path = Path("evaluation")
    """Folder of the run."""

    prompts: str = "held-out"
    """held-out (captions of the embedded model), imagenet, imagenet:FILE (a class a line), a .tsv
    file with a column Prompt such as Parti-prompts, or a text file with a prompt a line."""

    count: int | None = 100
    """How many prompts. None takes all."""

    images: int = 1
    """Images per prompt, each from a seed of its own."""

    image_seed: int = 0
    """Where the seeds of the noise begin."""

    ratios: tuple[float, ...] | None = None
    """Shares of the tokens to remove: 0.25, 0.5 and 0.75 if not given, or with --settings or
    --preset what these say."""

    vary: tuple[str, ...] = ()
    """Other settings to try, in all combinations: NAME=VALUE,VALUE ... as in
    --vary max_downsample=1,2 use_rand=true,false"""

    original: Path | None = None
    """Folder of tomesd 0.1.3, to compare with."""

    steps: int = 30
    """Denoising steps."""

    guidance: float = 5.0
    """How closely to follow the prompt."""

    negative: str = ""
    """What to keep out of the images."""

    scheduler: Literal["own", "ddim", "plms"] = "own"
    """The model's own, DDIM, or PLMS (PNDM)."""

    size: tuple[int, int] | None = None
    """Width and height in pixels. The model's own if not given."""

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

    model: ModelOptions = field(default_factory=ModelOptions)
    merge: MergeOptions = field(default_factory=MergeOptions)

    def run(self, console: Console) -> None:
        from .. import evaluation

        merge = self.merge.checked()
        if "ratio" in self.merge.given():
            raise ValueError(f"ratio={merge.ratio:g}: an evaluation takes --ratios")
        ratios = self.ratios
        if ratios is None:
            ratios = (merge.ratio,) if self.merge.base() else (0.25, 0.5, 0.75)
        processes = evaluation.Processes(self.model.device)
        if not processes.is_main:
            console = Console(quiet=True)
        original = None if self.original is None else evaluation.load_original(self.original)
        variants = evaluation.make_variants(
            ratios, merge, evaluation.parse_vary(self.vary), original
        )
        prompts = evaluation.load_prompts(self.prompts, self.count)
        items = evaluation.make_items(prompts, self.images, self.image_seed)
        reference = None if self.reference is None else evaluation.Reference.of(self.reference)
        console.print(f"Loading the model ({self.model.model})")
        pipe = replace(self.model, device=processes.device(self.model.device)).load()
        definition = evaluation.define(
            pipe,
            model={key: value for key, value in asdict(self.model).items() if key != "device"},
            prompts=self.prompts,
            items=items,
            variants=variants,
            batch=self.batch,
            size=self.size,
            steps=self.steps,
            guidance=self.guidance,
            negative_prompt=self.negative,
            scheduler=self.scheduler,
        )
        judges = self._judges(denoiser(pipe).device)
        try:
            with progress_bar(console) as bar:
                results = evaluation.evaluate(
                    pipe,
                    evaluation.Run(self.out),
                    definition,
                    judges,
                    reference=reference,
                    original=original,
                    processes=processes,
                    extend=self.extend,
                    progress=_Bar(bar, processes.count),
                )
        except KeyboardInterrupt:
            console.print(f"What is made is in {self.out}. The same command goes on with it.")
            raise
        if processes.is_main:
            _print(console, results, self.out)
        processes.close()

    def _judges(self, device: Any) -> Any:
        from .. import evaluation

        return evaluation.Judges.load(
            device,
            inception=(self.inception or True) if self.sets else None,
            lpips=None if self.lpips == "none" else self.lpips,
            lpips_weights=self.lpips_weights,
            clip=self.clip,
        )


class _Bar:
    def __init__(self, bar: Progress, processes: int) -> None:
        self.bar = bar
        self.task = bar.add_task("", total=None)
        self.suffix = "" if processes == 1 else f" (1 of {processes} processes)"

    def start(self, total: int) -> None:
        self.bar.reset(self.task, total=total)

    def update(self, words: str, done: float) -> None:
        self.bar.update(self.task, description=shorten(words) + self.suffix, completed=done)


def _print(console: Console, results: Any, out: Path) -> None:
    for table in _tables(results):
        console.print(table, soft_wrap=False)
    console.print("± is half the width of the 95 % confidence interval.")
    flagged = sum(result.flagged for result in results)
    if flagged:
        console.print(f"{flagged} images were blacked out by the safety checker, and distort this.")
    console.print(f"{out}: images and numbers. For a page with pictures: tomesd report {out}")


def _tables(results: Any) -> list[Table]:
    from ..evaluation.tables import SETS, labels_of, present

    labels = labels_of(results)
    tables = []
    columns = present(results)
    for title, of_sets in (("Sets of images", True), ("Single images", False)):
        shown = [column for column in columns if (column.key in SETS) == of_sets]
        if shown:
            table = _table(title, *(f"{column.title} {column.arrow}" for column in shown))
            for result in results:
                numbers = (column.with_margin(result) for column in shown)
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
