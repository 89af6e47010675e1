"""Measures what merging costs and what it does to images: runs that resume, metrics, a report.

What `tomesd eval` and `tomesd report` do, as functions. Needs the extra `eval`.
"""

from ..generation import Sampling
from ..generation.original import load_original
from .estimates import Estimate
from .evaluate import define, evaluate
from .metrics import METRICS, QualityMetric
from .processes import Processes
from .prompts import Item, load_prompts, make_items
from .results import Result, read_results
from .runs import Definition, Run
from .scoring import Judges, Reference
from .variants import Variant, make_variants, parse_vary

__all__ = [
    "METRICS",
    "Definition",
    "Estimate",
    "Item",
    "Judges",
    "Processes",
    "QualityMetric",
    "Reference",
    "Result",
    "Run",
    "Sampling",
    "Variant",
    "define",
    "evaluate",
    "load_original",
    "load_prompts",
    "make_items",
    "make_variants",
    "parse_vary",
    "read_results",
]
