"""The whole of an evaluation: images, scores, table."""

from types import ModuleType
from typing import Any

from .needs import need
from .processes import Processes
from .progress import Progress, Silent
from .results import Result, write_results
from .runs import Definition, Run
from .sampling import make_images
from .scoring import Judges, Reference, score_images, score_reference

__all__ = ["evaluate"]


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
    progress: Progress | None = None,
) -> list[Result]:
    """Makes and scores the images that a run lacks; returns its table, in the main process.

    Other processes get an empty list.

    Args:
        pipe: the pipeline of the definition, its scheduler set.
        reference: real images for FID and KID, beside the unmerged ones.
        original: tomesd 0.1.3, if the definition has variants of it.
        extend: allow variants that the run did not have when it was started.
    """
    need("scipy", "torchmetrics")
    processes, progress = processes or Processes(), progress or Silent()
    if reference is not None and judges.inception is None:
        raise ValueError("reference: needs the Inception network, which was left out")
    if processes.is_main:
        definition = run.open(definition, extend=extend)
        run.end_broken_lines()
    definition = processes.from_main(definition)
    make_images(pipe, run, definition, processes, original=original, progress=progress)
    processes.wait()
    score_images(run, definition, judges, processes, progress)
    if reference is not None:
        score_reference(run, reference, judges, processes, progress)
    processes.wait()
    if not processes.is_main:
        return []
    return write_results(run, definition, judges.keys, reference, progress, judges.device)
