"""Whole pipelines of diffusers around the tiny transformers of `zoo_dit`.

Texts come as embeddings, so that no pipeline needs a text encoder, and results stay latents.
Autoencoders are there where a picture has to go in. Every pipeline makes pictures or videos of
12 x 8 latent pixels, in two steps.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from PIL import Image
from torch import Tensor
from zoo_diffusers import PIXART_CONFIG, TEXT, noise
from zoo_dit import DITS, seeded

Arguments = dict[str, Any]
Case = tuple[Any, Arguments]  # a pipeline, and the arguments of one call
Make = Callable[[], Any]
LATENT = (12, 8)
STEPS = 2


def run(pipe: Any, arguments: Arguments, seed: int = 0, **changes: Any) -> Tensor:
    """One run from noise that `seed` decides; the latents it ends with."""
    generator = torch.Generator().manual_seed(seed)
    return pipe(**(arguments | changes), generator=generator, return_dict=False)[0]


def _pipeline(cls: Any, **components: Any) -> Any:
    """A pipeline with these components and without any other."""
    names = list(cls.__init__.__annotations__)
    missing = {name: None for name in names if name in _MAY_BE_MISSING}
    pipe = cls(
        **({"scheduler": diffusers.FlowMatchEulerDiscreteScheduler()} | missing | components)
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


_MAY_BE_MISSING = {
    "text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4",
    "tokenizer", "tokenizer_2", "tokenizer_3", "tokenizer_4",
    "vae", "processor", "text_processor", "image_encoder", "feature_extractor",
}  # fmt: skip


def _size(scale: int = 8) -> dict[str, int]:
    return {"height": LATENT[0] * scale, "width": LATENT[1] * scale}


def _common(scale: int = 8) -> Arguments:
    return {"num_inference_steps": STEPS, "output_type": "latent", **_size(scale)}


def _embeds(width: int, tokens: int = TEXT, suffix: str = "") -> dict[str, Tensor]:
    """Text embeddings [1, tokens, width], with and without what is asked for."""
    names = (f"prompt_embeds{suffix}", f"negative_prompt_embeds{suffix}")
    return {n: noise(1, tokens, width, seed=k, salt=50) for k, n in enumerate(names)}


def _pooled(width: int) -> dict[str, Tensor]:
    names = ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    return {n: noise(1, width, seed=k, salt=51) for k, n in enumerate(names)}


def _positive(arguments: Arguments) -> Arguments:
    """Without what is not asked for."""
    return {name: value for name, value in arguments.items() if not name.startswith("negative")}


def _listed(arguments: dict[str, Tensor]) -> Arguments:
    """Texts as lists of their items."""
    return {name: list(text) for name, text in arguments.items()}


def _masks(name: str, tokens: int = TEXT, hidden: int = 0) -> dict[str, Tensor]:
    """Masks [1, tokens] of both texts; the negative one is shorter by `hidden`."""
    full = torch.ones(1, tokens, dtype=torch.bool)
    short = full.clone()
    short[:, tokens - hidden :] = False
    return {name: full, f"negative_{name}": short}


def _picture(scale: int = 8, seed: int = 7) -> Tensor:
    return noise(1, 3, *_size(scale).values(), seed=seed).sigmoid()


def make_vae() -> Any:
    """An autoencoder of pictures: 4 channels, eight pixels per latent side."""
    return seeded(
        diffusers.AutoencoderKL,
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=2,
        sample_size=64,
        shift_factor=0.1,
        scaling_factor=0.5,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def make_wan_vae(cls: Any, **config: Any) -> Any:
    """An autoencoder of videos as Wan and Qwen have it: 4 channels, eight pixels per side."""
    return seeded(
        cls,
        z_dim=4,
        num_res_blocks=1,
        latents_mean=[0.1] * 4,
        latents_std=[1.5] * 4,
        **({"base_dim": 4, "dim_mult": [1, 1, 1, 1]} | config),
    )


def _ddim() -> Any:
    return diffusers.DDIMScheduler(clip_sample=False)


def _cogvideox_ddim() -> Any:
    return diffusers.CogVideoXDDIMScheduler(clip_sample=False)


def _small_vae() -> Any:
    """QwenImageEdit makes any picture 1024 x 1024: an autoencoder that makes it small."""
    config = {"base_dim": 2, "dim_mult": [1] * 7, "temperal_downsample": [False] * 6}
    return make_wan_vae(diffusers.AutoencoderKLQwenImage, **config)


def _easyanimate_vae() -> Any:
    return seeded(
        diffusers.AutoencoderKLMagvit,
        latent_channels=4,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
    )


_wan_vae = functools.partial(make_wan_vae, diffusers.AutoencoderKLWan)
_qwen_vae = functools.partial(make_wan_vae, diffusers.AutoencoderKLQwenImage)


def _tiny(name: str, **changes: Any) -> Make:
    """A transformer of the zoo, or one like it."""
    return functools.partial(DITS[name].build, **changes)


def _controlnet(kind: str, dit: str, **changes: Any) -> Make:
    """The ControlNet of a transformer."""
    cls = getattr(diffusers, f"{kind}ControlNetModel")
    names = inspect.signature(cls.__init__).parameters
    config = {name: value for name, value in DITS[dit].config.items() if name in names}
    return functools.partial(seeded, cls, **(config | changes), seed=1)


def _case(
    cls: str, transformer: str | Make, arguments: Arguments, scale: int = 8, **components: Any
) -> Callable[[], Case]:
    """A pipeline and a call of it.

    Args:
        cls: of the pipeline.
        transformer: what makes it, or its name in the zoo.
        scale: pixels for each latent one.
        components: what makes the others, or the things themselves.
    """

    def make() -> Case:
        first = _tiny(transformer) if isinstance(transformer, str) else transformer
        parts = {"transformer": first, **components}
        made = {name: part() if callable(part) else part for name, part in parts.items()}
        return _pipeline(getattr(diffusers, f"{cls}Pipeline"), **made), _common(scale) | arguments

    return make


def _hidream() -> Case:
    llama = _embeds(24, suffix="_llama3")
    layers = {name: text.expand(3, 1, -1, -1) for name, text in llama.items()}
    texts = _embeds(32, suffix="_t5") | layers | _pooled(24)
    pipe, arguments = _case("HiDreamImage", "hidream", texts, vae=make_vae)()
    pipe.default_sample_size = 10  # pictures are made as large as this, squared
    return pipe, arguments


_MASKED = _masks("prompt_attention_mask")
_UNEVEN = _masks("prompt_attention_mask", hidden=2)
_MASKED_EMBEDS = _masks("prompt_embeds_mask")
_UNEVEN_EMBEDS = _masks("prompt_embeds_mask", hidden=2)
_FLUX = _embeds(32) | _pooled(24)
_ONE_FLUX = _positive(_FLUX)
_CONTROL = {"control_image": _picture(), "controlnet_conditioning_scale": 0.7}
_FLUX_MASK = torch.zeros(1, 1, *_size().values())
_FLUX_MASK[..., 32:64, 16:] = 1
_NO_BINS = {"use_resolution_binning": False}
_NO_NEGATIVE = {"negative_prompt": None}
_HUNYUAN_TEXTS = (
    _embeds(32, tokens=7)
    | _embeds(24, tokens=5, suffix="_2")
    | _masks("prompt_attention_mask", 7)
    | _masks("prompt_attention_mask_2", 5)
    | _NO_BINS
)
_HUNYUAN_DIT = {
    "vae": make_vae,
    "scheduler": _ddim,
    "safety_checker": None,
    "requires_safety_checker": False,
}
_IMAGES = {
    "flux": _case("Flux", "flux", _ONE_FLUX, vae=make_vae),
    "flux_true_cfg": _case("Flux", "flux", _FLUX | {"true_cfg_scale": 2.0}, vae=make_vae),
    "flux_kontext": _case(
        "FluxKontext",
        "flux",
        _ONE_FLUX
        | {"image": _picture(), "_auto_resize": False, "max_area": math.prod(_size().values())},
        vae=make_vae,
    ),
    "flux_fill": _case(
        "FluxFill",
        # Behind the 16 channels of the picture: as many of what stays, and 8 x 8 pixels of mask for
        # each of 2 x 2.
        _tiny("flux_schnell", in_channels=16 + 16 + 4 * 64, out_channels=16),
        _ONE_FLUX | {"image": _picture(), "mask_image": _FLUX_MASK},
        vae=make_vae,
    ),
    "flux_controlnet": _case(
        "FluxControlNet",
        "flux",
        _ONE_FLUX | _CONTROL,
        vae=make_vae,
        controlnet=_controlnet("Flux", "flux", num_layers=2, num_single_layers=2),
    ),
    "flux2": _case("Flux2", "flux2", _positive(_embeds(32))),
    "sd3": _case("StableDiffusion3", "sd35", _FLUX, vae=make_vae),
    "sd3_controlnet": _case(
        "StableDiffusion3ControlNet",
        "sd3",
        _FLUX | _CONTROL,
        vae=make_vae,
        controlnet=_controlnet("SD3", "sd3", num_layers=2, extra_conditioning_channels=0),
    ),
    "qwen": _case("QwenImage", "qwen", _embeds(32) | _MASKED_EMBEDS, vae=_qwen_vae),
    "qwen_edit": _case(
        "QwenImageEdit",
        "qwen",
        _embeds(32) | _MASKED_EMBEDS | {"image": Image.effect_noise((64, 64), 50).convert("RGB")},
        scale=64,
        vae=_small_vae,
    ),
    "zimage": _case("ZImage", "zimage", _listed(_embeds(24)), vae=make_vae),
    "chroma": _case("Chroma", "chroma", _embeds(32) | _UNEVEN, vae=make_vae),
    "lumina2": _case("Lumina2", "lumina2", _embeds(24) | _UNEVEN, vae=make_vae),
    "lumina_next": _case("Lumina", "lumina_next", _embeds(32) | _MASKED, vae=make_vae),
    "auraflow": _case("AuraFlow", "auraflow", _embeds(32) | _MASKED, vae=make_vae),
    "cogview3": _case(
        "CogView3Plus", "cogview3", _embeds(32), vae=make_vae, scheduler=_cogvideox_ddim
    ),
    "cogview4": _case("CogView4", "cogview4", _embeds(32), vae=make_vae),
    "hunyuan_image": _case(
        "HunyuanImage",
        "hunyuan_image_ocr",
        _embeds(32) | _embeds(24, suffix="_2") | _UNEVEN_EMBEDS | _masks("prompt_embeds_mask_2"),
        scale=32,
    ),
    "hunyuan_dit": _case("HunyuanDiT", "hunyuan_dit", _HUNYUAN_TEXTS, **_HUNYUAN_DIT),
    "hunyuan_dit_controlnet": _case(
        "HunyuanDiTControlNet",
        "hunyuan_dit",
        _HUNYUAN_TEXTS | {"control_image": _picture()},
        **_HUNYUAN_DIT,
        controlnet=_controlnet("HunyuanDiT2D", "hunyuan_dit", transformer_num_layers=6),
    ),
    "hidream": _hidream,
    "pixart_sigma": _case(
        "PixArtSigma",
        functools.partial(seeded, diffusers.PixArtTransformer2DModel, **PIXART_CONFIG),
        _embeds(32) | _MASKED | _NO_BINS | _NO_NEGATIVE,
        vae=make_vae,
        scheduler=_ddim,
    ),
    "sana": _case("Sana", "sana", _embeds(24) | _MASKED | _NO_BINS | _NO_NEGATIVE, scale=32),
    "krea2": _case(
        "Krea2",
        "krea2",
        {name: text.unsqueeze(2).expand(-1, -1, 3, -1) for name, text in _embeds(24).items()}
        | _UNEVEN_EMBEDS,
    ),
    "ovis": _case("OvisImage", "ovis", _embeds(32) | _NO_NEGATIVE, vae=make_vae),
    "bria": _case("Bria", "bria", _embeds(32), vae=make_vae),
    "bria_fibo2": _case(
        "BriaFibo2",
        "bria_fibo2",
        {name: text[:, None].expand(-1, 3, -1, -1) for name, text in _embeds(24).items()}
        | _UNEVEN_EMBEDS,
        vae=make_vae,
    ),
    "nucleus": _case("NucleusMoEImage", "nucleus", _embeds(32) | _MASKED_EMBEDS),
    "prx": _case("PRX", "prx", _embeds(24) | _UNEVEN | _NO_BINS, vae=make_vae),
    "ernie": _case(
        "ErnieImage",
        "ernie",
        _listed(_embeds(24)) | {"use_pe": False},
        scale=16,
        pe=None,
        pe_tokenizer=None,
    ),
}

_VIDEO = _embeds(32) | {"num_frames": 9}
_VIDEOS = {
    # Wan 2.2: the first step with one transformer, the second with the other.
    "wan": _case("Wan", "wan", _VIDEO, transformer_2=_tiny("wan", seed=1), boundary_ratio=0.7),
    # Wan 2.2 5B: a time per token.
    "wan_ti2v": _case("Wan", "wan", _VIDEO, expand_timesteps=True),
    "wan_i2v": _case(
        "WanImageToVideo",
        # Wan 2.2. Behind the noise: four masks of frames, and the picture.
        _tiny("wan", in_channels=12),
        _VIDEO | {"image": _picture()},
        vae=_wan_vae,
        image_processor=None,
    ),
    "wan_vace": _case(
        "WanVACE",
        # Two latent videos, of what stays and what changes, and 8 x 8 pixels of mask.
        _tiny("wan_vace", vace_in_channels=4 + 4 + 64),
        _VIDEO,
        vae=_wan_vae,
    ),
    "skyreels": _case(
        "SkyReelsV2",
        "skyreels_df",
        _VIDEO,
        scheduler=lambda: diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True
        ),
    ),
    "anyflow": _case(
        "AnyFlow", "anyflow", _positive(_VIDEO), scheduler=diffusers.FlowMapEulerDiscreteScheduler
    ),
    "helios": _case("Helios", "helios", _VIDEO | {"num_latent_frames_per_chunk": 3}, vae=_wan_vae),
    "hunyuan_video": _case(
        "HunyuanVideo", "hunyuan_video", _VIDEO | _pooled(24) | _UNEVEN | {"true_cfg_scale": 2.0}
    ),
    "motif": _case(
        "MotifVideo",
        "motif",
        _VIDEO | _UNEVEN,
        vae=_wan_vae,
        guider=diffusers.ClassifierFreeGuidance,
    ),
    "cogvideox": _case("CogVideoX", "cogvideox_5b", _VIDEO, scheduler=_cogvideox_ddim),
    "ltx": _case("LTX", "ltx", _embeds(24) | _MASKED | {"num_frames": 17}, scale=32),
    "mochi": _case(
        "Mochi",
        "mochi",
        _embeds(32) | _UNEVEN | {"num_frames": 13},
        scheduler=lambda: diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    ),
    "allegro": _case(
        "Allegro",
        "allegro",
        _embeds(24) | _UNEVEN | {"num_frames": 12} | _NO_NEGATIVE,
        scheduler=_ddim,
    ),
    "easyanimate": _case("EasyAnimate", "easyanimate", _VIDEO | _MASKED, vae=_easyanimate_vae),
    "latte": _case(
        "Latte",
        "latte",
        _embeds(24) | {"height": 64, "width": 64, "video_length": 3} | _NO_NEGATIVE,
        vae=make_vae,
        scheduler=_ddim,
    ),
    "kandinsky5": _case(
        "Kandinsky5T2V",
        "kandinsky5",
        _embeds(24, suffix="_qwen")
        | {name.replace("pooled_", "") + "_clip": x for name, x in _pooled(12).items()}
        | {f"{name}prompt_cu_seqlens": torch.tensor([0, TEXT]) for name in ("", "negative_")}
        | {"num_frames": 9},
    ),
}

PIPELINES = _IMAGES | _VIDEOS
