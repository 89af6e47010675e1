"""Makes images with a pipeline, and measures what they took."""

import inspect
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from PIL import Image, PngImagePlugin

import tomesd

from ..files import whole_file
from ..settings import Settings
from .loading import denoiser
from .memory import MemoryProbe

METADATA_KEY = "tomesd"
_GUIDANCE = 5.0
"""Where a pipeline has no default."""
_SIDE = 1024
"""Pixels, where neither pipeline nor model names a size: the largest models do not."""
OnStep = Callable[[int], None]
"""Called with the number of steps done."""


@dataclass(frozen=True)
class Sampling:
    """How images are made, whatever is merged."""

    width: int
    height: int
    steps: int = 30
    guidance: float = _GUIDANCE
    negative_prompt: str = ""
    scheduler: Literal["own", "ddim", "plms"] = "own"

    @classmethod
    def of(
        cls,
        pipe: Any,
        size: tuple[int, int] | None = None,
        *,
        guidance: float | None = None,
        **options: Any,
    ) -> "Sampling":
        """Checked against `pipe`, which gets the scheduler that is asked for.

        Args:
            size: width and height in pixels; the model's own if None.
            guidance: the model's own if None.
        """
        guidance = _own_guidance(pipe) if guidance is None else guidance
        sampling = cls(*_checked_size(pipe, size), guidance=guidance, **options)
        if sampling.steps < 1:
            raise ValueError(f"steps={sampling.steps}: must be at least 1")
        if sampling.negative_prompt and not _takes_negative(pipe):
            raise ValueError(
                f"negative_prompt={sampling.negative_prompt!r}: {type(pipe).__name__} takes none, "
                "as this model has learnt to do with its guidance in one call"
            )
        set_scheduler(pipe, sampling.scheduler)
        return sampling


@dataclass(frozen=True)
class Batch:
    """Images that were made together."""

    images: tuple[Image.Image, ...]
    seconds: float
    step_seconds: float
    """The fastest step: what a step takes when nothing else gets in its way."""
    mean_step_seconds: float
    """Steps may differ: some leave out a part of the model, or run on a coarser image."""
    peak_mib: float | None
    """Memory in use at the highest point, beyond what was in use before. None on a CPU."""
    flagged: tuple[bool, ...]
    """Which ones the model's safety checker has blacked out."""


@dataclass(frozen=True)
class Sample:
    """One image."""

    image: Image.Image
    seconds: float
    step_seconds: float
    """Of a step on average: some may leave out a part of the model, or run on a coarser image."""
    peak_mib: float | None
    metadata: dict[str, Any]
    """All it takes to make the image again."""


def sample(
    pipe: Any,
    prompt: str,
    settings: Settings | None = None,
    *,
    seed: int = 0,
    size: tuple[int, int] | None = None,
    on_step: OnStep | None = None,
    **options: Any,
) -> Sample:
    """One image from `pipe`, merged as `settings` say; `None` leaves the pipeline as it is.

    Args:
        size: width and height in pixels; the model's own if None.
        options: other fields of `Sampling`.
    """
    sampling = Sampling.of(pipe, size, **options)
    return sample_one(pipe, prompt, seed, sampling, settings, on_step)


def merging(pipe: Any, settings: Settings | None) -> AbstractContextManager[Any]:
    """Makes `pipe` merge for the time of a `with` block; `None` leaves it as it is."""
    return nullcontext() if settings is None else tomesd.patched(pipe, **asdict(settings))


def sample_one(
    pipe: Any,
    prompt: str,
    seed: int,
    sampling: Sampling,
    settings: Settings | None,
    on_step: OnStep | None = None,
    about: Mapping[str, Any] | None = None,
    **given: Any,
) -> Sample:
    """One image.

    Args:
        about: what else to say of it in its metadata.
        given: what else the pipeline gets, such as an image to begin with.
    """
    with merging(pipe, settings):
        made = sample_batch(pipe, [prompt], [seed], sampling, on_step, **given)
    merge = None if settings is None else asdict(settings)
    how = {**image_metadata(pipe, prompt, seed, sampling), **(about or {}), "merge": merge}
    return Sample(made.images[0], made.seconds, made.mean_step_seconds, made.peak_mib, how)


