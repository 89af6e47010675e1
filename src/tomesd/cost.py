"""When merging pays: what a model does, counted from its modules, and what merging changes.

A model takes as long as its device or its host does, whichever is slower. So merging is judged for
the model as a whole: it pays where that time falls.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from .machine import Machine

__all__ = [
    "Layers",
    "Level",
    "Outline",
    "Verdict",
    "Work",
    "compare",
    "count_layers",
    "expect",
    "outline",
    "outline_blocks",
]


@dataclass(frozen=True)
class Work:
    """What modules do in a call."""

    operations: float = 0.0
    """Floating-point operations of linear layers and convolutions."""
    attention: float = 0.0
    """The same of attention."""
    moved: float = 0.0
    """Bytes read and written."""
    kernels: float = 0.0
    launches: float = 0.0
    """What the host does, in what it takes to start one kernel of PyTorch."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.operations + other.operations,
            self.attention + other.attention,
            self.moved + other.moved,
            self.kernels + other.kernels,
            self.launches + other.launches,
        )

    def __sub__(self, other: "Work") -> "Work":
        return Work(
            self.operations - other.operations,
            self.attention - other.attention,
            self.moved - other.moved,
            self.kernels - other.kernels,
            self.launches - other.launches,
        )

    def on_share(self, share: float) -> "Work":
        """The same on a share of the items, which takes as many kernels."""
        device = (share * self.operations, share * self.attention, share * self.moved)
        return Work(*device, self.kernels, self.launches)

    def seconds(self, machine: Machine) -> float:
        device = self.operations / machine.operations + self.attention / machine.attention
        device += self.moved / machine.bytes + self.kernels * machine.kernel
        host = self.launches * machine.launch
        return max(device, host) if machine.apart else device + host


