"""How the cost of matching grows with the tokens: time and memory of making one plan.

Nothing is merged with it. Tokens are random. On a GPU, plans are replayed as CUDA graphs.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from common import Ready, compare, replayed
from torch import Tensor

from tomesd import Settings
from tomesd.bench import Effort, load_original
from tomesd.bench.measure import free_memory
from tomesd.bench.modes import EAGER, GRAPH
from tomesd.bench.rows import Row
from tomesd.generation.memory import MemoryProbe
from tomesd.kernels import Cells
from tomesd.plan import MergePlan
from tomesd.segments import cut_grid, plan_segments
from tomesd.selectors import bipartite, removable

SIDES, CHANNELS = (32, 48, 64, 96, 128, 192, 256), 320
"""Of the finest level of SD 1.5."""
LARGE_SIDES, LARGE_CHANNELS = (32, 64, 128, 256, 512), (3072, 5120)
"""Of transformers."""
FRAMES = 16
"""Of videos with as many tokens as squares of these sides."""
RATIO = 0.5

Makers = Mapping[str, Callable[[], Any]]
"""By label."""


def image_rows(folder: str | None, device: torch.device) -> Iterator[Row]:
    """Each library; destinations are the top left tokens of 2x2 cells."""
    cuda = device.type == "cuda"
    for side in SIDES:
        x = torch.randn(2, side * side, CHANNELS, generator=torch.Generator().manual_seed(0))
        x = x.to(device, torch.float16 if cuda else torch.float32)
        makers: dict[str, Callable[[], Any]] = {}
        ours = {"triton": ("triton", 8), "triton, one window": ("triton", 0)} if cuda else {}
        for label, (backend, window) in {**ours, "reference": ("reference", 8)}.items():
            cells = Cells.of(side, side, 2, 2, window)
            remove = cells.removable(RATIO)
            makers[label] = partial(bipartite, x, cells, remove, backend=backend)
        if folder is not None:
            match = load_original(folder).merge.bipartite_soft_matching_random2d
            args = (x, side, side, 2, 2, int(side * side * RATIO))
            makers["original"] = partial(match, *args, no_rand=True)
        yield from plan_rows((1, side, side), x, makers)


def volume_rows(device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """Images, and videos with as many tokens."""
    settings = Settings()
    remove = partial(removable, settings, ratio=RATIO)
    for side in LARGE_SIDES:
        for channels in LARGE_CHANNELS:
            x = torch.randn(1, side * side, channels, device=device, dtype=dtype)
            for grid, st in (((1, side, side), 1), ((FRAMES, side // 4, side // 4), 2)):
                parts = cut_grid(grid, settings.sy, settings.sx, st, settings.search, remove)
                make = partial(plan_segments, x, parts, select)
                for row in plan_rows(grid, x, {f"{channels} channels": make}):
                    yield {**row, "frames": grid[0], "settings": {"ratio": RATIO, "st": st}}


def select(metric: Tensor, cells: Cells, remove: int, _: int) -> MergePlan:
    return bipartite(metric, cells, remove)


def plan_rows(grid: tuple[int, int, int], x: Tensor, makers: Makers) -> Iterator[Row]:
    """Of plans of tokens `[B, N, C]` on a grid.

    Args:
        grid: frames, height and width.
    """

    def prepare(make: Callable[[], Any]) -> Ready:
        make()
        peak = MemoryProbe(x.device).peak_mib(make)
        return replayed(make, x.device), {"peak_mib": peak}

    effort = Effort(seconds=0.5, min_repeats=3, sample_seconds=0.02)
    ready = {label: partial(prepare, make) for label, make in makers.items()}
    for label, result in compare(ready, x.device, effort).items():
        yield {
            **{"section": "matching", "model": "random tokens", "what": "plan"},
            "setting": f"{'x'.join(map(str, grid[grid[0] == 1 :]))} tokens",
            **{"height": grid[1], "width": grid[2], "images": 1, "batch": len(x)},
            **{"tokens": x.shape[1], "channels": x.shape[2]},
            **{"dtype": str(x.dtype).removeprefix("torch."), "attention": "none"},
            **{"mode": GRAPH if x.is_cuda else EAGER, "label": label},
            **{"variant": "original" if label == "original" else "tomesd"},
            **{"settings": {"ratio": RATIO}, **result},
        }
    free_memory(x.device)
