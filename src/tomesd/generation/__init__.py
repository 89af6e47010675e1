"""Loading pipelines, making images with and without merging, and pictures of what was merged.

What the commands do, as functions. Needs the extra `cli`.
"""

from .comparison import Comparison, Row, compare
from .loading import LoadError, load_pipeline
from .maps import MergeMap, draw_map, map_of_image, record_maps
from .sampling import Sample, sample, save_image

__all__ = [
    "Comparison",
    "LoadError",
    "MergeMap",
    "Row",
    "Sample",
    "compare",
    "draw_map",
    "load_pipeline",
    "map_of_image",
    "record_maps",
    "sample",
    "save_image",
]
