"""tomesd describe: what merges where."""

from dataclasses import asdict, dataclass, field

from rich.console import Console

import tomesd

from .options import MergeOptions, ModelOptions


@dataclass(frozen=True)
class Describe:
    """Tell what merges where in a model at an image size, and what share of the work it saves."""

    size: tuple[int, int] = (512, 512)
    """Width and height of the image, in pixels."""
    num_frames: int | None = None
    """Frames of a video."""
    model: ModelOptions = field(default_factory=ModelOptions)
    merge: MergeOptions = field(default_factory=MergeOptions)

    def run(self, console: Console) -> None:
        merge = self.merge.checked()
        pipe = self.model.load()
        width, height = self.size
        with tomesd.patched(pipe, **asdict(merge)):
            console.print(str(tomesd.describe(pipe, height, width, self.num_frames)))
