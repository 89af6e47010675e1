"""tomesd show: which tokens are merged, as a picture."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..files import check_writable, unused
from ..settings import Settings
from .options import ImageOptions, MergeOptions, ModelOptions, Size
from .progress import progress_bar

if TYPE_CHECKING:
    from PIL import Image

    from ..generation import MergeMap


@dataclass(frozen=True)
class Show:
    """Draw which tokens are merged: each slot pale, in its mean colour; what is kept, as it is."""

    image: Path | None = None
    """A picture to look at, at its own size unless --size is given."""
    prompt: str | None = None
    """Or a prompt: the picture is made first."""
    step: int | None = None
    """Which denoising step, from 0. The middle one if not given."""
    level: int | None = None
    """Which level: 1 is full resolution, 2 half of it. The finest that is merged if not given."""
    out: Path = Path("merge_map.png")
    """The picture to write."""
    overwrite: bool = False
    """Replace a picture of this name. Otherwise the new one gets a number."""
    sampling: ImageOptions = field(default_factory=ImageOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    merge: MergeOptions = field(default_factory=MergeOptions)

    def run(self, console: Console) -> None:
        merge = self.merge.checked()
        if (self.image is None) == (self.prompt is None):
            raise ValueError("give either --image or --prompt")
        steps = self.sampling.steps
        step = steps // 2 if self.step is None else self.step
        if not 0 <= step < steps:
            raise ValueError(f"step={step}: must be between 0 and {steps - 1}")
        check_writable(self.out, folder=False)
        from ..generation import draw_map, map_of_image, save_image

        picture = None if self.image is None else _open(self.image)
        pipe = self.model.load()
        if picture is not None:
            picture = _fit(pipe, picture, self.sampling.size)
            maps = map_of_image(pipe, picture, merge, noise=1 - (step + 0.5) / steps)
            map = self._choose(maps, 0)
        else:
            picture, maps = self._make(console, pipe, merge)
            map = self._choose(maps, step)
        out = unused(self.out, overwrite=self.overwrite)
        save_image(draw_map(map, picture), out)
        h, w = map.slot.shape
        left = int(map.slot.max()) + 1
        console.print(
            f"{out}  {h}x{w} tokens in {left} slots, at 1/{map.downsample} of the latent, "
            f"timestep {map.timestep:.0f}"
        )

    def _make(
        self, console: Console, pipe: Any, merge: Settings
    ) -> "tuple[Image.Image, list[MergeMap]]":
        import tomesd

        from ..generation import record_maps, sample

        prompt = str(self.prompt)
        with (
            tomesd.patched(pipe, **asdict(merge)),
            record_maps(pipe) as maps,
            progress_bar(console) as on_progress,
        ):
            made = sample(
                pipe,
                prompt,
                seed=merge.seed,
                on_step=lambda done: on_progress(prompt, done, self.sampling.steps),
                **asdict(self.sampling),
            )
        return made.image, maps

    def _choose(self, maps: "list[MergeMap]", step: int) -> "MergeMap":
        levels = sorted({map.downsample for map in maps})
        if not levels:
            raise ValueError("nothing is merged with these options at this size")
        level = levels[0] if self.level is None else self.level
        if level not in levels:
            raise ValueError(
                f"level={level}: merged are {', '.join(map(str, levels))}; "
                "--max-downsample merges more"
            )
        at_level = [map for map in maps if map.downsample == level]
        first = [map for map in at_level if map.layer == at_level[0].layer]
        return first[min(step, len(first) - 1)]


def _open(path: Path) -> "Image.Image":
    from PIL import Image

    try:
        return Image.open(path).convert("RGB")
    except (OSError, ValueError) as error:
        raise ValueError(f"image={str(path)!r}: {error}") from error


def _fit(pipe: Any, picture: "Image.Image", size: Size | None) -> "Image.Image":
    """The picture at a size that the model can take."""
    unit = 8 * pipe.vae_scale_factor
    width, height = size or picture.size
    return picture.resize((max(unit, width // unit * unit), max(unit, height // unit * unit)))
