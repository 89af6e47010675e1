"""When merging pays: an estimate of what it saves and what it costs in a block.

The estimate knows shapes and the kind of device, and takes no measurements: the same model on the
same machine always merges the same layers. What it has to get right is the sign, far from the
break-even, so the numbers are round ones; docs/performance.md shows what they lead to.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from .kernels import Cells

__all__ = ["Device", "Launcher", "find_launcher", "merging_pays"]

# Share of the matrix units' peak that layers of this size reach, and how many operations they do in
# the time that one byte takes to move.
_EFFICIENCY = 0.45
_OPERATIONS_PER_BYTE = 120

# Dense half-precision Tflop/s of a multiprocessor, by compute capability. ROCm has numbers of its
# own, in which (9, 0) is no Hopper.
_TFLOPS_PER_MULTIPROCESSOR = {
    (7, 0): 1.6,
    (7, 5): 0.9,
    (8, 0): 2.9,
    (8, 6): 0.9,
    (8, 9): 1.3,
    (9, 0): 7.5,
    (10, 0): 15.0,
    (12, 0): 1.2,
}
_TFLOPS_PER_ROCM_MULTIPROCESSOR = {(9, 0): 1.7, (9, 4): 4.3}  # MI200, MI300


Launcher = Literal["eager", "compiled", "graph"]
"""Who starts kernels: PyTorch, the code that torch.compile makes, or a CUDA graph."""

# Microseconds that a slow host takes to start a kernel, and to have a block make a plan and merge
# by it. On a fast host, layers that take about as long as that are left alone that would gain a
# little.
_HOST: dict[Launcher, tuple[float, float]] = {
    "eager": (50.0, 700.0),
    "compiled": (20.0, 80.0),
    "graph": (0.0, 0.0),
}


def find_launcher(device: torch.device) -> Launcher:
    """Who will start the kernels of what runs or is traced now."""
    if torch.compiler.is_compiling():
        return "graph" if _compiles_to_graphs() else "compiled"
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return "graph" if capturing else "eager"


def _compiles_to_graphs() -> bool:
    """Whether torch.compile runs in a mode that replays CUDA graphs.

    PyTorch has no public way to ask; where this one is closed, the answer is no.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
    except (AttributeError, ImportError):
        return False
    compiler = getattr(compiler, "_torchdynamo_orig_backend", compiler)
    config = getattr(compiler, "config", None)
    return isinstance(config, dict) and bool(config.get("triton.cudagraphs"))


