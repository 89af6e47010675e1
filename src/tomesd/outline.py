"""What a model does in a call, counted from its modules: no model is run for it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Layers:
    """What layers do for each token, and for each pair of tokens."""

    operations: float = 0.0
    """Operations for a token."""
    pairs: float = 0.0
    """Operations for a pair of a query and a key."""
    numbers: float = 0.0
    """Numbers read and written for a token."""
    kernels: int = 0

    def __add__(self, other: "Layers") -> "Layers":
        return Layers(
            self.operations + other.operations,
            self.pairs + other.pairs,
            self.numbers + other.numbers,
            self.kernels + other.kernels,
        )


@dataclass(frozen=True)
class Level:
    """The transformer blocks of a model that work on grids of one size."""

    scale: int
    """How many times smaller than the latent its feature maps are."""
    patch_size: int
    """Side of the square of a feature map that is one token."""
    channels: int
    """Of a token."""
    blocks: int
    stacks: int
    """Runs of blocks that follow each other."""
    kinds: dict[str, Layers]
    """What its blocks do; "rest" is what is in none of the layers that can be merged alone."""


@dataclass(frozen=True)
class Outline:
    """What a model is made of, as far as its speed goes."""

    levels: tuple[Level, ...] = ()
    """Finest first."""
    around: tuple[tuple[int, Layers], ...] = ()
    """What is around the blocks, by how many times smaller than the latent it is."""


# Layers by the name of the attribute of a block, the first that fits. What works on the text, or on
# one vector for the whole image, does little: its kernels count alone.
_KINDS = (
    ("", re.compile(r"context|add_|txt|text|caption|mod|ada|emb|temporal")),
    ("rest", re.compile(r"^norm")),
    ("crossattn", re.compile(r"attn2|cross")),
    ("attn", re.compile(r"att|to_q|qkv")),
    ("mlp", re.compile(r"ff|mlp|feed|net")),
    ("rest", re.compile("")),
)
_TEXT = re.compile(r"to_[kv]$|_[kv]$|to_kv$|kv_linear$")
_QUERIES = re.compile(r"(to_q|to_qkv|qkv|q_proj|query|\bq)$")
_NORM = re.compile("Norm")
# Kernels beside those of linear layers and norms: attention and a sum, a gate and a sum.
_MORE_KERNELS = {"attn": 2, "crossattn": 2, "mlp": 3}
_KEYS_OF_TEXT = 77


def count_layers(block: nn.Module) -> dict[str, Layers]:
    """What a transformer block does, by kind of layer."""
    found: dict[str, Layers] = {}
    for name, module in block.named_modules():
        counted = _count(module)
        if counted is None:
            continue
        kind = next(kind for kind, pattern in _KINDS if pattern.search(name))
        # A linear layer in a norm makes its shift and scale, from one vector for the whole image.
        of_vector = name.startswith("norm") and counted.operations > 0
        of_text = kind == "crossattn" and _TEXT.search(name)
        if not kind or of_vector or of_text:
            kind, counted = "rest", Layers(kernels=2)
        if kind not in found and kind in _MORE_KERNELS:
            counted += Layers(kernels=_MORE_KERNELS[kind])
        if _QUERIES.search(name) and isinstance(module, nn.Linear):
            width = module.out_features // (3 if "qkv" in name else 1)
            if kind == "crossattn":
                counted += Layers(operations=4.0 * width * _KEYS_OF_TEXT)
            elif kind == "attn":
                attention = block.get_submodule(name.rpartition(".")[0])
                counted += Layers(pairs=_pairs(width, _heads(attention, width)))
        found[kind] = found.get(kind, Layers()) + counted
    return found


# Softmax takes about as long as so many channels of a head.
_SOFTMAX = 128


def _pairs(width: int, heads: int) -> float:
    """Operations for a query and a key, in those of heads of 64 channels, which rates are of."""
    return 4.0 * 64 * heads * (width / heads + _SOFTMAX) / (64 + _SOFTMAX)


def _heads(attention: nn.Module, width: int) -> int:
    """Heads of attention; of 64 channels each, if it does not say."""
    for name in ("heads", "num_heads", "n_heads"):
        found = getattr(attention, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return max(1, width // 64)


# A convolution takes about as long as a linear layer with so many times its operations.
_CONVOLUTION = 2.0


def _count(module: nn.Module) -> Layers | None:
    """What one layer does for a token; what is computed number by number around it included."""
    inner = getattr(module, "weight", None)
    if inner is None or any(True for _ in module.children()):
        return None
    if _NORM.search(type(module).__name__):
        return Layers(numbers=2.0 * inner.numel(), kernels=1)
    if inner.ndim < 2 or isinstance(module, nn.Embedding):
        return None
    take, give = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(take, int) and isinstance(give, int):  # quantized weights are packed
        return Layers(2.0 * take * give, 0.0, 2.0 * (take + give), 1)
    ends = 2.0 * (inner.shape[0] + inner.shape[1])
    return Layers(2.0 * _CONVOLUTION * inner.numel(), 0.0, ends, 1)


# Modules that are no part of what runs on the latent.
_ASIDE = re.compile(r"emb|time|hint|label|text|caption|context|txt|controlnet_down|zero_conv")


def outline_model(
    model: nn.Module, stacks: Iterable[tuple[nn.Module, Sequence[nn.Module], int]]
) -> Outline:
    """Counts what a model does.

    Args:
        stacks: its runs of blocks: the module that gets the feature map, its blocks, and the side
            of the square of pixels that is one token.
    """
    known = {id(module): (blocks, size) for module, blocks, size in stacks}
    by_grid: dict[tuple[int, int], list[Sequence[nn.Module]]] = {}
    around: dict[int, Layers] = {}
    inside: set[int] = set()
    for name, module, scale in _with_scale(model):
        if id(module) in inside:
            continue
        if id(module) in known:
            blocks, size = known[id(module)]
            inside |= {id(part) for block in blocks for part in block.modules()}
            by_grid.setdefault((scale, size), []).append(blocks)
            continue
        counted = _count(module)
        if counted is not None and not _ASIDE.search(name):
            more = Layers(numbers=0.5 * counted.numbers, kernels=1)  # an activation, a sum
            around[scale] = around.get(scale, Layers()) + counted + more
    levels = [_level(scale, size, runs) for (scale, size), runs in by_grid.items()]
    levels.sort(key=lambda level: level.scale * level.patch_size)
    return Outline(tuple(levels), tuple(sorted(around.items())))


def outline_blocks(blocks: Sequence[nn.Module]) -> Outline:
    """Counts what a run of blocks does that is, about, the whole model."""
    return Outline((_level(1, 1, [blocks]),))


def _level(scale: int, patch_size: int, stacks: Sequence[Sequence[nn.Module]]) -> Level:
    kinds: dict[str, Layers] = {}
    blocks = [block for stack in stacks for block in stack]
    for block in blocks:
        for kind, layers in count_layers(block).items():
            kinds[kind] = kinds.get(kind, Layers()) + layers
    return Level(scale, patch_size, _width(blocks), len(blocks), len(stacks), kinds)


def _width(blocks: Sequence[nn.Module]) -> int:
    """Channels of a token: what the first linear layer of attention takes."""
    for name, module in blocks[0].named_modules():
        if "att" in name and isinstance(getattr(module, "in_features", None), int):
            return int(module.in_features)
    return 1024


def _with_scale(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """All modules in the order they run, and how many times smaller than the latent their output
    is: convolutions with a stride make it smaller, and what is called upsampling larger."""
    scale = 1
    children = sorted(model.named_children(), key=lambda child: _turn(child[0]))
    yield "", model, 1
    for first, child in children:
        for name, module in child.named_modules(prefix=first):
            aside = _ASIDE.search(name)
            stride = getattr(module, "stride", 1)
            if isinstance(module, nn.Conv2d | nn.Conv3d) and not aside:
                scale *= stride[-1] if isinstance(stride, tuple) else stride
            elif "Upsample" in type(module).__name__ and scale > 1:
                scale //= 2
            yield name, module, scale


def _turn(name: str) -> int:
    """UNets keep their middle before or after the way up."""
    return 2 if re.match(r"up|output|out$|conv_(norm_)?out", name) else 1 if "mid" in name else 0
