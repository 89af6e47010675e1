"""Tiny, seeded, real diffusers models and pipelines for the tests.

Every `Host` builds one model family with random weights and calls it the way its pipelines do.
Item k of a batch is drawn from a seed of its own, so it is the same at every batch size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

CROSS = 32  # width of every text embedding
TEXT = 7  # text tokens per item
FRAMES = 3  # frames of every video input


@dataclass(frozen=True)
class Case:
    """One call of a model: the size of the latent, and what its noise depends on."""

    height: int
    width: int
    batch: int
    seed: int
    timestep: int

    def noise(self, *shape: int, salt: int = 0) -> torch.Tensor:
        """Standard normal [B, ...]."""
        return noise(self.batch, *shape, seed=self.seed, salt=salt)

    def each(self, values: list[Any]) -> torch.Tensor:
        """The same values for every item, [B, ...]."""
        return torch.tensor([values] * self.batch)


Arguments = dict[str, Callable[[Case], Any]]


@dataclass(frozen=True)
class Host:
    """One model family: how to build it, what to feed it, how to call it."""

    name: str
    build: Callable[[], nn.Module]
    arguments: Arguments  # in order
    finest: int  # smallest down-sampling (latent side / token grid side) with attention
    leading: int = 3  # how many of the arguments a pipeline passes by position

    def inputs(
        self, height: int, width: int, batch: int, seed: int, timestep: int
    ) -> dict[str, Any]:
        case = Case(height, width, batch, seed, timestep)
        return {name: make(case) for name, make in self.arguments.items()}

    def run(
        self,
        model: Callable[..., Any],
        *,
        height: int = 16,
        width: int = 16,
        batch: int = 2,
        seed: int = 0,
        keyword: bool = False,
        timestep: int = 500,
    ) -> torch.Tensor:
        """One forward pass without gradients; ControlNet residuals come back as [B, -1]."""
        inputs = self.inputs(height, width, batch, seed, timestep)
        with torch.no_grad():
            return call(model, inputs, leading=0 if keyword else self.leading)


def call(model: Callable[..., Any], inputs: dict[str, Any], leading: int = 0) -> torch.Tensor:
    """Call `model`, its first `leading` arguments by position, and return one tensor."""
    items = list(inputs.items())
    args, kwargs = [value for _, value in items[:leading]], dict(items[leading:])
    output = model(*args, **kwargs, return_dict=False)
    if len(output) == 2:  # ControlNet: residuals of the levels, residual of the middle
        return torch.cat([r.flatten(1) for r in (*output[0], output[1])], dim=1)
    return output[0]


def noise(*shape: int, seed: int, salt: int = 0) -> torch.Tensor:
    """Standard normal [B, ...] whose item k depends on (seed, salt, k) only."""
    items = []
    for k in range(shape[0]):
        generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * salt + k)
        items.append(torch.randn(shape[1:], generator=generator))
    return torch.stack(items)


def seeded(make: Callable[..., nn.Module], *args: Any, seed: int = 0, **kwargs: Any) -> Any:
    """Build a module from `seed` without touching the global RNG; no parameter stays zero.

    Zero-initialised output layers and closed gates would hide every effect of merging.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make(*args, **kwargs)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim == 0:
                    parameter.fill_(0.6)
                elif not parameter.any():
                    parameter.normal_(std=0.15)
    return module.eval().requires_grad_(False)


def _levels(kind: str, *attention: bool) -> dict[str, tuple[str, ...]]:
    """The types of blocks, and which levels have attention, the finest first."""
    names = ["CrossAttn" * has for has in attention]
    return {
        "down_block_types": tuple(f"{name}DownBlock{kind}" for name in names),
        "up_block_types": tuple(f"{name}UpBlock{kind}" for name in reversed(names)),
    }


SD1_CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": (32, 64, 64),
    **_levels("2D", True, True, False),
    "cross_attention_dim": CROSS,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}
