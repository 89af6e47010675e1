"""Makes one image, and measures what it took."""

import ctypes
import inspect
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image, PngImagePlugin

import tomesd

from ..settings import Settings
from .loading import denoiser

__all__ = ["Sample", "sample", "save_image"]

METADATA_KEY = "tomesd"


@dataclass(frozen=True)
class Sample:
    image: Image.Image
    seconds: float
    step_seconds: float
    """The fastest step: what a step takes when nothing else gets in its way."""
    peak_mib: float
    """Memory in use at the highest point, beyond what was in use before."""
    metadata: dict[str, Any]
    """All it takes to make the image again."""


def sample(
    pipe: Any,
    prompt: str,
    settings: Settings | None = None,
    *,
    negative_prompt: str = "",
    steps: int = 30,
    guidance: float = 5.0,
    size: tuple[int, int] | None = None,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> Sample:
    """One image from `pipe`, merged as `settings` say; `None` leaves the pipeline as it is.

    Args:
        size: width and height in pixels; the model's own if None.
        on_step: called with the number of steps done.
    """
    device = denoiser(pipe).device
    if steps < 1:
        raise ValueError(f"steps={steps}: must be at least 1")
    width, height = checked_size(pipe, size)
    options: dict[str, Any] = {"height": height, "width": width, "guidance_scale": guidance}
    if "negative_prompt" in inspect.signature(pipe.__call__).parameters:
        options["negative_prompt"] = negative_prompt
    clock = [time.perf_counter()]
    options["callback_on_step_end"] = _callback(clock, device, on_step)
    merging = nullcontext() if settings is None else tomesd.patched(pipe, **asdict(settings))
    with merging, measured(device) as cost:
        image = pipe(
            prompt,
            num_inference_steps=steps,
            # Drawn on the CPU, the noise is the same whatever the device.
            generator=torch.Generator("cpu").manual_seed(seed),
            **options,
        ).images[0]
    metadata = {
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "seed": seed,
        "steps": steps,
        "guidance": guidance,
        "width": width,
        "height": height,
        "merge": None if settings is None else asdict(settings),
        "pipeline": type(pipe).__name__,
        "tomesd": tomesd.__version__,
        "torch": torch.__version__,
    }
    step_seconds = min(after - before for before, after in itertools.pairwise(clock))
    return Sample(image, cost["seconds"], step_seconds, cost["peak_mib"], metadata)


def save_image(image: Image.Image, path: Path, metadata: dict[str, Any] | None = None) -> None:
    """Writes a PNG in one go: an interruption leaves the old file or none, never half of one."""
    info = PngImagePlugin.PngInfo()
    if metadata is not None:
        # A schedule may be a function, and a mask a tensor: for those, words have to do.
        info.add_text(METADATA_KEY, json.dumps(metadata, default=str))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        image.save(part, format="PNG", pnginfo=info)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def checked_size(pipe: Any, size: tuple[int, int] | None) -> tuple[int, int]:
    scale = getattr(pipe, "vae_scale_factor", 8)
    if size is None:
        side = denoiser(pipe).config.sample_size
        height, width = (side, side) if isinstance(side, int) else side
        return width * scale, height * scale
    for name, value in zip(("width", "height"), size, strict=True):
        if value < 8 * scale or value % (2 * scale):
            raise ValueError(
                f"{name}={value}: must be a multiple of {2 * scale} and at least {8 * scale}"
            )
    return size


def _callback(
    clock: list[float], device: torch.device, on_step: Callable[[int], None] | None
) -> Callable[..., dict[str, Any]]:
    """Notes on `clock` when each step ends, and tells `on_step`."""

    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        clock.append(time.perf_counter())
        if on_step is not None:
            on_step(step + 1)
        return values

    return callback


@contextmanager
def measured(device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds and peak memory of the block, filled in when it ends."""
    cost: dict[str, float] = {}
    with _gpu_peak(device) if device.type == "cuda" else process_peak() as peak:
        start = time.perf_counter()
        yield cost
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        cost["seconds"] = time.perf_counter() - start
    cost["peak_mib"] = peak[0] / 2**20


@contextmanager
def _gpu_peak(device: torch.device) -> Iterator[list[float]]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, peak = torch.cuda.memory_allocated(device), [0.0]
    yield peak
    peak[0] = torch.cuda.max_memory_allocated(device) - before


@contextmanager
def process_peak() -> Iterator[list[float]]:
    """Peak of the process's resident memory, looked at every few milliseconds."""
    _return_free_memory()
    process, done = psutil.Process(), threading.Event()
    before = process.memory_info().rss
    peak = [0.0]

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def _return_free_memory() -> None:
    """Has the C library give back what it keeps for later, where it can: it would hide a peak."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
