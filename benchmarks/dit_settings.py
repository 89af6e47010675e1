"""What dit.py measures: transformers as published, at sizes that people use."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tomesd.bench.calls import random_inputs
from tomesd.bench.modes import EAGER, GRAPH

BLOCKS, BLOCKS_GRAPH = "compile-blocks", "compile-blocks-graph"
"""Each block compiled by itself, as `compile_repeated_blocks` does; and then captured into a CUDA
graph."""
RATIOS = (0.5, 0.75)


@dataclass(frozen=True)
class Setting:
    model: str
    kind: str
    """Name of the class in diffusers."""
    height: int
    width: int
    config: dict[str, Any] = field(default_factory=dict)
    images: int = 1
    guidance: bool = False
    """Whether the call has both halves of guidance in it."""
    frames: int = 1
    scale: tuple[int, int] = (8, 4)
    """Pixels and frames that become one of the latent."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `apply_patch`, besides the ratio."""
    note: str = ""
    """What is different from the setting with the same name."""
    modes: tuple[str, ...] = (EAGER,)
    once: bool = False
    """Whether a call takes so long that one of each has to do."""
    steps: int = 0
    """Of a whole image, which is made with each preset; 0: a single call is timed, and merged."""

    @property
    def name(self) -> str:
        extras = {
            f"{self.frames} frames": self.frames > 1,
            f"{self.images} images": self.images > 1,
            "guidance": self.guidance,
            f"{self.steps} steps": self.steps,
            self.note: self.note,
        }
        told = [words for words, differs in extras.items() if differs]
        return ", ".join([f"{self.model} {self.width}x{self.height}", *told])

    @property
    def batch(self) -> int:
        return self.images * (2 if self.guidance else 1)

    def row(self) -> dict[str, Any]:
        """What a row says of the setting."""
        names = ("model", "height", "width", "frames", "images", "batch")
        known = {name: getattr(self, name) for name in names}
        what = {"what": "images", "steps": self.steps} if self.steps else {"what": "step"}
        return {"setting": self.name, "attention": "default", **what, **known}

    def inputs(self, model: Any) -> dict[str, Any]:
        """Noise, and positions and masks as they have to be."""
        pixels, per_latent = self.scale
        size, frames = (self.height // pixels, self.width // pixels), self.frames - 1
        inputs = random_inputs(model, size, self.batch, frames=frames // per_latent + 1)
        return {**inputs, "return_dict": False}


_PIXART = {"caption_channels": 4096, "sample_size": 256, "interpolation_scale": 4}
_SD35 = {
    **{"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432},
    **{"in_channels": 16, "out_channels": 16, "pos_embed_max_size": 192, "qk_norm": "rms_norm"},
}
# From height and width, and what else is different.
_flux = partial(Setting, "Flux.1-dev", "FluxTransformer2DModel", config={"guidance_embeds": True})
_wan = partial(Setting, "Wan 14B", "WanTransformer3DModel", frames=81)
_ltx = partial(Setting, "LTX-Video", "LTXVideoTransformer3DModel", frames=161, scale=(32, 8))
_hunyuan = partial(Setting, "HunyuanVideo", "HunyuanVideoTransformer3DModel", frames=61)
_qwen = partial(Setting, "Qwen-Image", "QwenImageTransformer2DModel")
_zimage = partial(Setting, "Z-Image", "ZImageTransformer2DModel")
_pixart = partial(
    Setting, "PixArt-Sigma", "PixArtTransformer2DModel", config=_PIXART, guidance=True
)
_sd35 = partial(Setting, "SD3.5-large", "SD3Transformer2DModel", config=_SD35, guidance=True)
_ATTENTION = {"options": {"target": "attn"}, "note": "self-attention only"}
_KEYS = {"options": {"target": "kv"}, "note": "keys and values only"}

SETTINGS: dict[str, tuple[Setting, ...]] = {
    "transformers": (
        _flux(1024, 1024, modes=(EAGER, GRAPH, BLOCKS, BLOCKS_GRAPH)),
        _sd35(1024, 1024, modes=(EAGER, BLOCKS)),
        _qwen(1328, 1328),
        _zimage(1024, 1024),
        _pixart(2048, 2048, options={"target": "stack"}),
        _ltx(512, 768, modes=(EAGER, BLOCKS)),
        _wan(480, 832, once=True),
        _flux(2048, 2048),
        _flux(1024, 1024, images=4),
        _wan(720, 1280, once=True),
        _flux(4096, 4096, once=True),
        _hunyuan(720, 1280, once=True),
    ),
    "attention": (
        _wan(480, 832, once=True, **_ATTENTION),
        _ltx(512, 768, **_ATTENTION),
        _pixart(2048, 2048, **_ATTENTION),
        _pixart(2048, 2048, **_KEYS),
    ),
    "images": (_flux(1024, 1024, steps=28, once=True), _qwen(1328, 1328, steps=28, once=True)),
    # The host waits for the timestep in each call, if what is merged depends on it.
    "time": (_flux(1024, 1024, options={"end": 0.999}, note="timestep read"),),
}
