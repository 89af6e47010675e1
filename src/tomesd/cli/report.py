"""tomesd report: a run of `tomesd eval` as a page to look at."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..files import check_writable
from .options import warn


@dataclass(frozen=True)
class Report:
    """Write a run of tomesd eval as one HTML page: plots, tables, and images side by side."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    worst: int | None = None
    """How many of the images that merging changed most to show. If not given, a quarter of them,
    and 8 at most."""
    typical: int | None = None
    """How many from the middle. If not given, half as many."""

    def run(self, console: Console) -> None:
        from ..evaluation import Run
        from ..evaluation.report import write_report

        check_writable(self.folder, "folder", folder=True)
        path, missing = write_report(Run(self.folder), worst=self.worst, typical=self.typical)
        for words in missing:
            warn(words)
        console.print(f"{path}  {path.stat().st_size / 1e6:.1f} MB, with everything in it")
        console.print(f"{self.folder / 'figures'}  its plots")
