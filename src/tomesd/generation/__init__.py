"""Loading pipelines, making images with and without merging, and pictures of what was merged.

What the commands do, as functions. Needs the extra `cli`.
"""

from .comparison import ImageComparison, RatioSummary, compare
from .hires import Hires, hires, redraw
from .loading import LoadError, load_pipeline
from .maps import MergeMap, draw_map, map_of_image, record_maps, sample_with_maps
from .sampling import Sample, Sampling, sample, sample_batch, save_image

__all__ = [
    "Hires",
    "ImageComparison",
    "LoadError",
    "MergeMap",
    "RatioSummary",
    "Sample",
    "Sampling",
    "compare",
    "draw_map",
    "hires",
    "load_pipeline",
    "map_of_image",
    "record_maps",
    "redraw",
    "sample",
    "sample_batch",
    "sample_with_maps",
    "save_image",
]