@dataclass(frozen=True)
class Layers:
    """What layers do for each token, and for each pair of tokens."""

    operations: float = 0.0
    """For a token."""
    pairs: float = 0.0
    """Operations for a query and a key."""
    numbers: float = 0.0
    """Read and written for a token."""
    kernels: int = 0

    def __add__(self, other: "Layers") -> "Layers":
        return Layers(
            self.operations + other.operations,
            self.pairs + other.pairs,
            self.numbers + other.numbers,
            self.kernels + other.kernels,
        )

    def work(self, items: float, queries: float, keys: float, item_size: int) -> Work:
        """On so many items. Keys and values are half of the linear layers of attention."""
        tokens = items * (queries + keys) / 2
        return Work(
            tokens * self.operations,
            items * queries * keys * self.pairs,
            tokens * self.numbers * item_size,
            self.kernels,
            self.kernels,
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
    place: str = ""
    """Of its first stack in the model."""
    kinds: dict[str, Layers] = field(default_factory=dict)
    """What its blocks do; "rest" is what is in none of the layers that can be merged alone."""

    def __add__(self, other: "Level") -> "Level":
        names = {*self.kinds, *other.kinds}
        none = Layers()
        kinds = {n: self.kinds.get(n, none) + other.kinds.get(n, none) for n in sorted(names)}
        counts = {"blocks": self.blocks + other.blocks, "stacks": self.stacks + other.stacks}
        return replace(self, **counts, kinds=kinds)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Outline:
    """What a model is made of, as far as its speed goes."""

    levels: tuple[Level, ...] = ()
    """Finest first."""
    around: tuple[tuple[int, Layers], ...] = ()
    """What is around the blocks, by how many times smaller than the latent it is."""


@dataclass(frozen=True)
class Verdict:
    """Where merging pays, and what is expected of it."""

    pays: tuple[bool, ...]
    before: float
    """Seconds of a call without merging."""
    after: float
    """With it, where it pays."""
    everywhere: float
    """With it, also where it does not pay."""

    @property
    def gain(self) -> float:
        """How many times as fast a call is expected to be."""
        return self.before / self.after


def compare(machine: Machine, model: Work, changes: Sequence[tuple[Work, Work]]) -> Verdict:
    """Which changes make a model faster, each on top of those before it.

    Args:
        model: all that it does unchanged.
        changes: for each, what a part of the model does without it and with it.
    """
    changed, pays = model, []
    for old, new in changes:
        more = changed + (new - old)
        pays.append(bool(more.seconds(machine) < changed.seconds(machine)))
        changed = more if pays[-1] else changed
    return expect(machine, model, changes, tuple(pays))


def expect(
    machine: Machine, model: Work, changes: Sequence[tuple[Work, Work]], pays: tuple[bool, ...]
) -> Verdict:
    """What is expected of a decision; see `compare`."""
    after = everywhere = model
    for (old, new), pay in zip(changes, pays, strict=True):
        everywhere += new - old
        after = after + (new - old) if pay else after
    works = (model, after, everywhere)
    return Verdict(pays, *[work.seconds(machine) for work in works])


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
        # A linear layer in a norm makes its shift and scale.
        aside = not kind or (name.startswith("norm") and counted.operations > 0)
        if aside or (kind == "crossattn" and _TEXT.search(name)):
            kind, counted = "rest", Layers(kernels=2)
        if kind not in found and kind in _MORE_KERNELS:
            counted += Layers(kernels=_MORE_KERNELS[kind])
        if _QUERIES.search(name) and isinstance(module, nn.Linear):
            width = module.out_features // (3 if "qkv" in name else 1)
            if kind == "crossattn":
                counted += Layers(operations=4.0 * width * _KEYS_OF_TEXT)
            elif kind == "attn":
                counted += Layers(pairs=_pairs(width, _heads(block, name)))
        found[kind] = found.get(kind, Layers()) + counted
    return found


# Softmax takes about as long as so many channels of a head.
_SOFTMAX = 128


def _pairs(width: int, heads: int) -> float:
    """Operations for a query and a key, in those of heads of 64 channels, which rates are of."""
    return 4.0 * 64 * heads * (width / heads + _SOFTMAX) / (64 + _SOFTMAX)


def _heads(block: nn.Module, projection: str) -> int:
    """Of the attention that a projection is in; of 64 channels, if it does not say."""
    attention = block.get_submodule(projection.rpartition(".")[0])
    for name in ("heads", "num_heads", "n_heads"):
        found = getattr(attention, name, None)
        if isinstance(found, int) and found > 0:
            return found
    width = getattr(block.get_submodule(projection), "out_features", 64)
    return max(1, int(width) // 64)


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


def outline(
    model: nn.Module, stacks: Iterable[tuple[nn.Module, Sequence[nn.Module], int]]
) -> Outline:
    """Counts what a model does.

    Args:
        stacks: its runs of blocks: the module that gets the feature map, its blocks, and the side
            of the square of pixels that is one token.
    """
    runs = {id(module): (blocks, size) for module, blocks, size in stacks}
    levels: dict[tuple[int, int], Level] = {}
    around: dict[int, Layers] = {}
    inside: set[int] = set()
    for name, module, scale in _with_scale(model):
        if id(module) in inside:
            continue
        if id(module) in runs:
            blocks, size = runs[id(module)]
            inside |= {id(part) for block in blocks for part in block.modules()}
            level = Level(scale, size, _width(blocks), len(blocks), 1, name, _sum(blocks))
            key = (scale, size)
            levels[key] = levels[key] + level if key in levels else level
            continue
        counted = _count(module)
        if counted is not None and not _ASIDE.search(name):
            more = Layers(numbers=0.5 * counted.numbers, kernels=1)  # an activation, a sum
            around[scale] = around.get(scale, Layers()) + counted + more
    found = sorted(levels.values(), key=lambda level: level.scale * level.patch_size)
    return Outline(tuple(found), tuple(sorted(around.items())))


def outline_blocks(blocks: Sequence[nn.Module]) -> Outline:
    """Counts what a run of blocks does that is, about, the whole model."""
    return Outline((Level(1, 1, _width(blocks), len(blocks), 1, "", _sum(blocks)),))


def _sum(blocks: Sequence[nn.Module]) -> dict[str, Layers]:
    total: dict[str, Layers] = {}
    for block in blocks:
        for kind, layers in count_layers(block).items():
            total[kind] = total.get(kind, Layers()) + layers
    return total


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