def sample_batch(
    pipe: Any,
    prompts: Sequence[str],
    seeds: Sequence[int],
    sampling: Sampling,
    on_step: OnStep | None = None,
    **given: Any,
) -> Batch:
    """One call of the pipeline. Every image has a seed of its own.

    Args:
        given: what else the pipeline gets, such as an image to begin with.
    """
    if "num_frames" in _parameters(pipe):
        raise ValueError(
            f"a {type(pipe).__name__} makes videos, and this makes images only: call the pipeline "
            "itself, after tomesd.apply_patch(pipe)"
        )
    device = denoiser(pipe).device
    inputs: dict[str, Any] = {"prompt": list(prompts), **given}
    if _takes_negative(pipe):
        inputs["negative_prompt"] = [sampling.negative_prompt] * len(prompts)
    with MemoryProbe(device).watch() as peak:
        clock = _Clock(device)
        inputs |= _callback(pipe, clock, on_step)
        start = time.perf_counter()
        output = call_pipeline(pipe, inputs, seeds, sampling)
        fastest, mean = clock.steps()  # waits for the GPU
        seconds = time.perf_counter() - start
    flagged = getattr(output, "nsfw_content_detected", None) or [False] * len(prompts)
    safe = tuple(map(bool, flagged))
    return Batch(tuple(output.images), seconds, fastest, mean, peak[0], safe)


def estimate_seconds(pipe: Any, sampling: Sampling, images: int = 1) -> float:
    """About what so many images at a time take, from one step that is timed."""
    short = replace(sampling, steps=min(2, sampling.steps))  # the first step has the prompt in it
    made = sample_batch(pipe, [""] * images, range(images), short)
    return made.seconds + (sampling.steps - short.steps) * made.step_seconds


@torch.no_grad()
def call_pipeline(
    pipe: Any, inputs: dict[str, Any], seeds: Sequence[int], sampling: Sampling
) -> Any:
    """The output of `pipe`.

    Args:
        inputs: the prompts, or what they are encoded as; and whatever else the pipeline takes.
        seeds: one for each image.
    """
    size = {"height": sampling.height, "width": sampling.width}
    return pipe(
        **inputs,
        **{name: side for name, side in size.items() if name in _parameters(pipe)},
        **{_guidance_name(pipe): sampling.guidance},
        num_inference_steps=sampling.steps,
        # Drawn on the CPU, the noise is the same whatever the device.
        generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
    )


class _Clock:
    """Takes the time of steps; on a GPU, without making it wait between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ticks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if self._device.type != "cuda":
            self._ticks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._ticks.append(event)

    def steps(self) -> tuple[float, float]:
        """Seconds of the fastest step, and of a step on average.

        The first one has the text in it, and does not count if there are others.
        """
        taken = [self._between(*pair) for pair in itertools.pairwise(self._ticks)]
        return min(taken), statistics.mean(taken[1:] or taken)

    def _between(self, before: Any, after: Any) -> float:
        if self._device.type != "cuda":
            return float(after - before)
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000


def _callback(pipe: Any, clock: _Clock, on_step: OnStep | None) -> dict[str, Any]:
    """What to call at the end of each step, as the argument that the pipeline takes it by."""

    def tell(step: int) -> None:
        clock.tick()
        if on_step is not None:
            on_step(step + 1)

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        tell(step)
        return values

    if "callback_on_step_end" in _parameters(pipe):
        return {"callback_on_step_end": callback}
    return {"callback": lambda step, timestep, latents: tell(step), "callback_steps": 1}


def _parameters(pipe: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(pipe.__call__).parameters


def _guidance_name(pipe: Any) -> str:
    """The argument that compares with and without the prompt, or that stands for it.

    Some models have learnt to give the result of both in one call: what they take as
    `guidance_scale`, others of their pipeline ignore.
    """
    names = _parameters(pipe)
    learnt = "guidance_scale" in names and denoiser(pipe).config.get("guidance_embeds", False)
    return "true_cfg_scale" if "true_cfg_scale" in names and not learnt else "guidance_scale"


def _takes_negative(pipe: Any) -> bool:
    names = _parameters(pipe)
    ignored = "true_cfg_scale" in names and _guidance_name(pipe) == "guidance_scale"
    return "negative_prompt" in names and not ignored


def _own_guidance(pipe: Any) -> float:
    """As an embedded model says, or else the default of the pipeline."""
    default = getattr(_parameters(pipe).get(_guidance_name(pipe)), "default", None)
    return float(getattr(pipe, "own_guidance", default) or _GUIDANCE)


def set_scheduler(pipe: Any, name: str) -> None:
    """Puts in DDIM or PLMS with the settings of the pipeline's own scheduler."""
    if name == "own":
        return
    if name not in ("ddim", "plms"):
        raise ValueError(f"scheduler={name!r}: must be one of own, ddim, plms")
    import diffusers

    config = pipe.scheduler.config
    if "beta_schedule" not in config:
        kind = type(pipe.scheduler).__name__
        raise ValueError(f"scheduler={name!r}: the model has a {kind}, which it cannot replace")
    if name == "ddim":
        pipe.scheduler = diffusers.DDIMScheduler.from_config(config)
    else:
        pipe.scheduler = diffusers.PNDMScheduler.from_config(config, skip_prk_steps=True)


