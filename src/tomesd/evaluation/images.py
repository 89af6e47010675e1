"""Makes the images of a run, batch by batch."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from types import ModuleType
from typing import Any

import torch

import tomesd

from ..generation import Sampling, sample_batch, save_image
from ..generation.loading import denoiser
from ..generation.progress import OnProgress
from ..generation.sampling import Batch, estimate_seconds, image_metadata
from .processes import Processes
from .prompts import Item
from .runs import Definition, Run, Task, describe_cpu, package_versions
from .variants import Variant, patched_with

OnEstimate = Callable[[float, int], None]
"""Called with about how many seconds the images take that are to be made, and their number."""


def define(
    pipe: Any,
    *,
    model: dict[str, Any],
    prompts: str,
    items: Sequence[Item],
    variants: Sequence[Variant],
    batch: int = 8,
    size: tuple[int, int] | None = None,
    command: str = "",
    **sampling: Any,
) -> Definition:
    """What a run of `pipe` is, which gets the scheduler that is asked for.

    Args:
        model: how `pipe` was loaded.
        prompts: where they are from.
        size: width and height; the model's own if None.
        command: the line that started it.
        sampling: other fields of `Sampling`.
    """
    if batch < 1:
        raise ValueError(f"batch={batch}: must be at least 1")
    return Definition(
        model=model,
        sampling=Sampling.of(pipe, size, **sampling),
        prompts=prompts,
        items=tuple(items),
        batch=batch,
        variants=tuple(variants),
        device=device_name(pipe),
        versions=versions(),
        dtype=str(denoiser(pipe).dtype).removeprefix("torch."),
        started=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        command=command,
    )


def make_images(
    pipe: Any,
    run: Run,
    definition: Definition,
    processes: Processes,
    on_progress: OnProgress,
    original: ModuleType | None = None,
    on_estimate: OnEstimate | None = None,
) -> None:
    """Makes what is missing. May be stopped at any time, and called again.

    A batch that was cut off is run whole again, and only its missing images are written: the
    numbers in an image can depend on the size of the batch in the last bit.
    """
    tasks = processes.from_main(run.missing(definition) if processes.is_main else [])
    # All variants of a batch in one process, one after the other: times that compare.
    mine = [task for task in tasks if task.batch % processes.count == processes.rank]
    total = sum(len(task.missing) for task in mine)
    if total and on_estimate is not None:
        seconds = estimate_seconds(pipe, definition.sampling, min(definition.batch, total))
        on_estimate(len(mine) * seconds, total)
    seen, done = set[int](), 0
    for group in _patched_together(mine, definition):
        variant = definition.variants[group[0].variant]
        with patched_with(pipe, variant, original):
            for task in group:
                on_step = _on_step(on_progress, definition, task, done, total)
                items = definition.batches()[task.batch]
                prompts, seeds = [item.prompt for item in items], [item.seed for item in items]
                made = sample_batch(pipe, prompts, seeds, definition.sampling, on_step)
                # The first batch of a variant may be slow: memory is got, kernels are made.
                note = {"first": task.variant not in seen, "process": processes.rank}
                _save(pipe, run, definition, task, made, note)
                seen.add(task.variant)
                done += len(task.missing)


def _on_step(
    on_progress: OnProgress, definition: Definition, task: Task, done: int, total: int
) -> Callable[[int], None]:
    """Tells `on_progress` of the part of a task that is done."""

    def on_step(step: int) -> None:
        share = min(1.0, step / definition.sampling.steps)  # PLMS has a step more
        name = definition.variants[task.variant].name
        on_progress(name, done + share * len(task.missing), total)

    return on_step


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


def _metadata(pipe: Any, definition: Definition, variant: Variant, item: Item) -> dict[str, Any]:
    """All it takes to make the image again, and nothing that differs from run to run."""
    kind = "original" if variant.kind == "original" else "merge"
    return {
        "model": definition.model["model"],
        **image_metadata(pipe, item.prompt, item.seed, definition.sampling),
        "batch": definition.batch,
        "variant": variant.name,
        "merge": None,
        kind: variant.settings or None,
    }


def device_name(pipe: Any) -> str:
    device = denoiser(pipe).device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return describe_cpu() if device.type == "cpu" else str(device.type)


def versions() -> dict[str, str]:
    """Of what the images depend on."""
    others = package_versions("torch", "diffusers", "transformers")
    return {"tomesd": tomesd.__version__, **others}
