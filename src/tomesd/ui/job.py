"""Makes the same image without and with merging, one job at a time."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from ..generation import Sample, draw_map, record_maps, sample, save_image
from ..generation.hires import enlarged_size, image_to_image, redraw, second_pass
from ..generation.loading import preset_traits
from ..generation.maps import StepMaps, last_step
from ..generation.progress import OnProgress, silent
from ..generation.sampling import OnStep, merging
from ..settings import MergeWarning, Settings

_KEEP = 24
"""Results that are kept to look at again."""


class StoppedError(Exception):
    """The user has stopped a job."""


@dataclass(frozen=True)
class Request:
    """What to make."""

    model: str
    prompt: str
    negative: str = ""
    seed: int = 0
    size: tuple[int, int] | None = None
    """Width and height in pixels. None: the model's own."""
    steps: int = 20
    guidance: float | None = None
    """None: the model's own."""
    hires: bool = False
    """Whether to draw it again twice as large, from a small image that both have in common."""
    settings: Settings = field(default_factory=Settings)

    def arguments(self) -> dict[str, Any]:
        """As `sample` takes them."""
        names = ("seed", "size", "steps", "guidance")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {"negative_prompt": self.negative, **given}


@dataclass(frozen=True)
class Result:
    """An image without and with merging."""

    number: int
    request: Request
    unmerged: Sample
    merged: Sample
    steps: tuple[StepMaps, ...]
    """What each step of the merged image did."""
    warnings: tuple[str, ...]
    reused: bool
    """Whether the unmerged image is that of the job before."""
    files: tuple[Path, Path]
    """The unmerged and the merged image, with how they were made written into them."""

    @property
    def speedup(self) -> float:
        return self.unmerged.seconds / self.merged.seconds

    @property
    def alike(self) -> bool:
        """Whether both images are the same to the last bit."""
        return self.unmerged.image.tobytes() == self.merged.image.tobytes()

    def map_at(self, step: int) -> tuple[Image.Image, str]:
        """The picture of what was merged at a step, from 1, and a sentence about it."""
        did, words = self.steps[step - 1], f"Step {step} of {len(self.steps)}: "
        found = did.map
        if found is None:
            words += "nothing was merged."
        elif found.coarse:
            words += f"the image was coarser, with {found.slots:,} of {found.slot.size:,} tokens."
        else:
            words += (
                f"{found.slot.size:,} tokens were merged into {found.slots:,}. "
                f"{int((found.members == 1).sum()):,} stayed by themselves and are drawn as they "
                "are; the others have the colour of their group, and its outline."
            )
        if did.reused:
            words += " A part of the model did not run: what it gave before was used again."
        picture = self.merged.image if found is None else draw_map(found, self.merged.image)
        return picture, words


