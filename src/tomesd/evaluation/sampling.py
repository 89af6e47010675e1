"""Makes the images of a run, batch by batch."""

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
from PIL import Image

import tomesd

from ..generation import save_image
from ..generation.loading import denoiser
from ..generation.sampling import checked_size, measured
from .processes import Processes
from .progress import Progress
from .prompts import Item
from .runs import Definition, Run, Sampling, Task
from .variants import Variant, patched_with

__all__ = ["Batch", "define", "make_images", "sample_batch", "set_scheduler", "versions"]


@dataclass(frozen=True)
class Batch:
    images: tuple[Image.Image, ...]
    seconds: float
    peak_mib: float
    """Beyond what was in use before."""
    flagged: tuple[bool, ...]
    """Which ones the model's safety checker has blacked out."""


def sample_batch(
    pipe: Any,
    items: Sequence[Item],
    sampling: Sampling,
    on_step: Callable[[float], None] | None = None,
) -> Batch:
    """One call of the pipeline; every image has a generator of its own.

    Args:
        on_step: called with the share of the steps that is done, 0 to 1.
    """
    options: dict[str, Any] = {
        "height": sampling.height,
        "width": sampling.width,
        "num_inference_steps": sampling.steps,
        "guidance_scale": sampling.guidance,
        # Drawn on the CPU, the noise is the same whatever the device.
        "generator": [torch.Generator("cpu").manual_seed(item.seed) for item in items],
    }
    if "negative_prompt" in inspect.signature(pipe.__call__).parameters:
        options["negative_prompt"] = [sampling.negative_prompt] * len(items)
    if on_step is not None:
        options["callback_on_step_end"] = _callback(on_step)
    with torch.no_grad(), measured(denoiser(pipe).device) as cost:
        output = pipe([item.prompt for item in items], **options)
    flagged = getattr(output, "nsfw_content_detected", None) or [False] * len(items)
    return Batch(tuple(output.images), cost["seconds"], cost["peak_mib"], tuple(map(bool, flagged)))


def _callback(on_step: Callable[[float], None]) -> Callable[..., dict[str, Any]]:
    def callback(pipe: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        on_step((step + 1) / pipe.num_timesteps)
        return values

    return callback


def define(
    pipe: Any,
    *,
    model: dict[str, Any],
    prompts: str,
    items: Sequence[Item],
    variants: Sequence[Variant],
    batch: int = 8,
    size: tuple[int, int] | None = None,
    **sampling: Any,
) -> Definition:
    """What a run of `pipe` is, and puts in the scheduler that it asks for.

    Args:
        model: how `pipe` was loaded.
        prompts: where they are from.
        size: width and height; the model's own if None.
        sampling: other fields of `Sampling`.
    """
    width, height = checked_size(pipe, size)
    chosen = Sampling(width, height, **sampling)
    for name, value in (("steps", chosen.steps), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    set_scheduler(pipe, chosen.scheduler)
    return Definition(
        model=model,
        sampling=chosen,
        prompts=prompts,
        items=tuple(items),
        batch=batch,
        variants=tuple(variants),
        device=device_name(pipe),
        versions=versions(),
    )


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


def make_images(
    pipe: Any,
    run: Run,
    definition: Definition,
    processes: Processes,
    *,
    original: ModuleType | None = None,
    progress: Progress,
) -> None:
    """Makes what is missing. May be stopped at any time, and called again.

    A batch that was cut off is run whole again, and only its missing images are written: the
    numbers in an image can depend on the size of the batch in the last bit.
    """
    tasks = processes.from_main(run.missing(definition) if processes.is_main else [])
    # All variants of a batch in one process, one after the other: times that compare.
    mine = [task for task in tasks if task.batch % processes.count == processes.rank]
    progress.start(sum(len(task.missing) for task in mine))
    batches, seen, done = definition.batches(), set[int](), 0
    for group in _patched_together(mine, definition):
        variant = definition.variants[group[0].variant]
        with patched_with(pipe, variant, original):
            for task in group:
                on_step = _on_step(progress, variant, done, len(task.missing))
                made = sample_batch(pipe, batches[task.batch], definition.sampling, on_step)
                # The first batch of a variant may be slow: memory is got, kernels are made.
                note = {"first": task.variant not in seen, "process": processes.rank}
                _save(pipe, run, definition, task, made, note)
                seen.add(task.variant)
                done += len(task.missing)


def _patched_together(tasks: list[Task], definition: Definition) -> list[list[Task]]:
    """Each task with a patch of its own, in the given order; but compiled code is for one patch."""
    if not definition.model.get("compile"):
        return [[task] for task in tasks]
    places = range(len(definition.variants))
    groups = [[task for task in tasks if task.variant == place] for place in places]
    return [group for group in groups if group]


def _save(
    pipe: Any, run: Run, definition: Definition, task: Task, made: Batch, note: dict[str, Any]
) -> None:
    """Writes the images that are missing, and a line for each."""
    variant, items = definition.variants[task.variant], definition.batches()[task.batch]
    places = [place for place, item in enumerate(items) if item.index in task.missing]

    def save(place: int) -> None:
        metadata = _metadata(pipe, definition, variant, items[place])
        save_image(made.images[place], run.image_path(variant, items[place].index), metadata)

    with ThreadPoolExecutor() as pool:
        list(pool.map(save, places))
    for place in places:
        record = {
            "variant": variant.name,
            "index": items[place].index,
            "batch": task.batch,
            "images": len(items),
            "seconds": made.seconds,
            "peak_mib": made.peak_mib,
            "flagged": made.flagged[place],
            **note,
        }
        run.add_record(note["process"], record)


def _on_step(
    progress: Progress, variant: Variant, done: int, count: int
) -> Callable[[float], None]:
    return lambda share: progress.update(variant.name, done + share * count)


def _metadata(pipe: Any, definition: Definition, variant: Variant, item: Item) -> dict[str, Any]:
    """All it takes to make the image again, and nothing that differs from run to run."""
    return {
        "model": definition.model["model"],
        "prompt": item.prompt,
        "seed": item.seed,
        **asdict(definition.sampling),
        "batch": definition.batch,
        "variant": variant.name,
        "merge": variant.settings if variant.kind == "merged" else None,
        **({"original": variant.settings} if variant.kind == "original" else {}),
        "pipeline": type(pipe).__name__,
        "tomesd": tomesd.__version__,
        "torch": torch.__version__,
    }


def device_name(pipe: Any) -> str:
    device = denoiser(pipe).device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(device.type)


def versions() -> dict[str, str]:
    """Of what the images depend on."""
    found = {"tomesd": tomesd.__version__}
    for name in ("torch", "diffusers", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
