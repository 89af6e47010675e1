"""Diffusion transformers of diffusers: one row each. To add one is to add a row.

What a row needs is in docs/development.md. Blocks are never rewritten: their arguments are cut and
their output is restored.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ..policy import Layout
from ..regions import Along, Block, Given, Layer, Member, Role, Tokens, TransformerRoot
from ..schedule import Timeline
from ..settings import Settings
from .layouts import (
    from_cogvideox,
    from_frames,
    from_hidream,
    from_hunyuan_video,
    from_ids,
    from_image,
    from_ltx,
    from_lumina2,
    from_qwen,
    from_video,
    from_z_image,
)
from .names import class_names, parameters

__all__ = ["DEFAULTS", "TRANSFORMERS", "Blocks", "Transformer", "find_row", "name_all", "sites"]

DEFAULTS: dict[str, Any] = {"target": "stack", "share": "level", "start": 0.0, "end": 0.5}
"""What options that depend on the kind of model are, unless they are given."""

_UNET_OPTIONS = (
    ("max_downsample", None),
    ("merge_attn", True),
    ("merge_crossattn", False),
    ("merge_mlp", False),
    ("proportional", False),
    ("level_ratios", None),
    ("kind_ratios", None),
)
"""Options that mean nothing on a transformer, and what they are when they are not used."""


_OF_VIDEOS = (from_video, from_hunyuan_video, from_cogvideox, from_ltx)


@dataclass(frozen=True)
class Blocks:
    """A list of blocks in a transformer; see `Tokens`."""

    path: str
    input: str = "hidden_states"
    output: int | None = None
    joint: bool = False
    text: Literal["before", "after", "ragged"] = "before"
    along: tuple[Along, ...] = ()
    refused: tuple[str, ...] = ()
    alone: bool = False
    """Whether something needs all tokens between the blocks, so that each merges by itself."""
    attention: str = ""
    """Self-attention of a block, if it takes image tokens only, and can merge on its own."""

    def tokens(self, block: nn.Module) -> Tokens:
        names = tuple(parameters(block))
        return Tokens(
            names, self.input, self.output, self.joint, self.text, self.along, self.refused
        )


@dataclass(frozen=True)
class Transformer:
    """What is to be known of one class of models."""

    name: str
    """Of the class."""
    lists: tuple[Blocks, ...] = ()
    layout: Callable[[Any, Given], Layout] = from_image
    timeline: Timeline | None = None
    """How its times run. None: as the scheduler says."""
    time: str = "timestep"
    between: tuple[str, ...] = ()
    """Arguments that add something to all tokens between the blocks, or pass blocks by."""
    reason: str = ""
    """Why tokens cannot be merged in it."""

    @property
    def targets(self) -> tuple[str, ...]:
        attention = any(part.attention for part in self.lists)
        return ("stack", "block", "attn") if attention else ("stack", "block")

    def check_options(self, settings: Settings) -> None:
        """Refuses options that mean nothing on this model."""
        for name, unused in _UNET_OPTIONS:
            value = getattr(settings, name)
            if value != unused:
                raise ValueError(f"{name}={value!r}: means nothing on a {self.name}")
        if settings.target not in (None, *self.targets):
            allowed = ", ".join(map(repr, self.targets))
            raise ValueError(f"target={settings.target!r}: a {self.name} allows one of {allowed}")
        if settings.st not in (None, 1) and self.layout not in _OF_VIDEOS:
            raise ValueError(
                f"st={settings.st!r}: means nothing on a {self.name}: it has no frames"
            )
        if settings.reference_ratio is not None and self.layout not in (from_ids, from_qwen):
            raise ValueError(
                f"reference_ratio={settings.reference_ratio!r}: means nothing on a {self.name}: it "
                "takes no reference images"
            )
        if settings.metric == "keys":
            raise ValueError(f"metric='keys': a {self.name} allows 'input', 'mean' or 'previous'")
        if isinstance(settings.protect, str):
            raise ValueError(
                f"protect={settings.protect!r}: a {self.name} allows a mask [h, w] only"
            )


def find_row(module: nn.Module) -> Transformer | None:
    return next((_BY_NAME[name] for name in class_names(module) if name in _BY_NAME), None)


def name_all() -> str:
    """The supported transformers, for people to read."""
    names = [row.name for row in TRANSFORMERS if not row.reason]
    short = [name.removesuffix("Model").removesuffix("Transformer2D") for name in names]
    short = [name.removesuffix("Transformer3D").removesuffix("Transformer") for name in short]
    return f"diffusion transformers of Diffusers ({', '.join(short)})"


def sites(
    model: nn.Module, row: Transformer, settings: Settings
) -> Iterator[tuple[nn.Module, Role]]:
    """The blocks that merge and the model itself, with their roles."""
    blocks = [(part, block) for part in row.lists for block in getattr(model, part.path)]
    chosen = _within(settings.depth, len(blocks))
    for part in row.lists:
        run = [block for i, (p, block) in enumerate(blocks) if p is part and i in chosen]
        for block in run:
            alone = part.alone or settings.target == "block"
            first, last = block is run[0] or alone, block is run[-1] or alone
            yield from _block_sites(block, part, settings, first, last)
    names = tuple(parameters(model))
    paths = tuple(part.path for part in row.lists)
    channels = _channels(blocks[0][1])
    yield (
        model,
        TransformerRoot(names, row.time, row.layout, row.between, paths, channels, len(chosen)),
    )


def _within(depth: tuple[float, float] | None, blocks: int) -> range:
    """The blocks that a depth names; without one, all but the first and the last."""
    if depth is None:
        return range(1, blocks - 1) if blocks > 2 else range(blocks)
    inside = [i for i in range(blocks) if depth[0] * blocks <= i and i + 1 <= depth[1] * blocks]
    if not inside:
        raise ValueError(f"depth={depth!r}: holds none of the {blocks} blocks of this model")
    return range(inside[0], inside[-1] + 1)


def _block_sites(
    block: nn.Module, part: Blocks, settings: Settings, first: bool, last: bool
) -> Iterator[tuple[nn.Module, Role]]:
    tokens = part.tokens(block)
    if settings.target != "attn":
        yield block, Member(tokens, first, last)
        return
    if part.attention:
        layer = getattr(block, part.attention)
        names = tuple(parameters(layer))
        along = tuple(a for a in part.along if a.name in names)
        yield layer, Layer(Tokens(names, names[0], along=along), "attn", names[1])
        yield block, Block(tokens)


def _channels(block: nn.Module) -> int:
    """Of its tokens: those that its first linear layer over tokens takes."""
    layers = [getattr(m, "in_features", None) for n, m in block.named_modules() if "attn" in n]
    return next((width for width in layers if isinstance(width, int)), 1024)


# How times run: from 1 or 1000 (noise) to 0, or from 0 (noise) to 1 or 1000.
_SIGMAS = Timeline(1.0, flow=True)
_THOUSAND = Timeline(1000.0, flow=True)
_RISING = Timeline(0.0, 1.0, flow=True)
_TO_THOUSAND = Timeline(0.0, 1000.0, flow=True)

_ROPE = "image_rotary_emb"
# (cos, sin) [T + N, d], text first; [N, d]
_ALL_ROWS = Along(_ROPE, (0,), sequence=True, batched=False)
_IMAGE_ROWS = Along(_ROPE, (0,), batched=False)
_FREQUENCIES = Along("freqs_cis", (0,), batched=False)

_CONTROL = ("controlnet_block_samples", "controlnet_single_block_samples")

_FLUX = (
    Blocks("transformer_blocks", output=1, along=(_ALL_ROWS,)),
    Blocks("single_transformer_blocks", output=1, along=(_ALL_ROWS,)),
)
# HunyuanVideo: the image comes first, and has rows only for itself; masks cover all keys.
_HUNYUAN_MASK = Along("attention_mask", (3,), sequence=True)
_HUNYUAN = (
    Blocks(
        "transformer_blocks",
        output=0,
        text="after",
        along=(_HUNYUAN_MASK, _FREQUENCIES),
    ),
    Blocks("single_transformer_blocks", output=0, text="after", along=(_HUNYUAN_MASK, _IMAGE_ROWS)),
)
_WAN_ALONG = (Along("rotary_emb", (1,)), Along("temb", (1,), ndim=4))
_DUAL = Blocks("transformer_blocks", output=0, along=(_IMAGE_ROWS,))

TRANSFORMERS = (
    # Images
    Transformer("FluxTransformer2DModel", _FLUX, from_ids, _SIGMAS, between=_CONTROL),
    Transformer(
        "Flux2Transformer2DModel",
        (
            Blocks("transformer_blocks", output=1, along=(_ALL_ROWS,)),
            Blocks("single_transformer_blocks", joint=True, along=(_ALL_ROWS,)),
        ),
        from_ids,
        _SIGMAS,
        between=("kv_cache", "kv_cache_mode"),
    ),
    Transformer(
        "ChromaTransformer2DModel",
        (
            Blocks(
                "transformer_blocks",
                output=1,
                along=(_ALL_ROWS, Along("attention_mask", (1,), sequence=True)),
            ),
            Blocks(
                "single_transformer_blocks",
                joint=True,
                along=(_ALL_ROWS, Along("attention_mask", (1,), sequence=True)),
            ),
        ),
        from_ids,
        _SIGMAS,
        between=_CONTROL,
    ),
    Transformer(
        "SD3Transformer2DModel",
        (Blocks("transformer_blocks", output=1),),
        from_image,
        _THOUSAND,
        between=("block_controlnet_hidden_states", "skip_layers"),
    ),
    Transformer(
        "QwenImageTransformer2DModel",
        (
            Blocks(
                "transformer_blocks",
                output=1,
                along=(
                    Along(_ROPE, (0,), batched=False, parts=(0,)),
                    Along("modulate_index", (1,)),
                ),
            ),
        ),
        from_qwen,
        _SIGMAS,
        between=_CONTROL,
    ),
    Transformer(
        "ZImageTransformer2DModel",
        (
            Blocks(
                "layers",
                input="x",
                joint=True,
                text="after",
                along=(
                    Along("attn_mask", (1,), sequence=True),
                    Along("freqs_cis", (1,), sequence=True),
                ),
                refused=("noise_mask",),
            ),
        ),
        from_z_image,
        _RISING,
        time="t",
        between=("controlnet_block_samples",),
    ),
    Transformer(
        "Lumina2Transformer2DModel",
        (
            Blocks(
                "layers",
                joint=True,
                text="ragged",
                along=(
                    Along("attention_mask", (1,), sequence=True),
                    Along(_ROPE, (1,), sequence=True),
                ),
            ),
        ),
        from_lumina2,
        _RISING,
    ),
    Transformer(
        "AuraFlowTransformer2DModel",
        (
            Blocks("joint_transformer_blocks", output=1),
            Blocks("single_transformer_blocks", joint=True),
        ),
        from_image,
        _SIGMAS,
    ),
    Transformer(
        "HiDreamImageTransformer2DModel",
        (
            Blocks(
                "double_stream_blocks",
                output=0,
                text="after",
                along=(Along(_ROPE, (1,), sequence=True), Along("hidden_states_masks", (1,))),
            ),
            Blocks(
                "single_stream_blocks",
                joint=True,
                text="after",
                along=(
                    Along(_ROPE, (1,), sequence=True),
                    Along("hidden_states_masks", (1,), sequence=True),
                ),
                alone=True,
            ),
        ),
        from_hidream,
        _THOUSAND,
        time="timesteps",
    ),
    Transformer(
        "HunyuanImageTransformer2DModel",
        (
            Blocks(
                "transformer_blocks", output=0, text="after", along=(_HUNYUAN_MASK, _IMAGE_ROWS)
            ),
            _HUNYUAN[1],
        ),
        from_image,
        _THOUSAND,
    ),
    Transformer(
        "HunyuanDiT2DModel",
        (Blocks("blocks", along=(_IMAGE_ROWS, Along("skip", (1,), mean=True)), alone=True),),
        from_image,
        between=("controlnet_block_samples",),
    ),
    Transformer("CogView3PlusTransformer2DModel", (Blocks("transformer_blocks", output=0),)),
    Transformer(
        "CogView4Transformer2DModel",
        (
            Blocks(
                "transformer_blocks", output=0, along=(_IMAGE_ROWS,), refused=("attention_mask",)
            ),
        ),
        from_image,
        _THOUSAND,
    ),
    Transformer("BriaTransformer2DModel", _FLUX, from_ids, _THOUSAND, between=_CONTROL),
    Transformer("OvisImageTransformer2DModel", _FLUX, from_ids, _SIGMAS),
    Transformer("LongCatImageTransformer2DModel", _FLUX, from_ids, _SIGMAS),
    Transformer(
        "PRXTransformer2DModel",
        (Blocks("blocks", along=(Along(_ROPE, (2,)),)),),
        from_image,
        _SIGMAS,
    ),
    Transformer(
        "BriaFiboTransformer2DModel",
        (
            Blocks("transformer_blocks", output=1, along=(_ALL_ROWS,)),
            Blocks("single_transformer_blocks", joint=True, along=(_ALL_ROWS,)),
        ),
        from_ids,
        _SIGMAS,
    ),
    Transformer(
        "JoyImageEditTransformer3DModel",
        (
            Blocks(
                "double_blocks", output=0, along=(Along(_ROPE, (0,), batched=False, parts=(0,)),)
            ),
        ),
        from_video,
        _THOUSAND,
    ),
    Transformer(
        "GlmImageTransformer2DModel",
        (
            Blocks(
                "transformer_blocks", output=0, along=(_IMAGE_ROWS,), refused=("attention_mask",)
            ),
        ),
        from_image,
        _THOUSAND,
        between=("kv_caches",),
    ),
    Transformer(
        "OmniGenTransformer2DModel",
        (
            Blocks(
                "layers",
                joint=True,
                along=(_ALL_ROWS, Along("attention_mask", (2, 3), sequence=True)),
            ),
        ),
        from_image,
        _RISING,
    ),
    Transformer(
        "LuminaNextDiT2DModel",
        (Blocks("layers", along=(Along(_ROPE, (1,)), Along("attention_mask", (1,)))),),
        from_image,
        _RISING,
    ),
    # Videos
    Transformer(
        "WanTransformer3DModel",
        (Blocks("blocks", along=_WAN_ALONG, attention="attn1"),),
        from_video,
        _THOUSAND,
    ),
    Transformer(
        "WanVACETransformer3DModel",
        (Blocks("blocks", along=_WAN_ALONG, attention="attn1"),),
        from_video,
        _THOUSAND,
        between=("control_hidden_states",),
    ),
    Transformer(
        "SkyReelsV2Transformer3DModel",
        (
            Blocks(
                "blocks",
                along=(Along("rotary_emb", (1,)), Along("temb", (2,), ndim=4)),
                refused=("attention_mask",),
            ),
        ),
        from_video,
        _THOUSAND,
    ),
    Transformer(
        "WanAnimateTransformer3DModel",
        (Blocks("blocks", along=_WAN_ALONG, alone=True),),  # an adapter wants whole frames
        from_video,
        _THOUSAND,
    ),
    Transformer(
        "ChronoEditTransformer3DModel", (Blocks("blocks", along=_WAN_ALONG),), from_video, _THOUSAND
    ),
    Transformer("HunyuanVideoTransformer3DModel", _HUNYUAN, from_hunyuan_video, _THOUSAND),
    Transformer(
        "HunyuanVideoFramepackTransformer3DModel",
        # The frames before are in the sequence of image tokens, in front.
        tuple(
            Blocks(path, output=0, joint=True, along=(rows, _HUNYUAN_MASK))
            for path, rows in (
                ("transformer_blocks", Along("freqs_cis", (0,), sequence=True, batched=False)),
                ("single_transformer_blocks", _ALL_ROWS),
            )
        ),
        from_video,
        _THOUSAND,
    ),
    Transformer(
        "HunyuanVideo15Transformer3DModel",
        (Blocks("transformer_blocks", output=0, along=(_FREQUENCIES,)),),
        from_video,
        _THOUSAND,
    ),
    Transformer("CogVideoXTransformer3DModel", (_DUAL,), from_cogvideox),
    Transformer("ConsisIDTransformer3DModel", (_DUAL,), from_cogvideox, between=("id_cond",)),
    Transformer(
        "LTXVideoTransformer3DModel",
        (
            Blocks(
                "transformer_blocks",
                along=(Along(_ROPE, (1,)), Along("temb", (1,))),
                attention="attn1",
            ),
        ),
        from_ltx,
        _THOUSAND,
    ),
    Transformer(
        "LTX2VideoTransformer3DModel",
        (
            Blocks(
                "transformer_blocks",
                output=0,
                along=(
                    *(
                        Along(name, (axis,), ndim=axis + 2)
                        for name in ("video_rotary_emb", "ca_video_rotary_emb")
                        for axis in (1, 2)
                    ),
                    *(
                        Along(name, (1,))
                        for name in ("temb", "temb_ca_scale_shift", "temb_ca_gate")
                    ),
                ),
                refused=("self_attention_mask",),
            ),
        ),
        from_ltx,
        _THOUSAND,
    ),
    Transformer("MochiTransformer3DModel", (_DUAL,), from_video, _TO_THOUSAND),
    Transformer("EasyAnimateTransformer3DModel", (_DUAL,), from_video, _THOUSAND),
    Transformer(
        "AllegroTransformer3DModel",
        (
            Blocks(
                "transformer_blocks",
                along=(Along(_ROPE, (1,), parts=(1,)),),
                refused=("attention_mask",),
            ),
        ),
        from_video,
    ),
    Transformer(
        "LatteTransformer3DModel",
        (Blocks("transformer_blocks", alone=True, refused=("attention_mask",)),),
        from_frames,
    ),
    # ControlNets: what every block gives is handed on.
    Transformer(
        "FluxControlNetModel",
        tuple(Blocks(part.path, output=1, along=part.along, alone=True) for part in _FLUX),
        from_ids,
        _SIGMAS,
    ),
    Transformer(
        "SD3ControlNetModel",
        (Blocks("transformer_blocks", output=1, alone=True),),
        from_image,
        _THOUSAND,
    ),
    Transformer(
        "QwenImageControlNetModel",
        (
            Blocks(
                "transformer_blocks",
                output=1,
                along=(Along(_ROPE, (0,), batched=False, parts=(0,)),),
                alone=True,
            ),
        ),
        from_qwen,
        _SIGMAS,
    ),
    # What cannot be done
    *(
        Transformer(
            name,
            reason="its feed-forward layers are convolutions over the whole grid of tokens, and "
            "its attention is linear, so there would be little to gain",
        )
        for name in ("SanaTransformer2DModel", "SanaVideoTransformer3DModel")
    ),
)

_BY_NAME = {row.name: row for row in TRANSFORMERS}
