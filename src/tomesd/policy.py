"""How many tokens to remove on a grid, and whether that pays. Nothing here has a state."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cost import Device, find_launcher, merging_pays
from .grids import cells_of, level_merges, level_of, removable
from .kernels import Cells
from .settings import Settings
from .state import Call, Decision, Grid, LeftAlone, Segment, tokens_removed
from .volume import Volume

__all__ = ["Layout", "LayoutPart", "Work", "decide", "decide_layout", "explain_nothing"]


@dataclass(frozen=True)
class LayoutPart:
    tokens: int
    grid: Grid | None = None
    """None: not on a grid, and so left alone."""
    reference: bool = False
    """Whether it is a reference image, whose output is discarded."""


@dataclass(frozen=True)
class Layout:
    """What a transformer's sequence of image tokens is made of."""

    size: tuple[int, int]
    """Height and width of the latent."""
    grid: Grid
    """Of the image or video that is made."""
    parts: tuple[LayoutPart, ...]
    start: Tensor | None = None
    """Where they begin in a joint sequence, `[B]`, if items differ in that."""

    axes: tuple[int, ...] | None = None
    """How to turn what the model gets into `[B, C, F, H, W]`, if it is not that."""

    @property
    def tokens(self) -> int:
        return sum([part.tokens for part in self.parts])

    def tokens_of(self, latent: Any) -> Tensor:
        """What the model makes tokens of, in their order: `[B, N, C]`.

        Args:
            latent: `[B, N, C]`, `[B, C, H, W]` or `[B, C, F, H, W]`; or a list of its items.
                Tokens that are not in it are zeros.
        """
        if not isinstance(latent, Tensor):
            latent = torch.stack(list(latent))
        if latent.ndim in (3, 6):  # packed: tokens, or patches [B, N, C, 1, 2, 2]
            return latent.flatten(2)
        if self.axes is not None:
            latent = latent.permute(self.axes)
        if latent.ndim == 4:
            latent = latent.unsqueeze(2)
        (batch, channels, frames), (t, h, w) = latent.shape[:3], self.grid
        made = sum([part.tokens for part in self.parts if not part.reference])
        if made % (h * w) == 0:  # frames that are given count too
            t = made // (h * w)
        # Whole patches: models leave out what is over, or pad what is missing.
        sides = ((frames, t), (latent.shape[3], h), (latent.shape[4], w))
        long, high, wide = (max(1, (2 * side + n) // (2 * n)) for side, n in sides)
        more = (w * wide - latent.shape[4], h * high - latent.shape[3], t * long - frames)
        latent = F.pad(latent, (0, more[0], 0, more[1], 0, more[2]))
        patches = latent.reshape(batch, channels, t, long, h, high, w, wide)
        tokens = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, t * h * w, -1)
        return F.pad(tokens, (0, 0, 0, self.tokens - t * h * w))


@dataclass(frozen=True)
class Work:
    """Blocks that work on one grid, as far as it matters to whether merging pays."""

    device: torch.device
    item_size: int
    """Bytes of a number."""
    batch: int
    channels: int
    blocks: int
    """That follow each other."""
    model_blocks: int
    """All blocks of the model."""
    score_heads: int = 0
    """Heads of self-attention that writes its scores to memory; 0 if it is fused."""


def decide(call: Call, grid: Grid, work: Work) -> Decision:
    """What merges in the blocks of a UNet on a grid; it is noted in the call."""
    settings, size = call.settings, grid[1:]
    level = level_of(call.size, size)
    # In a UNet, the first attention is the finest.
    finest = call.decisions[0].grid if call.decisions else grid
    named = settings.level_ratios is not None and level in settings.level_ratios
    segments: dict[tuple[str, ...], tuple[Segment, ...]] = {}
    if named or level_merges(settings.max_downsample, call.size, finest[1:], size):
        # By ratio, because tokens may be symbols to the compiler, which it would have to look up.
        kinds: dict[float, tuple[str, ...]] = {}
        for kind in settings.kinds:
            wanted = settings.ratio_of(kind, level, _ratio(call))
            kinds[wanted] = (*kinds.get(wanted, ()), kind)
        segments = {k: (_segment(settings, grid, wanted),) for wanted, k in kinds.items()}
    return _decide(call, Decision(grid, work.blocks, size[0] * size[1], segments), work)


def decide_layout(call: Call, layout: Layout, work: Work) -> Decision:
    """What merges in the blocks of a transformer; it is noted in the call."""
    settings, ratio = call.settings, _ratio(call)
    of_references = ratio if settings.reference_ratio is None else settings.reference_ratio
    parts = []
    for part in layout.parts:
        wanted = of_references if part.reference else ratio
        if part.grid is None or call.ratio == 0:  # nothing merges at this time
            parts.append(Segment(part.tokens))
        else:
            parts.append(_segment(settings, part.grid, wanted))
    decision = Decision(layout.grid, work.blocks, layout.tokens, {settings.kinds: tuple(parts)})
    decision.start = layout.start
    return _decide(call, decision, work)


def _decide(call: Call, decision: Decision, work: Work) -> Decision:
    """Drops what removes nothing, finds out whether the rest pays, and notes the decision."""
    settings = call.settings
    decision.level = level_of(call.size, decision.grid[1:])
    decision.number = len(call.decisions)
    decision.segments = {
        kinds: parts
        for kinds, parts in decision.segments.items()
        if settings.active and tokens_removed(parts) > 0
    }
    call.decisions.append(decision)
    if decision.segments and settings.when == "if_faster":
        decision.left_alone = _reason_to_leave(settings, decision, work)
    return decision


def _ratio(call: Call) -> float:
    return call.settings.ratio if call.ratio is None else call.ratio


def _segment(settings: Settings, grid: Grid, ratio: float) -> Segment:
    """Tokens on a grid, of which a ratio is to be removed."""
    volume = Volume.of(grid, settings.sy, settings.sx, settings.st or 1, settings.search)
    removes = tuple([removable(settings, part.cells, ratio) for part in volume.parts])
    return Segment(volume.tokens, volume, removes)


def _reason_to_leave(settings: Settings, decision: Decision, work: Work) -> LeftAlone:
    pays = _pays.__wrapped__ if torch.compiler.is_compiling() else _pays
    # The rule looks at settings that are numbers and words.
    what = (
        cells_of(settings, *decision.grid[1:]),
        decision.tokens,
        tuple([(kinds, tokens_removed(s)) for kinds, s in decision.segments.items()]),
        settings.target or "attn",
        settings.share or "block",
        settings.proportional,
        work,
    )
    if pays(Device.of(work.device, find_launcher(work.device)), *what):
        return ""
    in_graph = pays(Device.of(work.device, "graph"), *what)
    return "pays in CUDA graphs only" if in_graph else "not faster"


@functools.lru_cache(maxsize=1024)
def _pays(
    device: Device,
    cells: Cells,
    tokens: int,
    removes: tuple[tuple[tuple[str, ...], int], ...],
    target: str,
    share: str,
    proportional: bool,
    work: Work,
) -> bool:
    return merging_pays(
        device,
        batch=work.batch,
        channels=work.channels,
        cells=cells,
        tokens=tokens,
        removes=dict(removes),
        target=target,
        blocks=work.blocks,
        model_blocks=work.model_blocks,
        uses=1 if share == "block" else work.blocks,
        item_size=work.item_size,
        proportional=proportional,
        score_heads=work.score_heads,
    )


def explain_nothing(call: Call) -> str:
    """Why a call merged nothing, in a sentence for the user."""
    settings = call.settings
    reasons = [decision.left_alone for decision in call.decisions]
    if "pays in CUDA graphs only" in reasons:
        return (
            "tomesd merged nothing: at this image and batch size, the host, which launches every "
            "kernel, is expected to take longer than merging saves; where CUDA graphs are "
            'replayed, as with torch.compile(mode="reduce-overhead"), merging pays. when="always" '
            "merges all the same"
        )
    if "not faster" in reasons:
        return (
            "tomesd merged nothing: at this image and batch size, finding out what to merge takes "
            'longer than merging saves; when="always" merges all the same'
        )
    if "attention is cached" in reasons:
        return (
            "tomesd merged nothing: a cache keeps what attention gave at one step for others "
            "(TaylorSeer, pyramid attention broadcast, FasterCache), at which other tokens would "
            "be merged. Caches of whole blocks (first block cache, MagCache) go with merging"
        )
    if torch.compiler.is_compiling():  # numbers may be symbols there, and cannot be told
        return "tomesd merged nothing: the settings leave nothing to merge at this image size"
    where = f"at latent size {call.size[0]}x{call.size[1]}"
    if call.decisions:
        _, h, w = call.decisions[0].grid
        where += f", where the finest attention has {h}x{w} tokens"
    ratio = settings.ratio if call.ratio is None else call.ratio
    return (
        f"tomesd merged nothing {where}: max_downsample={settings.max_downsample}, "
        f"ratio={ratio:g} and {settings.sx}x{settings.sy} cells leave nothing to merge"
    )