def _checked_size(pipe: Any, size: tuple[int, int] | None) -> tuple[int, int]:
    scale = getattr(pipe, "vae_scale_factor", 8)
    if size is None:
        # Pipelines of transformers know it where the model's configuration does not.
        side = getattr(pipe, "default_sample_size", None)
        side = side or denoiser(pipe).config.get("sample_size") or _SIDE // scale
        height, width = (side, side) if isinstance(side, int) else side
        return width * scale, height * scale
    check_size(pipe, size)
    need, there = least_bytes(pipe, size), psutil.virtual_memory().total
    if denoiser(pipe).device.type == "cpu" and need > there:  # on a GPU, it is an error later
        raise ValueError(
            f"size={size[0]}x{size[1]}: needs at least {need / 2**30:,.0f} GiB, and this machine "
            f"has {there / 2**30:,.0f} GiB"
        )
    return size


def check_size(pipe: Any, size: tuple[int, int]) -> None:
    """Refuses a width and height that the model cannot take."""
    scale = getattr(pipe, "vae_scale_factor", 8)
    for name, value in zip(("width", "height"), size, strict=True):
        if value < 8 * scale or value % (2 * scale):
            raise ValueError(
                f"{name}={value}: must be a multiple of {2 * scale} and at least {8 * scale}"
            )


def least_bytes(pipe: Any, size: tuple[int, int], images: int = 1, *, decode: bool = True) -> int:
    """What the features of the first layer take, or of the last of the decoder, in and out."""
    model, scale = denoiser(pipe), getattr(pipe, "vae_scale_factor", 8)
    pixels = size[0] * size[1] * images
    channels = model.config.get("block_out_channels", [1])[0] / scale**2
    if decode:
        config = getattr(getattr(pipe, "vae", None), "config", {})
        channels = max(channels, config.get("block_out_channels", [1])[0])
    return int(2 * channels * pixels * model.dtype.itemsize)


def image_metadata(pipe: Any, prompt: str, seed: int, sampling: Sampling) -> dict[str, Any]:
    """How an image was made, and nothing that differs when it is made again."""
    return {
        "prompt": prompt,
        "seed": seed,
        **asdict(sampling),
        "pipeline": type(pipe).__name__,
        "tomesd": tomesd.__version__,
        "torch": torch.__version__,
    }


def save_image(image: Image.Image, path: Path, metadata: dict[str, Any] | None = None) -> None:
    """Writes a PNG that tells how it was made."""
    info = PngImagePlugin.PngInfo()
    if metadata is not None:
        # A schedule may be a function, and a mask a tensor: for those, words have to do.
        info.add_text(METADATA_KEY, json.dumps(metadata, default=str))
    with whole_file(path) as part:
        image.save(part, format="PNG", pnginfo=info)
