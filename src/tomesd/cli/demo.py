"""tomesd demo: the main job, on the embedded model, in a minute or two."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..files import check_writable, json_lines, unused, write_text
from .options import ImageOptions, ModelOptions, RatiosOptions
from .screen import number_table, progress_bar

if TYPE_CHECKING:
    from ..generation import ImageComparison, RatioSummary

PROMPTS = (
    "a fox and two pears on a green gradient background",
    "a penguin on an orange and yellow striped background",
)


@dataclass(frozen=True)
class Demo:
    """Make a few images with and without merging, and show what it does to them."""

    prompt: tuple[str, ...] = PROMPTS
    """What to draw."""
    out: Path = Path("demo_output")
    """Folder for the pictures."""
    overwrite: bool = False
    """Replace what is in the folder. Otherwise a folder that is there gets a number."""
    sampling: ImageOptions = field(default_factory=lambda: ImageOptions(steps=14))
    model: ModelOptions = field(default_factory=ModelOptions)
    merge: RatiosOptions = field(default_factory=RatiosOptions)

    def run(self, console: Console) -> None:
        self.merge.check()
        check_writable(self.out, folder=True)
        from ..generation import compare

        console.print(f"Loading the model ({self.model.model})")
        from ..generation.loading import preset_traits

        pipe = self.model.load()
        traits = preset_traits(pipe)
        each = self.merge.each(**traits)
        with progress_bar(console) as on_progress:
            comparison = compare(
                pipe,
                self.prompt,
                [settings.ratio for settings in each],
                each[0],
                seed=each[0].seed,
                on_progress=on_progress,
                **asdict(self.sampling),
            )
        paths = self._save(comparison)
        console.print(_table(comparison.rows, comparison.titles), soft_wrap=False)
        if each[0].reuse is None and not each[0].coarse:
            console.print("s / step: the median of one call of the model; the ratios take turns.")
        else:
            console.print("s / step: the mean over the steps of whole images, which differ.")
        if traits["kind"] == "transformer" and each[0].end is None and each[0].ratio > 0:
            console.print(
                "Transformers merge in the first half of the steps, unless --end is given."
            )
        console.print("PSNR and SSIM against the unmerged image of the same seed.")
        for path, words in paths.items():
            console.print(f"  {path}  {words}")
        console.print(
            "Your own model: tomesd generate --model PATH_OR_HUB_ID --prompt '...' --preset fast"
        )

    def _save(self, comparison: "ImageComparison") -> dict[Path, str]:
        """Writes everything at the end, so that an interrupted run leaves nothing half done."""
        from ..generation import save_image

        out = unused(self.out, overwrite=self.overwrite or _is_empty(self.out))
        middle = min(comparison.ratios[1:], key=lambda ratio: abs(ratio - 0.5))
        grid, overlay = out / "comparison.png", out / "merged_tokens.png"
        save_image(comparison.grid(difference=middle), grid)
        written = {grid: "the images side by side, and where they differ"}
        overlay.unlink(missing_ok=True)  # of a run before this one
        if comparison.maps:
            save_image(comparison.overlay(), overlay)
            written[overlay] = "which tokens were merged, early, midway and late"
        rows = out / "results.jsonl"
        write_text(rows, json_lines(asdict(row) for row in comparison.rows))
        return {**written, rows: "the table"}


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _table(rows: "tuple[RatioSummary, ...]", names: tuple[str, ...]) -> Table:
    columns = {
        "": list(names),
        "tokens": [str(row.tokens) for row in rows],
        "s / step": [f"{row.step_seconds:.3f}" for row in rows],
        "speed-up": [f"{rows[0].step_seconds / row.step_seconds:.2f}x" for row in rows],
        "PSNR": ["-" if row.psnr is None else f"{row.psnr:.1f}" for row in rows],
        "SSIM": ["-" if row.ssim is None else f"{row.ssim:.3f}" for row in rows],
    }
    if all(row.peak_mib is not None for row in rows):  # not on a CPU
        columns["peak MiB"] = [f"{row.peak_mib:.0f}" for row in rows]
    return number_table(None, list(columns), zip(*columns.values(), strict=True), first="right")