SD2_CONFIG = SD1_CONFIG | {"attention_head_dim": (2, 4, 4), "use_linear_projection": True}
# Twice one projected text embedding for the pooled text, six numbers of 8 channels each.
_TEXT_TIME = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": CROSS + 6 * 8,
}
SDXL_CONFIG = (
    SD2_CONFIG
    | _levels("2D", False, True, True)
    | _TEXT_TIME
    | {"transformer_layers_per_block": (1, 2, 3)}
)
INPAINT_CONFIG = SD1_CONFIG | {"in_channels": 9}
# As released: the first attention sees the text only, except at the coarsest level.
UPSCALER_CONFIG = SD2_CONFIG | {
    "in_channels": 7,
    **_levels("2D", False, True, True),
    "only_cross_attention": (True, True, False),
    "num_class_embeds": 1000,
}
GLIGEN_CONFIG = SD1_CONFIG | {"attention_type": "gated"}
DIT_CONFIG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 16,
    "patch_size": 2,
}
PIXART_CONFIG = DIT_CONFIG | {
    "out_channels": 8,
    "cross_attention_dim": 32,
    "caption_channels": CROSS,
}
MOTION_CONFIG = SD1_CONFIG | {
    **_levels("Motion", True, True, False),
    "num_attention_heads": 4,
    "motion_num_attention_heads": 4,
    "motion_max_seq_length": 8,
}
MOTION_CONFIG.pop("attention_head_dim")
# Temporal attention at every level, spatial attention from the second level on.
MOTION_SDXL_CONFIG = (
    MOTION_CONFIG
    | _levels("Motion", False, True, True)
    | _TEXT_TIME
    | {"use_linear_projection": True}
)
SVD_CONFIG: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 8,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": (32, 64, 64),
    **_levels("SpatioTemporal", True, True, False),
    "cross_attention_dim": CROSS,
    "num_attention_heads": (2, 4, 4),
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 3 * 8,
    "num_frames": FRAMES,
}
UNET3D_CONFIG = SD1_CONFIG | {**_levels("3D", True, True, False), "attention_head_dim": 8}


_UNET: Arguments = {
    "sample": lambda c: c.noise(4, c.height, c.width),
    "timestep": lambda c: torch.tensor(c.timestep),
    "encoder_hidden_states": lambda c: c.noise(TEXT, CROSS, salt=1),
}
_SIZES = [128.0, 128.0, 0.0, 0.0, 128.0, 128.0]
_XL: Arguments = {
    "added_cond_kwargs": lambda c: {
        "text_embeds": c.noise(CROSS, salt=2),
        "time_ids": c.each(_SIZES),
    }
}
_INPAINT = _UNET | {"sample": lambda c: c.noise(9, c.height, c.width)}
_UPSCALER = _UNET | {
    "sample": lambda c: c.noise(7, c.height, c.width),
    "class_labels": lambda c: torch.full((c.batch,), 20),
}
_GLIGEN = _UNET | {
    "cross_attention_kwargs": lambda c: {
        "gligen": {
            "boxes": c.each([[0.1, 0.1, 0.6, 0.7], [0.3, 0.2, 0.9, 0.9]]),
            "positive_embeddings": c.noise(2, CROSS, salt=3),
            "masks": torch.ones(c.batch, 2),
        }
    }
}
_CONTROLNET = _UNET | {"controlnet_cond": lambda c: c.noise(3, 8 * c.height, 8 * c.width, salt=4)}
_DIT: Arguments = {
    "hidden_states": _UNET["sample"],
    "timestep": lambda c: torch.full((c.batch,), c.timestep),
    "class_labels": lambda c: torch.arange(c.batch) + 3,
}
_PIXART: Arguments = {
    "hidden_states": _UNET["sample"],
    "encoder_hidden_states": _UNET["encoder_hidden_states"],
    "timestep": _DIT["timestep"],
}
_VIDEO = _UNET | {"sample": lambda c: c.noise(4, FRAMES, c.height, c.width)}
_MOTION = _VIDEO | {  # one text embedding per frame, as the AnimateDiff pipelines have it
    "encoder_hidden_states": lambda c: _UNET["encoder_hidden_states"](c).repeat_interleave(
        FRAMES, dim=0
    )
}
_SVD = _UNET | {
    "sample": lambda c: c.noise(FRAMES, 8, c.height, c.width),
    "added_time_ids": lambda c: c.each([6.0, 127.0, 0.02]),
}


