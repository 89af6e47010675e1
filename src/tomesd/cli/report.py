"""tomesd report: a run of `tomesd eval` as a page to look at."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from ..evaluation import Run
from ..evaluation.report import write_report


@dataclass(frozen=True)
class Report:
    """Write a run of tomesd eval as one HTML page: plots, tables, and images side by side."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    worst: int = 8
    """How many of the images that merging changed most to show."""
    typical: int = 4
    """How many from the middle."""

    def run(self, console: Console) -> None:
        path = write_report(Run(self.folder), worst=self.worst, typical=self.typical)
        console.print(f"{path}  {path.stat().st_size / 1e6:.1f} MB, with everything in it")
        console.print(f"{self.folder / 'figures'}  its plots")
