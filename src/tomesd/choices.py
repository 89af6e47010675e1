"""Choices that commands and functions offer, without what it takes to carry them out."""

from typing import Literal

DEMO_MODEL = "transformer"
"""The embedded model that is taken where none is named."""

EMBEDDED = {"transformer": 4.0, "unet": 5.0}
"""Names of the embedded models, with their own guidance."""

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
