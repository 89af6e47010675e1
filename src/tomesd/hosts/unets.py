"""UNets, and transformers made of the same block: the modules with a role in them.

Their blocks all descend from one transformer block, and share its attribute names.
"""

import inspect
import operator
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..patch import original_class
from ..regions import (
    Block,
    KeptAttention,
    Layer,
    Member,
    Norm,
    Projection,
    Role,
    Stack,
    Tokens,
    UNetRoot,
)
from ..settings import Settings
from .levels import deep_sites, has_levels
from .names import class_names, parameters

NAMES = (
    "Diffusers (Stable Diffusion 1, 2, XL and others with a UNet2DConditionModel, their "
    "ControlNets, AnimateDiff, Stable Video Diffusion, UNet3D, DiT, PixArt)",
    "Stable Diffusion v1 / v2 and Latent Diffusion (ldm, sgm, Forge, ComfyUI)",
)
"""The supported models, under names that users know."""

DEFAULTS: dict[str, Any] = {
    "target": "attn",
    "share": "block",
    "metric": "input",
    "start": 0.0,
    "end": 1.0,
    "reuse_start": 0.0,
}
"""Defaults of the options whose default depends on the kind of model."""

_BLOCK = "BasicTransformerBlock"

# Classes that hold the blocks, with the attribute for the side of the patch that becomes a token
# (None: each pixel of the feature map does). They take the feature map as their first argument.
# Temporal transformers (TransformerTemporalModel, AnimateDiffTransformer3D) hold the same blocks,
# but their tokens are frames. They are left out here, so nothing merges in them.
_STACKS = {
    "Transformer2DModel": "config.patch_size",
    "DiTTransformer2DModel": "config.patch_size",
    "PixArtTransformer2DModel": "config.patch_size",
    "TransformerSpatioTemporalModel": None,
    "SpatialTransformer": None,  # of ldm
}

_ATTENTION, _NORM = "attn1", "norm1"
_LAYERS = {_ATTENTION: "attn", "attn2": "crossattn", "ff": "mlp"}
"""Layers of a block: attribute to kind."""

# Modules with code of blocks that passes the output of `norm1` to `attn1` and nothing else, each
# with the attribute values that a block must have for this to hold.
_DIRECT: dict[str, dict[str, Any]] = {
    "diffusers.models.attention": {"norm_type": "layer_norm", "pos_embed": None},
    "ldm.modules.attention": {},
    "sgm.modules.attention": {},
}

_REFUSED = {"attn": ("attention_mask", "mask"), "crossattn": ("ip_adapter_masks",)}
"""Arguments of a layer with one row per token: kind to names."""

_CONTEXT = ("encoder_hidden_states", "context")
"""Names of attention's parameter for the tokens that it attends to."""

_UNFUSED = ("AttnProcessor", "SlicedAttnProcessor", "CustomDiffusionAttnProcessor")
"""Attention processors that write the scores to memory."""

_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out")
"""Linear layers of attention, or containers of them."""

_INTERLEAVED = "temporal_transformer_blocks"
"""A stack's attribute for blocks that run between the others, over the frames of a video."""

_COARSE = "UNet2DConditionModel"
"""The one model that supports `coarse`."""

_TIMESTEPS = ("timestep", "timesteps")


def is_block(module: nn.Module) -> bool:
    return _BLOCK in class_names(module)


def is_stack(module: nn.Module) -> bool:
    return any(name in _STACKS for name in class_names(module))


def is_root(module: nn.Module) -> bool:
    """Whether a model receives the timestep."""
    return any(name in _TIMESTEPS for name in parameters(module))


def check_reuse(settings: Settings, model: str) -> None:
    """Refuses `reuse` with targets other than blocks and runs of blocks."""
    if settings.reuse is not None and settings.target not in (None, "block", "stack"):
        raise ValueError(
            f"reuse={settings.reuse!r}: needs target='stack' or 'block' on a {model}, not "
            f"{settings.target!r}"
        )


def fill_settings(asked: Settings, module: nn.Module) -> Settings:
    """Fills in the defaults of UNets where no option was given."""
    runs = asked.reuse is not None and is_stack(module)
    settings = asked.filled(**(DEFAULTS | {"target": "stack"} if runs else DEFAULTS))
    check_options(settings, module)
    return settings


def sites(module: nn.Module, settings: Settings, rooted: bool) -> Iterator[tuple[nn.Module, Role]]:
    """The modules with a role in a UNet, or in a part of one.

    Args:
        rooted: whether `module` receives the timestep.
    """
    if is_block(module):
        yield from _block_sites(module, settings)
        return
    yield from _stack_sites(module, settings)
    if settings.reuse is not None and has_levels(module):
        yield from deep_sites(module)
        if settings.reuse_attention:
            # The last role is the outermost: what is kept has been unmerged.
            yield from _attention_sites(module)
    if rooted:
        names = tuple(parameters(module))
        yield module, UNetRoot(names, next(name for name in names if name in _TIMESTEPS))


def _attention_sites(module: nn.Module) -> Iterator[tuple[nn.Module, Role]]:
    """Self-attention at the finest level of a UNet."""
    deep = {part for top, _ in deep_sites(module) for part in top.modules()}
    blocks = [block for _, blocks, _ in runs(module) for block in blocks if block not in deep]
    for number, block in enumerate(blocks):
        layer = getattr(block, _ATTENTION)
        layer = getattr(layer, "_orig_mod", layer)  # compiled on its own
        yield layer, KeptAttention(f"attention_{number}")


