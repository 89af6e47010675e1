"""How many tokens to remove on a grid, and whether that pays. Nothing here has a state."""

import functools
from dataclasses import dataclass

import torch

from .cost import Device, Launcher, find_launcher, merging_pays
from .grids import cells_of, level_merges, level_of, removable
from .settings import Settings
from .state import Call, Decision, Grid, LeftAlone

__all__ = ["Work", "decide", "explain_nothing"]

Removes = tuple[tuple[tuple[str, ...], int], ...]


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
    """What merges in the blocks on a grid; it is noted in the call."""
    settings = call.settings
    decision = Decision(grid, work.blocks, {}, number=len(call.decisions))
    decision.level = level_of(call.size, grid[1:])
    decision.removes = _removes(call, decision)
    call.decisions.append(decision)
    if decision.removes and settings.when == "if_faster":
        decision.left_alone = _reason_to_leave(settings, decision, work)
        if decision.left_alone != "":
            decision.removes = {}
    return decision


def _removes(call: Call, decision: Decision) -> dict[tuple[str, ...], int]:
    settings, (frames, *grid) = call.settings, decision.grid
    # In a UNet, the first attention is the finest.
    finest = call.decisions[0].grid if call.decisions else decision.grid
    level = decision.level
    named = settings.level_ratios is not None and level in settings.level_ratios
    if not settings.active or not (
        named or level_merges(settings.max_downsample, call.size, finest[1:], tuple(grid))
    ):
        return {}
    ratio = settings.ratio if call.ratio is None else call.ratio
    cells = cells_of(settings, *grid)
    # By ratio, because tokens may be symbols to the compiler, which it would have to look up.
    kinds: dict[float, tuple[str, ...]] = {}
    for kind in settings.kinds:
        wanted = settings.ratio_of(kind, level, ratio)
        kinds[wanted] = (*kinds.get(wanted, ()), kind)
    removes = {kinds: removable(settings, cells, wanted) for wanted, kinds in kinds.items()}
    return {kinds: frames * remove for kinds, remove in removes.items() if remove > 0}


def _reason_to_leave(settings: Settings, decision: Decision, work: Work) -> LeftAlone:
    pays = _pays.__wrapped__ if torch.compiler.is_compiling() else _pays
    # The rule looks at settings that are numbers and words.
    what = (
        cells_of(settings, *decision.grid[1:]),
        tuple(decision.removes.items()),
        settings.target or "attn",
        settings.share or "block",
        settings.proportional,
        work,
    )
    if pays(find_launcher(work.device), *what):
        return ""
    return "pays in CUDA graphs only" if pays("graph", *what) else "not faster"


@functools.lru_cache(maxsize=1024)
def _pays(
    launcher: Launcher, cells, removes: Removes, target: str, share: str, proportional: bool, work: Work
) -> bool:
    return merging_pays(
        Device.of(work.device, launcher),
        batch=work.batch,
        channels=work.channels,
        cells=cells,
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