# Constant to the compiler; see kept.py.
_compiles_to_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _gpu_operations(index: int) -> float:
    """Operations per microsecond of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    on_nvidia = torch.version.hip is None
    known = _TFLOPS_PER_MULTIPROCESSOR if on_nvidia else _TFLOPS_PER_ROCM_MULTIPROCESSOR
    per_unit = known.get((properties.major, properties.minor), 1.0)
    return _EFFICIENCY * per_unit * properties.multi_processor_count * 1e6


# Constant to the compiler; see kept.py.
_gpu_operations._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Device:
    """How fast a device is, in what a microsecond holds."""

    operations: float
    """Floating-point operations per microsecond."""
    bytes: float
    """Bytes moved per microsecond."""
    launch: float = 0.0
    """Microseconds that a kernel takes at least."""
    host: float = 0.0
    """Microseconds that the host needs to start a kernel, when it is not replayed from a graph."""
    plan: float = 0.0
    """And to make a plan."""

    @classmethod
    def of(cls, device: torch.device, launcher: Launcher) -> "Device":
        if device.type == "cpu":
            return cls(operations=1e5, bytes=4e4)
        cuda = device.type == "cuda"
        rate = _gpu_operations(device.index or 0) if cuda else 1e7
        host, plan = _HOST[launcher if cuda else "eager"]  # only CUDA has graphs
        return cls(rate, rate / _OPERATIONS_PER_BYTE, launch=2.5, host=host, plan=plan)

    def time(self, operations: float, moved: float, kernels: int) -> float:
        """Microseconds until kernels are done, whether they or their launches take longer."""
        device = operations / self.operations + moved / self.bytes + kernels * self.launch
        return max(device, kernels * self.host)


@dataclass(frozen=True)
class _Layer:
    """Cost of a kind of layer on N tokens of C channels: per token N C^2, and per pair N^2 C."""

    per_token: float
    per_pair: float
    kernels: int

    def operations(self, queries: int, keys: int, channels: int) -> float:
        """Floating-point operations on an image. Keys and values are half of the linear layers."""
        linear = self.per_token * channels * (queries + keys) / 2
        return channels * (linear + self.per_pair * queries * keys)


# Linear layers cost 2 C^2 per token: attention has four, cross-attention two on image tokens, and
# the feed-forward layer, with its gate, twelve. Kernels are those that diffusers launches.
_LAYERS = {
    "attn": _Layer(per_token=8, per_pair=4, kernels=6),
    "crossattn": _Layer(per_token=4, per_pair=0, kernels=6),
    "mlp": _Layer(per_token=24, per_pair=0, kernels=4),
}
# Attention that is not fused writes its scores, reads and writes them for the softmax, and reads
# them again.
_SCORE_PASSES = 4
# Launches of matching, small windows and large ones.
_MATCH_KERNELS = (3, 4)
_WIDENING_KERNELS = 10


# A UNet comes through each of its levels in about so many stacks of blocks.
_STACKS_PER_LEVEL = 5


def _waits_for_the_host(
    device: Device,
    batch: int,
    tokens: int,
    channels: int,
    blocks: int,
    model_blocks: int,
    score: int,
) -> bool:
    """Whether the model takes as long as the host needs to launch its kernels.

    Then no layer gets faster by doing less. Linear layers do about as many operations at every
    level of a UNet; attention is large only at the finest.

    Args:
        score: bytes that attention moves for a pair of tokens.
    """
    per_token = sum(layer.per_token for layer in _LAYERS.values())
    linear = model_blocks * batch * tokens * per_token * channels**2
    level_blocks = min(model_blocks, _STACKS_PER_LEVEL * blocks)
    pairs = level_blocks * batch * tokens**2 * _LAYERS["attn"].per_pair * channels
    moved = level_blocks * tokens**2 * score
    kernels = model_blocks * sum(layer.kernels for layer in _LAYERS.values())
    return (linear + pairs) / device.operations + moved / device.bytes < kernels * device.host


def merging_pays(
    device: Device,
    batch: int,
    channels: int,
    cells: Cells,
    removes: dict[tuple[str, ...], int],
    target: str,
    blocks: int,
    model_blocks: int,
    uses: int,
    item_size: int,
    proportional: bool = False,
    score_heads: int = 0,
    tokens: int | None = None,
) -> bool:
    """Whether a block is faster with merged tokens.

    Args:
        cells: of an image, or of a frame.
        removes: tokens to remove, by the kinds of layers that have a plan in common.
        target: of the settings.
        blocks: that follow each other.
        model_blocks: all blocks of the model.
        uses: blocks that share one matching.
        item_size: bytes of a number.
        proportional: whether attention is.
        score_heads: heads of self-attention that writes its scores to memory; 0 if it is fused.
        tokens: of all frames and references; None: of one image.
    """
    tokens = cells.tokens if tokens is None else tokens
    row = batch * channels * item_size
    score = _SCORE_PASSES * batch * score_heads * item_size
    if _waits_for_the_host(device, batch, tokens, channels, blocks, model_blocks, score):
        return False
    saved = 0.0
    kinds = [(kind, remove) for kinds, remove in removes.items() for kind in kinds]
    for kind, remove in kinds:
        layer, left = _LAYERS[kind], tokens - remove
        keys_only = kind == "attn" and target == "kv"
        queries = tokens if keys_only else left
        reduced = layer.operations(queries, left, channels)
        # Merging reads all tokens and writes those left; restoring does the reverse.
        kernels = 1 if keys_only else 2
        moved = kernels * (tokens + left) * row
        if target in ("block", "stack"):  # once for all layers
            moved //= len(kinds) * (blocks if target == "stack" else 1)
            kernels = 0
        if proportional and kind == "attn":  # queries, keys and values are copied into wider heads
            moved += 2 * (queries + 2 * left) * row
            kernels += _WIDENING_KERNELS
        scores = score * tokens**2 if kind == "attn" else 0
        moved += score * queries * left if kind == "attn" else 0
        full = batch * layer.operations(tokens, tokens, channels)
        saved += device.time(full, scores, layer.kernels)
        saved -= device.time(batch * reduced, moved, layer.kernels + kernels)
    if target == "stack":
        uses = blocks
    comparing = 2.0 * batch * cells.comparisons * (tokens / cells.tokens) * channels
    launches = _MATCH_KERNELS[0 if cells.window.fits_one_program else 1]
    matching = max(device.time(comparing, 2 * tokens * row, launches), device.plan)
    return saved > len(removes) * matching / uses
