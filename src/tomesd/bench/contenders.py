"""What is compared: the model as it is, this library, the original, and the bound."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..api import apply_patch
from ..generation.original import load_original, original_options
from ..hosts import find_models
from ..kernels import Cells
from ..patch import patch_of
from ..selectors import Selector
from ..settings import Settings

UNPATCHED, OURS, ORIGINAL, FREE = "unpatched", "tomesd", "original", "free"

# A plan that is used longer is taken to be kept for the whole image.
_LONGEST_PERIOD = 16


@dataclass(frozen=True)
class Contender:
    """One way to run a model.

    `free` is the bound: the same tokens are removed in the same layers, but nothing is matched, and
    as little as possible is moved. No way of choosing tokens can be faster.
    """

    kind: str
    """"unpatched", "tomesd", "original" or "free"."""
    settings: Settings | None = None
    label: str = ""
    """How tables call it, where there are several of a kind."""
    folder: str | None = None
    """Of the original: where the package `tomesd` lies."""

    def __str__(self) -> str:
        return self.label or self.kind

    def apply(self, model: nn.Module) -> None:
        """Patches `model`."""
        if self.kind == UNPATCHED:
            return
        if self.settings is None:
            raise ValueError(f"contender={self.kind!r}: needs settings")
        if self.kind == ORIGINAL:
            self._apply_original(model, self.settings)
            return
        apply_patch(model, **asdict(self.settings))
        if self.kind == FREE:
            for part in find_models(model):
                patch = patch_of(part.module)
                assert patch is not None
                patch.selector = FreeSelector()

    def _apply_original(self, model: nn.Module, settings: Settings) -> None:
        if self.folder is None:
            raise ValueError(f"contender={self.kind!r}: needs the folder that it lies in")
        original = load_original(self.folder)
        options = original_options(original, settings)
        if settings.max_downsample is None:
            options["max_downsample"] = _finest_level(model)
        original.apply_patch(model, **options)

    @property
    def period(self) -> int:
        """Calls after which this library has done all that it does every few steps."""
        settings = self.settings
        if self.kind != OURS or settings is None:
            return 1
        steps = settings.reuse or (settings.refresh if settings.share == "steps" else 1)
        return steps if steps <= _LONGEST_PERIOD else 1


def _finest_level(model: nn.Module) -> int:
    """What `max_downsample=None` means: the original has to be told."""
    kinds = [str(kind) for kind in getattr(model, "config", {}).get("down_block_types", ())]
    return 2 ** next((level for level, kind in enumerate(kinds) if "CrossAttn" in kind), 0)


class FreePlan:
    """Keeps the first M of N tokens, and puts them back where they were.

    M rows are read and M rows are written, in one kernel, each way.
    """

    shared = True  # by all items of the batch

    def __init__(self, tokens: int, kept: int, buffers: dict[Any, Tensor], start: int = 0):
        self.tokens = tokens
        self.kept = kept
        self._buffers = buffers
        self._start = start
        self.slot = torch.empty(1, tokens, device="meta")  # asked for its shape alone

    def placed(self, start: int, length: int) -> "FreePlan":
        """The plan of a longer sequence, in which the tokens begin at `start`."""
        return FreePlan(self.tokens, self.kept, self._buffers, start)

    def rows(self, start: int | None = None, length: int = 0) -> "FreePlan":
        """What `pick` is asked of; see `MergePlan.rows`."""
        return self if start is None else self.placed(start, length)

    def pick(self, rows: Tensor, dim: int = 1, *, batched: bool = True) -> Tensor:
        """The rows of the tokens that are kept, and of all others in the sequence."""
        first, end = self._start + self.kept, self._start + self.tokens
        kept, rest = rows.narrow(dim, 0, first), rows.shape[dim] - end
        return torch.cat([kept, rows.narrow(dim, end, rest)], dim) if rest else kept.contiguous()

    def restore(self, x: Tensor, y: Tensor, merged: Tensor) -> Tensor:
        """Adds what the kept tokens gained: `[B, N, C]`."""
        gained, restored = y - merged, x.clone()
        first, end = self._start + self.kept, self._start + self.tokens
        restored[:, :first] += gained[:, :first]
        restored[:, end:] += gained[:, first:]
        return restored

    def fits(self, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[1] == self.tokens

    def merge(self, x: Tensor) -> Tensor:
        """`[B, N, C]` to `[B, M, C]`."""
        return self.pick(x)

    def unmerge(self, y: Tensor) -> Tensor:
        """`[B, M, C]` to `[B, N, C]`. The rows from M on were zeroed once and stay so.

        The result is overwritten by the next call: what it is added to has its own copy by then.
        """
        key = (y.shape[0], self.tokens, self.kept, y.shape[2], y.dtype, y.device)
        if key not in self._buffers:
            shape = (y.shape[0], self.tokens, y.shape[2])
            self._buffers[key] = torch.zeros(shape, dtype=y.dtype, device=y.device)
        buffer = self._buffers[key]
        buffer[:, : self.kept] = y
        return buffer


class FreeSelector(Selector):
    """Makes free plans; they share their buffers."""

    name = "free"
    fixed = True

    def __init__(self) -> None:
        self._buffers: dict[Any, Tensor] = {}

    def __call__(self, metric: Tensor, cells: Cells, remove: int, **_: Any) -> Any:
        return FreePlan(cells.tokens, cells.tokens - remove, self._buffers)

    def write(self, *_: Any, **__: Any) -> None:
        raise TypeError("free plans cannot be kept")

    def comparisons(self, cells: Cells, remove: int) -> int:
        return 0

    def launches(self, cells: Cells) -> int:
        return 0
