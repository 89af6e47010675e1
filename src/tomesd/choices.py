"""Choices that commands and functions offer, without what it takes to carry them out."""

from typing import Literal

__all__ = ["DEMO_MODEL", "Dtype", "Mode", "Offload"]

DEMO_MODEL = "demo"
"""Name of the embedded model."""

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Offload = Literal["none", "model", "sequential"]

Mode = Literal[
    "eager",
    "compile",
    "compile-reduce-overhead",
    "compile-autotune",
    "compile-max-autotune",
    "compile-max-autotune-no-cudagraphs",
    "graph",
]
"""How a model runs when it is measured."""
