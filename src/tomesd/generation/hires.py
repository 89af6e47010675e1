"""Large images in two passes: a small one, then the same enlarged and drawn anew with merging."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from ..hosts import find_models
from ..patch import patch_of
from ..settings import Settings
from .loading import quiet_diffusers
from .sampling import OnStep, Sample, Sampling, sample, sample_one


@dataclass(frozen=True)
class Hires:
    """A large image, and the small one that it was made from."""

    first: Sample
    second: Sample

    @property
    def image(self) -> Image.Image:
        return self.second.image

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.first.seconds + self.second.seconds


def hires(
    pipe: Any,
    prompt: str,
    settings: Settings | None = None,
    *,
    size: tuple[int, int] | None = None,
    factor: float = 2.0,
    strength: float = 0.5,
    on_step: OnStep | None = None,
    **options: Any,
) -> Hires:
    """A large image from a small one: drawn large at once, it would repeat what it shows.

    The small image is made without merging, of which it would gain little.

    Args:
        settings: how the second pass merges. `None` is as the pipeline is patched, or the defaults
            (ratio 0.5) if it is not. On transformers, which merge in the first half of the steps
            by default, it is the first half of this pass.
        size: width and height of the large image in pixels; `factor` times the model's own if None.
        factor: how many times wider and higher than the small image, more than 1.
        strength: share of the steps that the second pass takes, 0 to 1; more draws more anew.
        on_step: called with the number of steps done, counted over both passes.
        options: as in `sample`, for both passes.

    Raises:
        ValueError: an argument is out of range, or `pipe` has no image-to-image form in diffusers.
    """
    small, large = _sizes(pipe, size, factor)
    image_to_image(pipe)  # before the work begins
    _check_strength(strength)
    if settings is None and not any(patch_of(part.module) for part in find_models(pipe)):
        settings = Settings()
    done = 0

    def count(step: int) -> None:
        nonlocal done
        done += 1
        if on_step is not None:
            on_step(done)

    plain = Settings(ratio=0.0)
    first = sample(pipe, prompt, plain, size=small, on_step=count, **options)
    more = {"size": large, "strength": strength, "on_step": count, **options}
    return Hires(first, redraw(pipe, first.image, prompt, settings, **more))


def _sizes(
    pipe: Any, size: tuple[int, int] | None, factor: float
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Width and height of the small and of the large image."""
    if not 1 < factor <= 16:
        raise ValueError(f"factor={factor!r}: must be more than 1, and at most 16")
    if size is None:
        own = Sampling.of(pipe)
        size = enlarged_size(pipe, (own.width, own.height), factor)
    return enlarged_size(pipe, size, 1 / factor), size


def enlarged_size(pipe: Any, size: tuple[int, int], factor: float) -> tuple[int, int]:
    """The size next to `factor` times as large that the model can take."""
    unit = 2 * int(getattr(pipe, "vae_scale_factor", 8))
    width, height = (max(4 * unit, round(side * factor / unit) * unit) for side in size)
    return width, height


def redraw(
    pipe: Any,
    image: Image.Image,
    prompt: str,
    settings: Settings | None = None,
    *,
    size: tuple[int, int] | None = None,
    strength: float = 0.5,
    seed: int = 0,
    on_step: OnStep | None = None,
    **options: Any,
) -> Sample:
    """An image noised in part and denoised again, at another size: the second pass of `hires`.

    Args:
        settings: `None` leaves the pipeline as it is.
        size: width and height in pixels; those of `image` if None.
        options: as in `sample`.
    """
    _check_strength(strength)
    sampling = Sampling.of(pipe, size or image.size, **options)
    form = image_to_image(pipe)
    settings = None if settings is None else second_pass(pipe, settings, strength)
    enlarged = image.resize((sampling.width, sampling.height), Image.Resampling.LANCZOS)
    about = {"strength": strength, "from_size": image.size}
    given = {"image": enlarged, "strength": strength}
    return sample_one(form, prompt, seed, sampling, settings, on_step, about, **given)


def second_pass(pipe: Any, settings: Settings, strength: float) -> Settings:
    """The settings, with an end that a transformer's default for whole images would be here."""
    transformer = all(part.kind == "transformer" for part in find_models(pipe))
    if not transformer or settings.filled(end=0.5).end != 0.5 or settings.end is not None:
        return settings
    return replace(settings, end=1 - strength / 2)


def _check_strength(strength: float) -> None:
    if not 0 < strength <= 1:
        raise ValueError(f"strength={strength!r}: must be more than 0, and at most 1")


def image_to_image(pipe: Any) -> Any:
    """The pipeline of diffusers that begins with a picture, with the parts of `pipe`.

    `from_pipe` would leave out parts of which it does not know the class, such as patched ones.
    """
    diffusers = quiet_diffusers()
    names = (cls.__name__.removesuffix("Pipeline") for cls in type(pipe).__mro__)
    forms = (getattr(diffusers, f"{name}Img2ImgPipeline", None) for name in names)
    form: Callable[..., Any] | None = next((form for form in forms if form is not None), None)
    if form is None:
        raise ValueError(f"{type(pipe).__name__} has no image-to-image form in diffusers")
    parts = {**pipe.config, **pipe.components}
    known = inspect.signature(form).parameters
    made = form(**{name: part for name, part in parts.items() if name in known})
    made.set_progress_bar_config(disable=True)
    return made
