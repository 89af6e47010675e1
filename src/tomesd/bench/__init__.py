"""Timing and memory of models with and without merging.

    subject = load_subject("sdxl")                     a model, here with random weights
    case = Case("sdxl", 1024, 1024, variants=(...))    a setting, and what is compared in it
    measure_case(subject, case, Effort(seconds=5))     one row per variant

Needs the extra `cli`.
"""

from ..generation.original import load_original
from .measure import Effort
from .models import ARCHITECTURES, Subject, load_subject
from .modes import MODES
from .rows import RowFile, read_rows
from .run import Case, Prepared, Subjects, measure_case, prepare, run_cases
from .tables import comparisons, recovered
from .variants import Variant

__all__ = [
    "ARCHITECTURES",
    "MODES",
    "Case",
    "Effort",
    "Prepared",
    "RowFile",
    "Subject",
    "Subjects",
    "Variant",
    "comparisons",
    "load_original",
    "load_subject",
    "measure_case",
    "prepare",
    "read_rows",
    "recovered",
    "run_cases",
]
