"""tomesd show: which tokens are merged at which steps, as a picture."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..files import check_writable, unused
from ..settings import Settings
from .options import ImageOptions, MergeOptions, ModelOptions, Size
from .screen import progress_bar

if TYPE_CHECKING:
    from PIL import Image

    from ..generation.maps import StepMaps


@dataclass(frozen=True)
class Show:
    """Draw which tokens are merged: each slot pale, in its mean colour; what is kept, as it is. A
    step that runs on a coarser image has larger tokens, and one that reuses what the model gave
    before is grey."""

    image: Path | None = None
    """A picture to look at, at its own size unless --size is given."""
    prompt: str | None = None
    """Or a prompt: the picture is made first."""
    step: int | None = None
    """Which denoising step, from 0. An early, a middle and a late one if not given."""
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
        self.merge.check()
        if (self.image is None) == (self.prompt is None):
            raise ValueError("give either --image or --prompt")
        steps = self.sampling.steps
        if self.step is not None and not 0 <= self.step < steps:
            raise ValueError(f"step={self.step}: must be between 0 and {steps - 1}")
        check_writable(self.out, folder=False)
        from ..generation import draw_map, map_of_image, save_image
        from ..generation.comparison import label_grid
        from ..generation.maps import map_at, map_title, three_steps

        picture = None if self.image is None else _open(self.image)
        from ..generation.loading import preset_traits

        pipe = self.model.load()
        merge = self.merge.checked(**preset_traits(pipe))
        if picture is not None and merge.reuse is not None:
            _say_what_one_step_hides(console, merge)
        steps_shown = three_steps(steps) if self.step is None else (self.step,)
        if picture is not None:
            picture = _fit(pipe, picture, self.sampling.size)
            noises = (1 - (step + 0.5) / steps for step in steps_shown)
            looked_at = [map_of_image(pipe, picture, merge, noise=noise) for noise in noises]
            maps = [map_at(looked_at, place, self.level) for place in range(len(looked_at))]
        else:
            picture, by_step = self._make(console, pipe, merge)
            maps = [map_at(by_step, step, self.level) for step in steps_shown]
        titles = [map_title(map, step) for map, step in zip(maps, steps_shown, strict=True)]
        drawn = [draw_map(map, picture) for map in maps]
        if len(drawn) > 1:
            words = self.prompt or str(self.image)
            drawn = [label_grid([[picture.resize(drawn[0].size), *drawn]], ["", *titles], [words])]
        out = unused(self.out, overwrite=self.overwrite)
        save_image(drawn[0], out)
        h, w = maps[0].slot.shape
        console.print(f"{out}  {h}x{w} tokens, at 1/{maps[0].downsample} of the latent")
        for title in titles:
            console.print(f"  {title}")

    def _make(
        self, console: Console, pipe: Any, merge: Settings
    ) -> "tuple[Image.Image, list[StepMaps]]":
        from ..generation import sample_with_maps

        prompt = str(self.prompt)
        with progress_bar(console) as on_progress:
            made, by_step = sample_with_maps(
                pipe,
                prompt,
                merge,
                seed=merge.seed,
                on_step=lambda done: on_progress(prompt, done, self.sampling.steps),
                **asdict(self.sampling),
            )
        return made.image, by_step


def _open(path: Path) -> "Image.Image":
    from PIL import Image

    try:
        return Image.open(path).convert("RGB")
    except (OSError, ValueError) as error:
        raise ValueError(f"image={str(path)!r}: {error}") from error


def _say_what_one_step_hides(console: Console, merge: Settings) -> None:
    """Each step of a picture that is given is looked at alone, so none can reuse another."""
    words = "which steps reuse what others gave, only --prompt can show"
    if not (merge.active or merge.coarse):
        raise ValueError(f"image: with these options, nothing else is done; {words}")
    console.print(words.capitalize())


def _fit(pipe: Any, picture: "Image.Image", size: Size | None) -> "Image.Image":
    """The picture at a size that the model can take."""
    unit = 8 * pipe.vae_scale_factor
    width, height = size or picture.size
    return picture.resize((max(unit, width // unit * unit), max(unit, height // unit * unit)))
