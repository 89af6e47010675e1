"""tomesd describe: what merges where."""

from dataclasses import asdict, dataclass, field

from rich.console import Console

from .options import MergeOptions, ModelOptions, Size


@dataclass(frozen=True)
class Describe:
    """Tell what merges where in a model at an image size, and what share of the work it saves."""

    size: Size | None = None
    """Pixels: the side of a square, or width x height as in 768x512. The model's own if not
    given."""
    num_frames: int | None = None
    """Frames of a video."""
    steps: int | None = None
    """Of an image or video: tells what all of them save together."""
    model: ModelOptions = field(default_factory=ModelOptions)
    merge: MergeOptions = field(default_factory=MergeOptions)

    def run(self, console: Console) -> None:
        import tomesd

        self.merge.check()  # what is wrong is said before the model is loaded
        pipe = self.model.load()
        merge = self.merge.as_in_python(pipe)
        width, height = self.size or (None, None)
        with tomesd.patched(pipe, **asdict(merge)):
            told = tomesd.describe(pipe, height, width, self.num_frames, steps=self.steps)
            console.print(str(told))
