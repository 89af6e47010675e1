"""Triton decides when it is imported, by whichever test, whether it interprets its kernels."""

import os

os.environ["TRITON_INTERPRET"] = "1"