def _is_controlnet(module: nn.Module) -> bool:
    """Whether it is a ControlNet, and not a UNet with one inside (ControlNet-XS)."""
    name = type(module).__name__
    return "ControlNet" in name and "UNet" not in name


def _stack_sites(module: nn.Module, settings: Settings) -> Iterator[tuple[nn.Module, Role]]:
    """The stacks in a model and the modules in them, with their roles."""
    for stack, blocks, patch_size in runs(module):
        together = settings.target == "stack" and not hasattr(stack, _INTERLEAVED)
        for block in blocks:
            first, last = block is blocks[0] or not together, block is blocks[-1] or not together
            yield from _block_sites(block, settings, first, last, reusable=stack is module)
        attention = getattr(blocks[0], _ATTENTION, None)
        channels = getattr(getattr(attention, "to_q", None), "in_features", 0)
        input = parameters(stack)[0]
        yield stack, Stack(input, patch_size, channels, _ATTENTION, _unfused(attention))


def _patch_size(stack: nn.Module) -> int:
    path = next(_STACKS[name] for name in class_names(stack) if name in _STACKS)
    return (operator.attrgetter(path)(stack) if path else None) or 1


def runs(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module], int]]:
    """The stacks in a model, each with its blocks and the side of the patch that is one token."""
    for stack in module.modules():
        blocks = getattr(stack, "transformer_blocks", None)
        if is_stack(stack) and blocks is not None:
            found = [block for block in blocks.modules() if is_block(block)]
            if found:
                yield stack, found, _patch_size(stack)


def _block_sites(
    block: nn.Module,
    settings: Settings,
    first: bool = True,
    last: bool = True,
    reusable: bool = False,
) -> Iterator[tuple[nn.Module, Role]]:
    """The modules with a role in a block: the block itself, and maybe layers in it."""
    refused = tuple(name for names in _REFUSED.values() for name in names)
    method = "_forward" if hasattr(type(block), "_forward") else "forward"
    names = tuple(parameters(block, method))
    tokens = Tokens(names, names[0], refused=refused)
    if settings.whole_blocks:
        yield block, Member(tokens, first, last, reusable)
        return
    for attribute, kind in _LAYERS.items():
        layer = getattr(block, attribute, None)
        layer = getattr(layer, "_orig_mod", layer)  # compiled on its own
        if not isinstance(layer, nn.Module) or kind not in settings.layers:
            continue
        if kind == "attn" and settings.proportional:
            yield from _projection_sites(layer)
        names = tuple(parameters(layer))
        context = names[1] if len(names) > 1 and names[1] in _CONTEXT else ""
        yield layer, Layer(Tokens(names, names[0], refused=_REFUSED.get(kind, ())), kind, context)
    code = _direct_code(block, method) if "attn" in settings.layers else ""
    if code and settings.target == "attn":
        yield getattr(block, _NORM), Norm()
    yield block, Block(tokens, _NORM, _ATTENTION, code)


def _direct_code(block: nn.Module, method: str) -> str:
    """The module of the block's code, if that passes its norm's output to self-attention alone."""
    code: str = getattr(original_class(block), method).__module__
    having = _DIRECT.get(code)
    # Norms of other kinds may return more than a tensor.
    if having is None or not isinstance(getattr(block, _NORM, None), nn.LayerNorm):
        return ""
    fits = all(getattr(block, name, ...) == value for name, value in having.items())
    return code if fits else ""


def _unfused(attention: Any) -> tuple[str, ...]:
    """Classes that write the scores of attention to memory: processors, or that of `attention`."""
    if not isinstance(attention, nn.Module) or hasattr(attention, "processor"):
        return _UNFUSED
    cls = original_class(attention)
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return (cls.__name__,) if code is not None and "einsum" in code.co_names else ()


def _projection_sites(attention: nn.Module) -> Iterator[tuple[nn.Module, Role]]:
    for part in _PROJECTIONS:
        module = getattr(attention, part, None)
        if isinstance(module, nn.ModuleList | nn.Sequential):  # the projection and a dropout
            module = module[0]
        if isinstance(module, nn.Module):
            yield module, Projection(part)  # type: ignore[arg-type]


def check_options(settings: Settings, module: nn.Module) -> None:
    """Refuses options that have no meaning on a UNet."""
    model = type(module).__name__
    if settings.metric == "clean":
        raise ValueError(f"metric='clean': a {model} is no rectified flow")
    of_transformers = ("depth", "st", "reference_ratio")
    settings.refuse(of_transformers, model, ", only on diffusion transformers")
    if settings.coarse and not can_be_coarse(module):
        settings.refuse(["coarse"], model)
    if not can_reuse(module):
        levels = "UNets that have several levels"
        settings.refuse(["reuse"], model, f", only on {levels}, and on diffusion transformers")
    if settings.reuse_attention and not _can_reuse_attention(module):
        where = "UNets that have attention at their finest level"
        settings.refuse(["reuse_attention"], model, f", only on {where}")
    if is_stack(module):
        check_reuse(settings, model)


def can_be_coarse(module: nn.Module) -> bool:
    return _COARSE in class_names(module) and is_root(module)


def can_reuse(module: nn.Module) -> bool:
    """Whether `reuse` is allowed. On a ControlNet it has no effect: the controlled model needs all
    of its output."""
    stack = is_stack(module) and is_root(module)
    return stack or has_levels(module) or _is_controlnet(module)


def _can_reuse_attention(module: nn.Module) -> bool:
    """Whether `reuse_attention` is allowed. On a ControlNet it has no effect either."""
    return _is_controlnet(module) or (has_levels(module) and any(_attention_sites(module)))
