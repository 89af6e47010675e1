"""tomesd demo: the main job, on the embedded model, in a minute or two."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..files import json_lines, write_text
from ..generation import ImageComparison, compare, save_image
from .options import ImageOptions, MergeOptions, ModelOptions
from .progress import progress_bar

PROMPTS = (
    "a fox and two pears on a green gradient background",
    "a penguin on an orange and yellow striped background",
)


@dataclass(frozen=True)
class Demo:
    """Make a few images with and without merging, and show what it does to them."""

    prompt: tuple[str, ...] = PROMPTS
    """What to draw."""
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Shares of the tokens to remove."""
    out: Path = Path("demo_output")
    """Folder for the pictures."""
    sampling: ImageOptions = field(default_factory=lambda: ImageOptions(steps=14))
    model: ModelOptions = field(default_factory=ModelOptions)
    merge: MergeOptions = field(default_factory=MergeOptions)

    def run(self, console: Console) -> None:
        merge = self.merge.checked()
        for ratio in self.ratios:
            replace(merge, ratio=ratio)  # refuse bad ones before the work begins
        console.print(f"Loading the model ({self.model.model})")
        pipe = self.model.load()
        with progress_bar(console) as on_progress:
            comparison = compare(
                pipe,
                self.prompt,
                self.ratios,
                merge,
                seed=merge.seed,
                on_progress=on_progress,
                **asdict(self.sampling),
            )
        paths = self._save(comparison)
        console.print(_table(comparison), soft_wrap=False)
        console.print("PSNR and SSIM against the unmerged image of the same seed.")
        console.print("s / step is the fastest step; the speed-up is taken from it.")
        for path, words in paths.items():
            console.print(f"  {path}  {words}")
        console.print(
            "Your own model: tomesd generate --model PATH_OR_HUB_ID --prompt '...' --ratio 0.5"
        )

    def _save(self, comparison: ImageComparison) -> dict[Path, str]:
        """Writes everything at the end, so that an interrupted run leaves nothing half done."""
        middle = min(self.ratios, key=lambda ratio: abs(ratio - 0.5))
        grid, overlay = self.out / "comparison.png", self.out / "merged_tokens.png"
        save_image(comparison.grid(difference=middle), grid)
        save_image(comparison.overlay(), overlay)
        rows = self.out / "results.jsonl"
        write_text(rows, json_lines(asdict(row) for row in comparison.rows))
        return {
            grid: "the images side by side, and where they differ",
            overlay: "which tokens were merged, early, midway and late",
            rows: "the table",
        }


def _table(comparison: ImageComparison) -> Table:
    table = Table()
    for title in [
        "ratio",
        "tokens",
        "s / image",
        "s / step",
        "speed-up",
        "peak MiB",
        "PSNR",
        "SSIM",
    ]:
        table.add_column(title, justify="right")
    base = comparison.rows[0].step_seconds
    for row in comparison.rows:
        table.add_row(
            f"{row.ratio:g}",
            str(row.tokens),
            f"{row.seconds:.1f}",
            f"{row.step_seconds:.2f}",
            f"{base / row.step_seconds:.2f}x",
            f"{row.peak_mib:.0f}",
            "-" if row.psnr is None else f"{row.psnr:.1f}",
            "-" if row.ssim is None else f"{row.ssim:.3f}",
        )
    return table
