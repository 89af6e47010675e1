"""Measures what merging costs and what it does to images: runs that resume, metrics, a report.

What `tomesd eval` and `tomesd report` do, as functions. Needs the extra `eval`.
"""

from .evaluate import evaluate
from .metrics import Estimate
from .processes import Processes
from .prompts import Item, load_prompts, make_items
from .results import Result, read_results
from .runs import Definition, Run, Sampling
from .sampling import define
from .scoring import Judges, Reference
from .variants import Variant, load_original, make_variants, parse_vary

__all__ = [
    "Definition",
    "Estimate",
    "Item",
    "Judges",
    "Processes",
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
