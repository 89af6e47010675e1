"""Timing and memory of models with and without merging.

    subject = load_subject("sdxl")                     a model, here with random weights
    case = Case("sdxl", 1024, 1024, contenders=(...))  a setting, and what is compared in it
    measure_case(subject, case, Effort(seconds=5))     one row per contender

Needs the extra `cli`.
"""

from ..generation.original import load_original
from .cases import Case, Subjects, measure_case, prepare, run_cases
from .contenders import Contender
from .measure import Effort
from .models import ARCHITECTURES, Subject, load_subject
from .modes import MODES
from .rows import RowFile, read_rows
from .tables import comparisons, recovered
from .together import Prepared

__all__ = [
    "ARCHITECTURES",
    "MODES",
    "Case",
    "Contender",
    "Effort",
    "Prepared",
    "RowFile",
    "Subject",
    "Subjects",
    "comparisons",
    "load_original",
    "load_subject",
    "measure_case",
    "prepare",
    "read_rows",
    "recovered",
    "run_cases",
]
