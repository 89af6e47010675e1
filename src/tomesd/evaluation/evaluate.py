"""The whole of an evaluation: images, scores, table."""

from types import ModuleType
from typing import Any

from ..generation.progress import OnProgress, silent
from .images import OnEstimate, make_images
from .needs import need
from .processes import Processes
from .results import Result, write_results
from .runs import Definition, Run
from .scoring import ImageSet, Judges, Reference, score


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
    make_images(pipe, run, definition, processes, on_progress, original, on_estimate)
    processes.wait()
    sets = [ImageSet.of_variant(run, definition, v, judges) for v in definition.variants]
    if reference is not None:
        sets.append(ImageSet.of_reference(reference, judges))
    score(run, sets, judges, processes, on_progress)
    processes.wait()
    if not processes.is_main:
        return []
    return write_results(run, definition, judges, reference, on_progress)
