"""Tables and figures of the documents, by name."""

from . import performance, quality
from .figures import FIGURES
from .rows import Results, Table

__all__ = ["FIGURES", "TABLES", "Results", "Table"]

TABLES = {**performance.TABLES, **quality.TABLES}
