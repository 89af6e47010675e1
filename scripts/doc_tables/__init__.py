"""Tables and figures of the documents, by name."""

from . import figures, performance, quality, readme
from .rows import Results, Table

__all__ = ["FIGURES", "TABLES", "Results", "Table"]

TABLES = {
    "demo": performance.demo,
    "options": readme.options,
    "speed": performance.speed,
    "large images": performance.hires,
    "quality": readme.quality,
    "memory on a CPU": performance.memory_cpu,
    "transformers": performance.transformers,
    "graph": performance.graph,
    "eager": performance.eager,
    "compiled": performance.compiled,
    "the paper's set-up": performance.paper_speed,
    "batches": performance.batches,
    "sdxl": performance.sdxl,
    "whole images": performance.pipelines,
    "speed of presets": performance.presets,
    "memory": performance.memory,
    "matching": performance.matching,
    "rule": performance.rule,
    "wrong signs": performance.wrong_signs,
    "rule elsewhere": performance.rule_elsewhere,
    "cheaper matching": performance.sharing,
    "cpu": performance.cpu,
    "the paper's ratios": quality.paper,
    "windows": quality.windows,
    "quality against speed": quality.front,
    "quality of presets": quality.preset_quality,
    "search": quality.search,
    "trade-offs": quality.tradeoffs("transformer", 512),
    "defaults": quality.defaults,
    **{name: quality.ablation(name) for name in ("partition", "layers", "levels", "schedule")},
    "other algorithms": quality.other_algorithms,
}

FIGURES = {
    "performance/graph.svg": figures.graph,
    "performance/eager.svg": figures.eager,
    "performance/matching.svg": figures.matching,
    "quality/paper.svg": figures.paper,
    "quality/front.svg": figures.front,
    "quality/tradeoffs.svg": figures.tradeoffs,
    "quality/search.svg": figures.search,
}