def make_unet(config: dict[str, Any] = SD1_CONFIG, **overrides: Any) -> Any:
    """A tiny `UNet2DConditionModel`."""
    return seeded(diffusers.UNet2DConditionModel, **(config | overrides))


def make_controlnet(config: dict[str, Any] = SD1_CONFIG) -> Any:
    """The ControlNet that belongs to the UNet of the same configuration."""

    def make() -> nn.Module:
        return diffusers.ControlNetModel.from_unet(
            diffusers.UNet2DConditionModel(**config),
            conditioning_embedding_out_channels=(8, 8, 16, 16),
        )

    return seeded(make, seed=1)


def _builder(make: Callable[..., nn.Module], config: dict[str, Any]) -> Callable[[], nn.Module]:
    return lambda: seeded(make, **config)


_MotionUNet = diffusers.UNetMotionModel
_build_dit = _builder(diffusers.DiTTransformer2DModel, DIT_CONFIG)
_build_pixart = _builder(diffusers.PixArtTransformer2DModel, PIXART_CONFIG)
_build_svd = _builder(diffusers.UNetSpatioTemporalConditionModel, SVD_CONFIG)

_IMAGES = (
    Host("sd1", make_unet, _UNET, 1),
    Host("sd2", lambda: make_unet(SD2_CONFIG), _UNET, 1),
    Host("sdxl", lambda: make_unet(SDXL_CONFIG), _UNET | _XL, 2),
    Host("inpaint", lambda: make_unet(INPAINT_CONFIG), _INPAINT, 1),
    Host("upscaler", lambda: make_unet(UPSCALER_CONFIG), _UPSCALER, 2, leading=4),
    Host("gligen", lambda: make_unet(GLIGEN_CONFIG), _GLIGEN, 1),
    Host("dit", _build_dit, _DIT, 2),
    Host("pixart", _build_pixart, _PIXART, 2),
    Host("controlnet", make_controlnet, _CONTROLNET, 1, leading=4),
    Host("controlnet_sdxl", lambda: make_controlnet(SDXL_CONFIG), _CONTROLNET | _XL, 2, leading=4),
)
_VIDEOS = (
    Host("animatediff", _builder(_MotionUNet, MOTION_CONFIG), _MOTION, 1),
    Host("animatediff_sdxl", _builder(_MotionUNet, MOTION_SDXL_CONFIG), _MOTION | _XL, 2),
    Host("svd", _build_svd, _SVD, 1, leading=4),
    Host("unet3d", _builder(diffusers.UNet3DConditionModel, UNET3D_CONFIG), _VIDEO, 1),
)
VIDEO_HOSTS = {host.name: host for host in _VIDEOS}
HOSTS = {host.name: host for host in _IMAGES} | VIDEO_HOSTS


@contextlib.contextmanager
def tokens_into(model: nn.Module, *layers: str) -> Iterator[dict[str, tuple]]:
    """Note the shape [B, tokens, C] that enters the sub-modules named like one of `layers`.

    Names are matched at their end; without any, it is the queries of the first attention.
    """
    endings = tuple(f".{layer}" for layer in layers or ("attn1.to_q",))
    seen: dict[str, tuple] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, args: seen.update({name: tuple(args[0].shape)})

    handles = [
        module.register_forward_pre_hook(note(name))
        for name, module in model.named_modules()
        if f".{name}".endswith(endings)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def is_temporal(name: str) -> bool:
    """Whether a module of a video model looks along the frames."""
    return any(part in name for part in ("motion_modules", "temp", "transformer_in"))


def spatial_tokens(seen: dict[str, tuple]) -> dict[str, int]:
    """Tokens of an image or frame; a block's `fuser` (GLIGEN) is a layer of its own kind."""
    names = [name for name in seen if not is_temporal(name) and ".fuser." not in name]
    return {name: seen[name][1] for name in names}


def expected_tokens(full: dict[str, int], levels: int, ratio: float) -> dict[str, int]:
    """Tokens left when the `levels` largest grids of a model merge and the others do not."""
    merging = sorted(set(full.values()), reverse=True)[:levels]
    return {name: n - int(n * ratio) if n in merging else n for name, n in full.items()}


def module_state(model: nn.Module) -> dict[str, tuple[type, frozenset[str]]]:
    """Class and attribute names of every sub-module: what removing a patch must give back."""
    return {name: (type(m), frozenset(m.__dict__)) for name, m in model.named_modules()}


def make_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer that knows single letters, made without any file."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789,."
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=16)


