"""Selectors decide which tokens belong together: a metric on a grid becomes a `MergePlan`.

Each is a value that can be called, and that knows what the rest of the library has to know about
it. A new one is a class here, and a name in `allowed.Selector`.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import kernels
from .kernels import Cells, Draw, Lists, Request, reference
from .plan import MergePlan
from .settings import Settings


class Selector(ABC):
    """Makes plans. Instances have no state: what differs is what they are."""

    name: ClassVar[str]

    operator: ClassVar[str] = ""
    """The operator of `tomesd` that makes its plans where PyTorch looks on, if there is one."""

    even_windows: ClassVar[bool] = False
    """Whether it removes the same number of tokens from each window."""

    fixed: ClassVar[bool] = False
    """Whether plans depend on shapes alone: all items have the same one, at every step. It need not
    be kept from step to step, nor does it matter what the metric is."""

    def __call__(
        self,
        metric: Tensor,
        cells: Cells,
        remove: int,
        *,
        backend: str = "auto",
        timestep: Tensor | None = None,
        key: int = -1,
    ) -> MergePlan:
        """A plan that removes `remove` tokens.

        Args:
            metric: what similarity is measured on, by cosine, `[B, N, C]`.
            remove: at most `cells.sources`, and with `even_windows` a multiple of `cells.windows`.
            backend: "auto", "triton" or "reference".
            timestep, key: what is drawn depends on them; see `Draw`.
        """
        request = Request(cells, remove, Draw(timestep, key))
        return self._make(metric, request, kernels.use_triton(backend, metric))

    def _make(self, metric: Tensor, request: Request, triton: bool) -> MergePlan:
        n = request.cells.tokens
        plan = MergePlan.empty(metric.shape[0], n, n - request.remove, metric.device, triton)
        self.write(plan, metric, request)
        return plan

    @abstractmethod
    def write(self, plan: MergePlan, metric: Tensor, request: Request) -> None:
        """Writes to `plan`, which has `N - request.remove` slots, unless it is still fresh."""

    @abstractmethod
    def comparisons(self, cells: Cells, remove: int) -> int:
        """Pairs of tokens that are compared to make a plan."""

    @abstractmethod
    def launches(self, cells: Cells) -> int:
        """About how many kernels a GPU runs to make a plan."""


class Bipartite(Selector):
    """The selector of the paper: bipartite soft matching on a grid of cells."""

    name = "bipartite"
    operator = "match_tokens"

    def write(self, plan: MergePlan, metric: Tensor, request: Request) -> None:
        kernels.match_tokens(metric, request, plan.lists, plan.triton)

    def comparisons(self, cells: Cells, remove: int) -> int:
        return cells.comparisons

    def launches(self, cells: Cells) -> int:
        return 3 if cells.window.fits_one_program else 4


class KMeans(Selector):
    """Clusters of like tokens, the same number in each window.

    Spherical k-means (Dhillon and Modha, Concept decompositions, 2001). The clusters start from the
    destinations of `bipartite`, and from as many of its sources as are needed, spread evenly.
    """

    name = operator = "kmeans"
    even_windows = True

    rounds: ClassVar[int] = 3
    """How often tokens are assigned to clusters: a fixed number, so that programs stay static."""

    def write(self, plan: MergePlan, metric: Tensor, request: Request) -> None:
        _write_clusters(metric, request, plan.lists, plan.triton)

    def comparisons(self, cells: Cells, remove: int) -> int:
        clusters = (cells.tokens - remove) // cells.windows
        return self.rounds * remove * clusters

    def launches(self, cells: Cells) -> int:
        return 170


def _cluster_tokens(metric: Tensor, request: Request, lists: Lists, triton: bool) -> None:
    """See `KMeans` and `Selector.write`."""
    cells = request.cells

    def make() -> Lists:
        batch, n, channels = metric.shape
        slots, windows = n - request.remove, cells.windows
        clusters = slots // windows
        offsets = request.draw.offsets(cells, batch, metric.device)
        seeds, others = _seeds(cells, clusters, offsets)
        tokens = torch.cat([seeds, others], dim=2).expand(batch, -1, -1).flatten(1)
        # Each window is an image of its own, [B * W, ...], its seeds first.
        unit = reference.slot_gather(reference.direction(metric), tokens)
        unit = unit.view(batch * windows, -1, channels)
        label = cluster(unit, clusters, KMeans.rounds, triton).view(batch, windows, -1)
        label = label + torch.arange(windows, device=metric.device)[:, None] * clusters
        slot = torch.empty_like(tokens).scatter_(1, tokens, label.flatten(1))
        return kernels.list_members(slot, slots, tokens)

    request.fill(lists, make)


# Compilers take it in as it is: where two clusters are nearly as similar to a token, other
# roundings of the same sums would give other plans.
_write_clusters = kernels.opaque_operator("kmeans", _cluster_tokens)


def _seeds(cells: Cells, clusters: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The token each cluster begins with, and all others: `[T, windows, clusters or rest]`.

    Args:
        clusters: in each window.
        offsets: see `Cells.split`, `[T, cells.count]`.
    """
    src, dst = cells.split(offsets)
    turn = _spread(src // cells.w, src % cells.w).argsort(dim=2, stable=True)
    src = src.gather(2, turn)
    more = clusters - dst.shape[2]
    return torch.cat([dst, src[..., :more]], dim=2), src[..., more:]


def cluster(tokens: Tensor, clusters: int, rounds: int, triton: bool = False) -> Tensor:
    """Assigns tokens to clusters. The seeds never leave theirs, so none is ever empty.

    Args:
        tokens: unit vectors, or zero, `[B, N, C]`; the first `clusters` are the seeds.

    Returns:
        The cluster of each token, `[B, N]`, int64.
    """
    batch, n, channels = tokens.shape
    own = torch.arange(clusters, device=tokens.device).expand(batch, -1)
    others = tokens[:, clusters:]
    # A tile of scores as large as the tokens themselves: below what the layer needs anyway. Where
    # they have few channels, a megabyte, or tiles would be many.
    tile = max(1, max(n * channels, 2**18) // clusters)
    label, centres = own, tokens[:, :clusters]
    for number in range(rounds):
        if number > 0:
            mean = kernels.slot_mean(tokens, kernels.list_members(label, clusters), triton)
            centres = reference.direction(mean)
        label = torch.cat([own, reference.best_match(others, centres, tile)[1]], dim=1)
    return label


class Grid(Selector):
    """The selector that does not look: whole cells, spread evenly over the image.

    Where tokens are merged, they are, as in downsampling (Smith et al., ToDo: Token Downsampling
    for Efficient Generation of High-Resolution Images, 2024), but by their mean. The last of the
    cells may be merged in part. Windows do not matter. Tokens left over at the edges join the cell
    next to them if all the cells together are not enough.
    """

    name = "grid"
    fixed = True

    def _make(self, metric: Tensor, request: Request, triton: bool) -> MergePlan:
        lists = _grid_lists(metric, request.cells, request.remove)
        return MergePlan(*lists, triton, shared=True)

    def write(self, plan: MergePlan, metric: Tensor, request: Request) -> None:
        lists = _grid_lists(metric, request.cells, request.remove)
        request.fill(plan.lists, lambda: lists)
        plan.shared = True

    def comparisons(self, cells: Cells, remove: int) -> int:
        return 0

    def launches(self, cells: Cells) -> int:
        return 0  # but for the first time


def _grid_lists(metric: Tensor, cells: Cells, remove: int) -> Lists:
    """The lists of a grid plan for a batch like that of `metric`, found or made."""
    batch, device, stream = metric.shape[0], metric.device, 0
    if torch.compiler.is_compiling() or type(metric) is not Tensor:
        return _make_grid(batch, cells, remove, device)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return _make_grid(batch, cells, remove, device)  # the graph has to own its memory
        stream = torch.cuda.current_stream(device).cuda_stream
    return _known_grid(batch, cells, remove, device, stream)


# By stream too: another one would have to wait until the lists are written.
@functools.lru_cache(maxsize=16)
def _known_grid(batch: int, cells: Cells, remove: int, device: torch.device, stream: int) -> Lists:
    with torch.inference_mode(False):  # what inference mode makes can only be used there
        return _make_grid(batch, cells, remove, device)


def _make_grid(batch: int, cells: Cells, remove: int, device: torch.device) -> Lists:
    whole = Cells(cells.h, cells.w, cells.sy, cells.sx)
    # In windows that cells do not fill, there are fewer of them, and more can be removed.
    slot = _grid_slots(whole if remove <= whole.sources else cells, remove, device)
    # Slots list their tokens by number, and the token of a cell that stays is its first.
    one = kernels.list_members(slot[None], cells.tokens - remove)
    return Lists(*(part.repeat(batch, *[1] * (part.ndim - 1)) for part in one))


def _grid_slots(cells: Cells, remove: int, device: torch.device) -> Tensor:
    """Slot of each token, `[N]`. Slots are numbered in the order of the tokens that stay.

    Tokens are removed by turn: those in cells first, cell by cell, then those left over at the
    edges of windows. The first token of a cell, into which the others merge, comes last.
    """
    top, below = _first_in_cell(cells.h, cells.down, cells.sy, device)
    left, beside = _first_in_cell(cells.w, cells.across, cells.sx, device)
    home = top[:, None] * cells.w + left
    turn = _spread((top // cells.sy)[:, None], left // cells.sx)
    left_over = (below >= cells.sy)[:, None] | (beside >= cells.sx)
    stays = (below[:, None] + beside) == 0
    turn = torch.where(left_over, turn + _MASK + 1, turn)
    turn = torch.where(stays, 2 * (_MASK + 1), turn).flatten()
    # The tokens of a cell have the same turn, so all of them go before the next cell begins.
    place = turn.argsort(stable=True).argsort()
    kept = place >= remove
    number = kept.cumsum(0) - 1
    return torch.where(kept, number, number[home.flatten()])


def _first_in_cell(
    side: int, windows: int, cell: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Along one side of the grid: where the cell of each place begins, and how far it is from
    there, `[side]` each. What is left over at the end of a window goes to its last cell."""
    place = torch.arange(side, device=device)
    each = side // windows
    inside = place % each
    first = (inside // cell).clamp(max=each // cell - 1) * cell
    return place - inside + first, inside - first


# Powers of 1 / 1.3247..., the plastic number, in units of 2^-31: the plane's golden ratio.
_DOWN, _ACROSS = 1621087445, 1223722707
_MASK = 0x7FFFFFFF


def _spread(row: Tensor, column: Tensor) -> Tensor:
    """Numbers the places of a grid so that the first few, however few, lie evenly all over it.

    (The R2 sequence of M. Roberts, read as a lattice. Whole numbers: the same on every device.)

    Returns:
        Distinct numbers in `[0, 2^31)`, not consecutive, to be sorted by.
    """
    return (row * _DOWN + column * _ACROSS) & _MASK


bipartite, kmeans, grid = Bipartite(), KMeans(), Grid()

SELECTORS: dict[str, Selector] = {one.name: one for one in (bipartite, kmeans, grid)}
"""By name, as `settings.selector` says it."""


def removable(settings: Settings, cells: Cells, ratio: float) -> int:
    """Tokens that a ratio removes from an image."""
    # Attention that is not fused is much slower where its scores are no multiple of 16 bytes. The
    # window of the paper means its numbers too, and of few tokens, a few more are many.
    exact = settings.window == 0 or cells.tokens < 512
    even = SELECTORS[settings.selector].even_windows
    return cells.removable(ratio, even=even, multiple=1 if exact else 8)


def plan_flops() -> dict[Any, Callable[..., int]]:
    """By operator, the floating-point operations of a plan, for PyTorch's `FlopCounterMode`."""

    def count(selector: Selector, metric: Sequence[int], *shapes: Any, **_: Any) -> int:
        batch, channels, numbers = metric[0], metric[2], shapes[-2]
        request = Request.of_numbers(numbers)
        return 2 * batch * channels * selector.comparisons(request.cells, request.remove)

    return {
        getattr(torch.ops.tomesd, one.operator): functools.partial(count, one)
        for one in SELECTORS.values()
        if one.operator
    }