class Studio:
    """The pipeline that is loaded, and what was made with it."""

    def __init__(self, load: Callable[[str], Any], folder: Path) -> None:
        """
        Args:
            load: makes a pipeline of the name of a model.
            folder: where images are put.
        """
        self._load, self.folder = load, folder
        self._one_at_a_time = threading.Lock()
        self._model: str | None = None
        self._pipe: Any = None
        self._traits: dict[str, dict[str, Any]] = {}
        self._warm: set[Any] = set()
        self._kept: dict[str, tuple[Request, Sample]] = {}
        """The last small and the last unmerged image, which depend on no settings."""
        self._stopped: set[str] = set()
        self._number = 0
        self.results: dict[int, Result] = {}
        """By number, the oldest first."""

    def pipeline(self, model: str) -> Any:
        """Loads the model, unless it is the one that is loaded."""
        if model != self._model:
            self._model = self._pipe = None  # two may not fit into memory
            self._kept.clear()
            self._warm.clear()
            self._pipe = self._load(model)
            self._traits[model] = preset_traits(self._pipe)
            self._model = model
        return self._pipe

    def traits(self, model: str) -> dict[str, Any]:
        """What presets depend on. A model that has never been loaded is, after the jobs before."""
        if model not in self._traits:
            with self._one_at_a_time:
                self.pipeline(model)
        return self._traits[model]

    def begin(self, owner: str) -> None:
        """Forgets that an earlier job of the owner was stopped."""
        self._stopped.discard(owner)

    def stop(self, owner: str) -> None:
        """Ends the owner's job after the step that it is at, or before it begins."""
        self._stopped.add(owner)

    def make(self, request: Request, owner: str = "", on_progress: OnProgress = silent) -> Result:
        """Makes both images.

        Args:
            owner: who can stop it.

        Raises:
            StoppedError: the owner did.
        """
        if not request.prompt.strip():
            raise ValueError("prompt: must not be empty")
        steps = request.steps

        def report(words: str, done: int) -> None:
            on_progress(words, done, 2 * steps)
            if owner in self._stopped:
                raise StoppedError(f"Stopped. {words} was the last thing done.")

        def on_step(words: str, before: int) -> OnStep:
            return lambda done: report(f"{words}: step {done} of {steps}", before + done)

        with self._one_at_a_time:
            report(f"Loading {request.model}", 0)
            pipe = self.pipeline(request.model)
            small = None
            if request.hires:  # the first pass, unmerged
                image_to_image(pipe)  # before the work begins
                once = replace(request, hires=False)
                make = partial(_draw, pipe, once, None, on_step("Small image", 0))
                small, _ = self._keep("small", once, make)
            report("Warming up", 0)
            self._warm_up(pipe, request, small)
            make = partial(_draw, pipe, request, small, on_step("Unmerged image", 0))
            unmerged, reused = self._keep("unmerged", request, make)
            with _noted_warnings() as notes:
                merged, did = _make_merged(pipe, request, small, on_step("Merged image", steps))
            number = self._number = self._number + 1
            made = Result(
                number,
                request,
                unmerged,
                merged,
                did,
                tuple(notes),
                reused,
                self._save(number, request.model, unmerged, merged),
            )
            self.results[number] = made
            while len(self.results) > _KEEP:
                del self.results[next(iter(self.results))]
            return made

    def _keep(self, name: str, request: Request, make: Callable[[], Sample]) -> tuple[Sample, bool]:
        """An image without merging, and whether it is that of the job before."""
        same = replace(request, settings=Settings())
        kept = self._kept.get(name)
        if kept is not None and kept[0] == same:
            return kept[1], True
        made = make()
        self._kept[name] = same, made
        return made, False

    def _warm_up(self, pipe: Any, request: Request, small: Sample | None) -> None:
        """The first image of its kind is slow: its time would be no comparison."""
        short = replace(request, steps=1 if small is None else 2)
        for settings in (Settings(ratio=0.0), request.settings):
            key = (request.size, request.hires, settings)
            if key not in self._warm:
                with _noted_warnings(), merging(pipe, settings):
                    _draw(pipe, short, small, lambda done: None)
                self._warm.add(key)

    def _save(self, number: int, model: str, unmerged: Sample, merged: Sample) -> tuple[Path, Path]:
        files = self.folder / f"{number}-unmerged.png", self.folder / f"{number}-merged.png"
        for path, made in zip(files, (unmerged, merged), strict=True):
            save_image(made.image, path, {"model": model, **made.metadata})
        return files


def _draw(pipe: Any, request: Request, small: Sample | None, on_step: OnStep) -> Sample:
    """The image that is asked for, or the second pass of it."""
    arguments = request.arguments()
    if small is None:
        return sample(pipe, request.prompt, on_step=on_step, **arguments)
    arguments["size"] = enlarged_size(pipe, small.image.size, 2)
    return redraw(pipe, small.image, request.prompt, on_step=on_step, **arguments)


def _make_merged(
    pipe: Any, request: Request, small: Sample | None, on_step: OnStep
) -> tuple[Sample, tuple[StepMaps, ...]]:
    """The merged image, and what each of its steps did."""
    settings = request.settings if small is None else second_pass(pipe, request.settings, 0.5)
    steps: list[StepMaps] = []

    def note(done: int) -> None:
        steps.append(last_step(pipe, maps))
        maps.clear()
        on_step(done)

    with merging(pipe, settings), record_maps(pipe, every_block=False) as maps:
        made = _draw(pipe, request, small, note)
    made = replace(made, metadata={**made.metadata, "merge": asdict(settings)})
    return made, tuple(steps)


@contextmanager
def _noted_warnings() -> Iterator[list[str]]:
    """Yields a list that has what the library warned about when the block has ended."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MergeWarning)
        yield notes
    words = (str(one.message) for one in caught if issubclass(one.category, MergeWarning))
    notes += dict.fromkeys(words)
