"""The whole of an evaluation: what a run is, its images batch by batch, scores, table."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from itertools import groupby
from types import ModuleType
from typing import Any

from ..generation import Sampling, sample_batch, save_image
from ..generation.loading import denoiser, need
from ..generation.progress import OnProgress, silent
from ..generation.sampling import Batch, estimate_seconds, image_metadata
from .processes import Processes
from .prompts import Item
from .results import Result, write_results
from .runs import Definition, Run, Task, device_name, versions
from .scoring import ImageSet, Judges, Reference, score
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


def evaluate(
    pipe: Any,
    run: Run,
    definition: Definition,
    judges: Judges,
    *,
    reference: Reference | None = None,
    original: ModuleType | None = None,
    processes: Processes | None = None,
    extend: bool = False,
    on_progress: OnProgress = silent,
    on_estimate: OnEstimate | None = None,
) -> list[Result]:
    """Makes and scores the images that a run lacks; returns its table, in the main process.

    Other processes get an empty list.

    Args:
        pipe: the pipeline of the definition, its scheduler set.
        reference: real images for FID and KID, beside the unmerged ones.
        original: tomesd 0.1.3, if the definition has variants of it.
        extend: allow variants that the run did not have when it was started.
        on_estimate: told how long the images will take, before they are made.
    """
    need("scipy", "torchmetrics")
    processes = processes or Processes()
    if reference is not None and not any(m.against == "reference" for m in judges.metrics):
        raise ValueError("reference: needs the Inception network, which was left out")
    if processes.is_main:
        definition = run.open(definition, extend=extend)
    definition = processes.from_main(definition)
    _make_images(pipe, run, definition, processes, on_progress, original, on_estimate)
    processes.wait()
    sets = [ImageSet.of_variant(run, definition, v, judges) for v in definition.variants]
    if reference is not None:
        sets.append(ImageSet.of_reference(reference, judges))
    score(run, sets, judges, processes, on_progress)
    processes.wait()
    if not processes.is_main:
        return []
    return write_results(run, definition, judges, reference, on_progress)


def _make_images(
    pipe: Any,
    run: Run,
    definition: Definition,
    processes: Processes,
    on_progress: OnProgress,
    original: ModuleType | None,
    on_estimate: OnEstimate | None,
) -> None:
    """Makes what is missing. May be stopped at any time, and called again.

    A batch that was cut off is run whole again, and only its missing images are written: the
    numbers in an image can depend on the size of the batch in the last bit.
    """
    tasks = processes.from_main(run.missing(definition) if processes.is_main else [])
    # All variants of a batch in one process, one after the other: times that compare.
    mine = [task for task in tasks if task.batch % processes.count == processes.rank]
    if definition.model.get("compile"):  # code is compiled for one patch
        mine.sort(key=lambda task: definition.variants.index(task.variant))
    sampling, total = definition.sampling, sum(len(task.missing) for task in mine)
    if total and on_estimate is not None:
        seconds = estimate_seconds(pipe, sampling, min(definition.batch, total))
        on_estimate(len(mine) * seconds, total)
    seen, done = set[str](), 0

    def on_step(step: int, task: Task, before: int) -> None:
        share = min(1.0, step / sampling.steps)  # PLMS has a step more
        on_progress(task.variant.name, before + share * len(task.missing), total)

    for variant, group in groupby(mine, key=lambda task: task.variant):
        with patched_with(pipe, variant, original):
            for task in group:
                prompts, seeds = zip(*((i.prompt, i.seed) for i in task.items), strict=True)
                told = partial(on_step, task=task, before=done)
                made = sample_batch(pipe, prompts, seeds, sampling, told)
                # The first batch of a variant may be slow: memory is got, kernels are made.
                note = {"first": variant.name not in seen, "process": processes.rank}
                _save(pipe, run, definition, task, made, note)
                seen.add(variant.name)
                done += len(task.missing)


def _save(
    pipe: Any, run: Run, definition: Definition, task: Task, made: Batch, note: dict[str, Any]
) -> None:
    """Writes the images that are missing, and a line for each."""
    places = [task.items.index(item) for item in task.missing]

    def save(place: int) -> None:
        item, variant = task.items[place], task.variant
        # All it takes to make the image again, and nothing that differs from run to run.
        metadata = {
            "model": definition.model["model"],
            **image_metadata(pipe, item.prompt, item.seed, definition.sampling),
            "batch": definition.batch,
            "variant": variant.name,
            "merge": None,
            "original" if variant.kind == "original" else "merge": variant.settings or None,
        }
        save_image(made.images[place], run.image_path(variant, item.index), metadata)

    with ThreadPoolExecutor() as pool:
        list(pool.map(save, places))
    for place in places:
        record = {
            "variant": task.variant.name,
            "index": task.items[place].index,
            "batch": task.batch,
            "images": len(task.items),
            "seconds": made.seconds,
            "step_seconds": made.mean_step_seconds,
            "peak_mib": made.peak_mib,
            "flagged": made.flagged[place],
            **note,
        }
        run.add_record(note["process"], record)