def make_text_encoder(projected: bool = False, width: int = CROSS, seed: int = 2) -> Any:
    """A CLIP text model of two layers for `make_tokenizer`."""
    tokenizer = make_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        projection_dim=CROSS,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return seeded(CLIPTextModelWithProjection if projected else CLIPTextModel, config, seed=seed)


def make_vae() -> Any:
    """A VAE with the usual eight pixels per latent side."""
    return seeded(
        diffusers.AutoencoderKL,
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=128,
        seed=3,
    )


def _scheduler() -> diffusers.DDIMScheduler:
    return diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def make_sd_pipeline(cls: Any = None, **components: Any) -> Any:
    """A Stable Diffusion pipeline of class `cls` (text to image by default)."""
    parts = {
        "vae": make_vae(),
        "text_encoder": make_text_encoder(),
        "tokenizer": make_tokenizer(),
        "unet": components.pop("unet", None) or make_unet(),
        "scheduler": _scheduler(),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    pipe = (cls or diffusers.StableDiffusionPipeline)(**(parts | components))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def make_img2img_pipeline() -> Any:
    """Image to image."""
    return make_sd_pipeline(diffusers.StableDiffusionImg2ImgPipeline)


def make_inpaint_pipeline() -> Any:
    """Inpainting with the nine-channel UNet."""
    unet = make_unet(INPAINT_CONFIG)
    return make_sd_pipeline(diffusers.StableDiffusionInpaintPipeline, unet=unet)


def make_controlnet_pipeline() -> Any:
    """Text to image with a ControlNet."""
    cls = diffusers.StableDiffusionControlNetPipeline
    return make_sd_pipeline(cls, controlnet=make_controlnet())


def make_sdxl_pipeline() -> Any:
    """SDXL text to image, with its two text encoders (their widths add up to `CROSS`)."""
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=make_vae(),
        text_encoder=make_text_encoder(width=CROSS // 2),
        text_encoder_2=make_text_encoder(projected=True, width=CROSS // 2, seed=4),
        tokenizer=make_tokenizer(),
        tokenizer_2=make_tokenizer(),
        unet=make_unet(SDXL_CONFIG),
        scheduler=_scheduler(),
        add_watermarker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pipeline_inputs(pipe: Any, size: int = 128, steps: int = 2, seed: int = 0) -> dict[str, Any]:
    """Arguments for one short run of any pipeline above; the result is a latent."""
    inputs: dict[str, Any] = {
        "prompt": "a red fox, 2 trees",
        "num_inference_steps": steps,
        "generator": torch.Generator().manual_seed(seed),
        "output_type": "latent",
    }
    picture = noise(1, 3, size, size, seed=7).sigmoid()
    name = type(pipe).__name__
    if "Img2Img" in name:
        inputs |= {"image": picture, "strength": 0.9}
    elif "Inpaint" in name:
        mask = torch.zeros(1, 1, size, size)
        mask[..., size // 4 : size // 2, size // 4 :] = 1
        inputs |= {"image": picture, "mask_image": mask, "height": size, "width": size}
    else:
        inputs |= {"height": size, "width": size}
        if "ControlNet" in name:
            inputs["image"] = picture
    return inputs


def run_pipeline(pipe: Any, **overrides: Any) -> torch.Tensor:
    """One short run; `overrides` go to the pipeline, `size`, `steps` and `seed` to the inputs."""
    chosen = {key: overrides.pop(key) for key in ("size", "steps", "seed") if key in overrides}
    return pipe(**(pipeline_inputs(pipe, **chosen) | overrides)).images
