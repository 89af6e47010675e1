"""Whole pipelines of diffusers around the tiny transformers of `zoo_dit`.

Texts come as embeddings, so that no pipeline needs a text encoder, and results stay latents.
Autoencoders are there where a picture has to go in. Every pipeline makes pictures or videos of
12 x 8 latent pixels, in two steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor
from zoo_diffusers import PIXART_CONFIG, TEXT, noise
from zoo_dit import DITS, FLUX_POOLED, HUNYUAN_DIT, SD3, seeded

Case = tuple[Any, dict[str, Any]]  # a pipeline, and the arguments of one call
LATENT = (12, 8)
STEPS = 2


def run(pipe: Any, arguments: dict[str, Any], seed: int = 0, **changes: Any) -> Tensor:
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


def _common(scale: int = 8) -> dict[str, Any]:
    return {"num_inference_steps": STEPS, "output_type": "latent", **_size(scale)}


def _embeds(width: int, tokens: int = TEXT, negative: bool = True, suffix: str = "") -> Any:
    """Text embeddings [1, tokens, width], with and without what is asked for."""
    names = [f"prompt_embeds{suffix}", f"negative_prompt_embeds{suffix}"][: 1 + negative]
    return {n: noise(1, tokens, width, seed=k, salt=50) for k, n in enumerate(names)}


def _pooled(width: int, negative: bool = True) -> dict[str, Tensor]:
    names = ["pooled_prompt_embeds", "negative_pooled_prompt_embeds"][: 1 + negative]
    return {n: noise(1, width, seed=k, salt=51) for k, n in enumerate(names)}


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


def flux() -> Case:
    pipe = _pipeline(diffusers.FluxPipeline, transformer=DITS["flux"].build(), vae=make_vae())
    return pipe, _common() | _embeds(32, negative=False) | _pooled(24, negative=False)


def flux_true_cfg() -> Case:
    pipe, arguments = flux()
    return pipe, arguments | _embeds(32) | _pooled(24) | {"true_cfg_scale": 2.0}


def flux_kontext() -> Case:
    cls = diffusers.FluxKontextPipeline
    pipe = _pipeline(cls, transformer=DITS["flux"].build(), vae=make_vae())
    small = {"image": _picture(), "_auto_resize": False, "max_area": _area()}
    return pipe, _common() | _embeds(32, negative=False) | _pooled(24, negative=False) | small


def _area() -> int:
    height, width = _size().values()
    return height * width


def flux_fill() -> Case:
    # Behind the 16 channels of the picture: as many of what stays, 8 x 8 pixels of mask in 2 x 2.
    config = FLUX_POOLED | {"in_channels": 16 + 16 + 4 * 64, "out_channels": 16}
    transformer = seeded(diffusers.FluxTransformer2DModel, **config)
    pipe = _pipeline(diffusers.FluxFillPipeline, transformer=transformer, vae=make_vae())
    mask = torch.zeros(1, 1, *_size().values())
    mask[..., 32:64, 16:] = 1
    pictures = {"image": _picture(), "mask_image": mask}
    return pipe, _common() | _embeds(32, negative=False) | _pooled(24, negative=False) | pictures


def flux_controlnet() -> Case:
    config = FLUX_POOLED | {"guidance_embeds": True, "num_layers": 2, "num_single_layers": 2}
    pipe = _pipeline(
        diffusers.FluxControlNetPipeline,
        transformer=DITS["flux"].build(),
        vae=make_vae(),
        controlnet=seeded(diffusers.FluxControlNetModel, **config, seed=1),
    )
    arguments = _common() | _embeds(32, negative=False) | _pooled(24, negative=False)
    return pipe, arguments | {"control_image": _picture(), "controlnet_conditioning_scale": 0.7}


def sd3() -> Case:
    transformer = DITS["sd35"].build()
    pipe = _pipeline(diffusers.StableDiffusion3Pipeline, transformer=transformer, vae=make_vae())
    return pipe, _common() | _embeds(32) | _pooled(24)


def sd3_controlnet() -> Case:
    config = SD3 | {"num_layers": 2, "extra_conditioning_channels": 0}
    pipe = _pipeline(
        diffusers.StableDiffusion3ControlNetPipeline,
        transformer=DITS["sd3"].build(),
        vae=make_vae(),
        controlnet=seeded(diffusers.SD3ControlNetModel, **config, seed=1),
    )
    control = {"control_image": _picture(), "controlnet_conditioning_scale": 0.7}
    return pipe, _common() | _embeds(32) | _pooled(24) | control


def qwen() -> Case:
    pipe = _pipeline(
        diffusers.QwenImagePipeline,
        transformer=DITS["qwen"].build(),
        vae=make_wan_vae(diffusers.AutoencoderKLQwenImage),
    )
    return pipe, _common() | _embeds(32) | _masks("prompt_embeds_mask")


def qwen_edit() -> Case:
    # The picture that is given always becomes 1024 x 1024: an autoencoder that makes it small.
    vae = make_wan_vae(
        diffusers.AutoencoderKLQwenImage,
        base_dim=2,
        dim_mult=[1] * 7,
        temperal_downsample=[False] * 6,
    )
    pipe = _pipeline(diffusers.QwenImageEditPipeline, transformer=DITS["qwen"].build(), vae=vae)
    from PIL import Image

    given = {"image": Image.effect_noise((64, 64), 50).convert("RGB")}
    return pipe, _common(64) | _embeds(32) | _masks("prompt_embeds_mask") | given


def zimage() -> Case:
    transformer = DITS["zimage"].build()
    pipe = _pipeline(diffusers.ZImagePipeline, transformer=transformer, vae=make_vae())
    texts = {name: [text[0]] for name, text in _embeds(24).items()}
    return pipe, _common() | texts


def chroma() -> Case:
    transformer = DITS["chroma"].build()
    pipe = _pipeline(diffusers.ChromaPipeline, transformer=transformer, vae=make_vae())
    return pipe, _common() | _embeds(32) | _masks("prompt_attention_mask", hidden=2)


def flux2() -> Case:
    pipe = _pipeline(diffusers.Flux2Pipeline, transformer=DITS["flux2"].build())
    return pipe, _common() | _embeds(32, negative=False)


def lumina2() -> Case:
    transformer = DITS["lumina2"].build()
    pipe = _pipeline(diffusers.Lumina2Pipeline, transformer=transformer, vae=make_vae())
    return pipe, _common() | _embeds(24) | _masks("prompt_attention_mask", hidden=2)


def auraflow() -> Case:
    transformer = DITS["auraflow"].build()
    pipe = _pipeline(diffusers.AuraFlowPipeline, transformer=transformer, vae=make_vae())
    return pipe, _common() | _embeds(32) | _masks("prompt_attention_mask")


def wan() -> Case:
    """Wan 2.2: the first step with one transformer, the second with the other."""
    pipe = _pipeline(
        diffusers.WanPipeline,
        transformer=DITS["wan"].build(),
        transformer_2=seeded(diffusers.WanTransformer3DModel, **DITS["wan"].config, seed=1),
        boundary_ratio=0.7,
    )
    return pipe, _common() | _embeds(32) | {"num_frames": 9}


def wan_ti2v() -> Case:
    """Wan 2.2 5B: a time per token."""
    cls = diffusers.WanPipeline
    pipe = _pipeline(cls, transformer=DITS["wan"].build(), expand_timesteps=True)
    return pipe, _common() | _embeds(32) | {"num_frames": 9}


def wan_vace() -> Case:
    # Two latent videos, of what stays and what changes, and 8 x 8 pixels of mask.
    config = DITS["wan_vace"].config | {"vace_in_channels": 4 + 4 + 64}
    pipe = _pipeline(
        diffusers.WanVACEPipeline,
        transformer=seeded(diffusers.WanVACETransformer3DModel, **config),
        vae=make_wan_vae(diffusers.AutoencoderKLWan),
    )
    return pipe, _common() | _embeds(32) | {"num_frames": 9}


def hunyuan_video() -> Case:
    pipe = _pipeline(diffusers.HunyuanVideoPipeline, transformer=DITS["hunyuan_video"].build())
    arguments = _common() | _embeds(32) | _pooled(24) | _masks("prompt_attention_mask", hidden=2)
    return pipe, arguments | {"num_frames": 9, "true_cfg_scale": 2.0}


def cogvideox() -> Case:
    pipe = _pipeline(
        diffusers.CogVideoXPipeline,
        transformer=DITS["cogvideox_5b"].build(),
        scheduler=diffusers.CogVideoXDDIMScheduler(clip_sample=False),
    )
    return pipe, _common() | _embeds(32) | {"num_frames": 9}


def ltx() -> Case:
    pipe = _pipeline(diffusers.LTXPipeline, transformer=DITS["ltx"].build())
    return pipe, _common(32) | _embeds(24) | _masks("prompt_attention_mask") | {"num_frames": 17}


def mochi() -> Case:
    pipe = _pipeline(
        diffusers.MochiPipeline,
        transformer=DITS["mochi"].build(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    )
    masks = _masks("prompt_attention_mask", hidden=2)
    return pipe, _common() | _embeds(32) | masks | {"num_frames": 13}


def cogview4() -> Case:
    transformer = DITS["cogview4"].build()
    pipe = _pipeline(diffusers.CogView4Pipeline, transformer=transformer, vae=make_vae())
    return pipe, _common() | _embeds(32)


def cogview3() -> Case:
    pipe = _pipeline(
        diffusers.CogView3PlusPipeline,
        transformer=DITS["cogview3"].build(),
        vae=make_vae(),
        scheduler=diffusers.CogVideoXDDIMScheduler(clip_sample=False),
    )
    return pipe, _common() | _embeds(32)


def hunyuan_image() -> Case:
    # The second text is that of letters in the picture.
    config = DITS["hunyuan_image"].config | {"text_embed_2_dim": 24}
    pipe = _pipeline(
        diffusers.HunyuanImagePipeline,
        transformer=seeded(diffusers.HunyuanImageTransformer2DModel, **config),
    )
    texts = _embeds(32) | _embeds(24, suffix="_2")
    masks = _masks("prompt_embeds_mask", hidden=2) | _masks("prompt_embeds_mask_2")
    return pipe, _common(32) | texts | masks


def pixart_sigma() -> Case:
    pipe = _pipeline(
        diffusers.PixArtSigmaPipeline,
        transformer=seeded(diffusers.PixArtTransformer2DModel, **PIXART_CONFIG),
        vae=make_vae(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )
    arguments = _common() | _embeds(32) | _masks("prompt_attention_mask")
    return pipe, arguments | {"use_resolution_binning": False, "negative_prompt": None}


def sana() -> Case:
    transformer = DITS["sana"].build()
    pipe = _pipeline(diffusers.SanaPipeline, transformer=transformer)
    arguments = _common(32) | _embeds(24) | _masks("prompt_attention_mask")
    return pipe, arguments | {"use_resolution_binning": False, "negative_prompt": None}


def hidream() -> Case:
    transformer = DITS["hidream"].build()
    pipe = _pipeline(diffusers.HiDreamImagePipeline, transformer=transformer, vae=make_vae())
    pipe.default_sample_size = 10  # pictures are made as large as this, squared
    t5, llama = _embeds(32, suffix="_t5"), _embeds(24, suffix="_llama3")
    layers = {name: text.expand(3, 1, -1, -1) for name, text in llama.items()}
    return pipe, _common() | t5 | layers | _pooled(24)


def hunyuan_dit() -> Case:
    pipe = _pipeline(
        diffusers.HunyuanDiTPipeline,
        transformer=DITS["hunyuan_dit"].build(),
        vae=make_vae(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        safety_checker=None,
        requires_safety_checker=False,
    )
    texts = _embeds(32, tokens=7) | _embeds(24, tokens=5, suffix="_2")
    masks = _masks("prompt_attention_mask", 7) | _masks("prompt_attention_mask_2", 5)
    return pipe, _common() | texts | masks | {"use_resolution_binning": False}


def krea2() -> Case:
    transformer = DITS["krea2"].build()
    pipe = _pipeline(diffusers.Krea2Pipeline, transformer=transformer)
    texts = {name: text.unsqueeze(2).expand(-1, -1, 3, -1) for name, text in _embeds(24).items()}
    return pipe, _common() | texts | _masks("prompt_embeds_mask", hidden=2)


def ovis() -> Case:
    pipe = _pipeline(diffusers.OvisImagePipeline, transformer=DITS["ovis"].build(), vae=make_vae())
    return pipe, _common() | _embeds(32) | {"negative_prompt": None}


def bria() -> Case:
    pipe = _pipeline(diffusers.BriaPipeline, transformer=DITS["bria"].build(), vae=make_vae())
    return pipe, _common() | _embeds(32)


def nucleus() -> Case:
    transformer = DITS["nucleus"].build()
    pipe = _pipeline(diffusers.NucleusMoEImagePipeline, transformer=transformer)
    return pipe, _common() | _embeds(32) | _masks("prompt_embeds_mask")


def prx() -> Case:
    pipe = _pipeline(diffusers.PRXPipeline, transformer=DITS["prx"].build(), vae=make_vae())
    arguments = _common() | _embeds(24) | _masks("prompt_attention_mask", hidden=2)
    return pipe, arguments | {"use_resolution_binning": False}


def lumina_next() -> Case:
    transformer = DITS["lumina_next"].build()
    pipe = _pipeline(diffusers.LuminaPipeline, transformer=transformer, vae=make_vae())
    return pipe, _common() | _embeds(32) | _masks("prompt_attention_mask")


def ernie() -> Case:
    transformer = DITS["ernie"].build()
    pipe = _pipeline(
        diffusers.ErnieImagePipeline, transformer=transformer, pe=None, pe_tokenizer=None
    )
    texts = {name: [text[0]] for name, text in _embeds(24).items()}
    return pipe, _common(16) | texts | {"use_pe": False}


def wan_i2v() -> Case:
    # Wan 2.2. Behind the noise: four masks of frames, and the picture.
    config = DITS["wan"].config | {"in_channels": 12}
    pipe = _pipeline(
        diffusers.WanImageToVideoPipeline,
        transformer=seeded(diffusers.WanTransformer3DModel, **config),
        vae=make_wan_vae(diffusers.AutoencoderKLWan),
        image_processor=None,
    )
    return pipe, _common() | _embeds(32) | {"image": _picture(), "num_frames": 9}


def skyreels() -> Case:
    transformer = DITS["skyreels_df"].build()
    pipe = _pipeline(
        diffusers.SkyReelsV2Pipeline,
        transformer=transformer,
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True
        ),
    )
    return pipe, _common() | _embeds(32) | {"num_frames": 9}


def allegro() -> Case:
    pipe = _pipeline(
        diffusers.AllegroPipeline,
        transformer=DITS["allegro"].build(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )
    arguments = _common() | _embeds(24) | _masks("prompt_attention_mask", hidden=2)
    return pipe, arguments | {"num_frames": 12, "negative_prompt": None}


def easyanimate() -> Case:
    transformer = DITS["easyanimate"].build()
    vae = seeded(
        diffusers.AutoencoderKLMagvit,
        latent_channels=4,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
    )
    pipe = _pipeline(diffusers.EasyAnimatePipeline, transformer=transformer, vae=vae)
    arguments = _common() | _embeds(32) | _masks("prompt_attention_mask")
    return pipe, arguments | {"num_frames": 9}


def latte() -> Case:
    pipe = _pipeline(
        diffusers.LattePipeline,
        transformer=DITS["latte"].build(),
        vae=make_vae(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )
    arguments = _common() | _embeds(24) | {"height": 64, "width": 64, "video_length": 3}
    return pipe, arguments | {"negative_prompt": None}


def hunyuan_dit_controlnet() -> Case:
    pipe, arguments = hunyuan_dit()
    names = inspect.signature(diffusers.HunyuanDiT2DControlNetModel.__init__).parameters
    config = {name: value for name, value in HUNYUAN_DIT.items() if name in names}
    controlnet = seeded(
        diffusers.HunyuanDiT2DControlNetModel, **config, transformer_num_layers=6, seed=1
    )
    pipe = _pipeline(
        diffusers.HunyuanDiTControlNetPipeline,
        **{name: pipe.components[name] for name in ("transformer", "vae", "scheduler")},
        controlnet=controlnet,
        safety_checker=None,
        requires_safety_checker=False,
    )
    return pipe, arguments | {"control_image": _picture()}


def bria_fibo2() -> Case:
    transformer = DITS["bria_fibo2"].build()
    pipe = _pipeline(diffusers.BriaFibo2Pipeline, transformer=transformer, vae=make_vae())
    texts = {name: text[:, None].expand(-1, 3, -1, -1) for name, text in _embeds(24).items()}
    return pipe, _common() | texts | _masks("prompt_embeds_mask", hidden=2)


def kandinsky5() -> Case:
    pipe = _pipeline(diffusers.Kandinsky5T2VPipeline, transformer=DITS["kandinsky5"].build())
    texts = _embeds(24, suffix="_qwen")
    pooled = {name.replace("pooled_", "") + "_clip": x for name, x in _pooled(12).items()}
    lengths = {f"{name}prompt_cu_seqlens": torch.tensor([0, TEXT]) for name in ("", "negative_")}
    return pipe, _common() | texts | pooled | lengths | {"num_frames": 9}


def anyflow() -> Case:
    pipe = _pipeline(
        diffusers.AnyFlowPipeline,
        transformer=DITS["anyflow"].build(),
        scheduler=diffusers.FlowMapEulerDiscreteScheduler(),
    )
    return pipe, _common() | _embeds(32, negative=False) | {"num_frames": 9}


def motif() -> Case:
    pipe = _pipeline(
        diffusers.MotifVideoPipeline,
        transformer=DITS["motif"].build(),
        vae=make_wan_vae(diffusers.AutoencoderKLWan),
        guider=diffusers.ClassifierFreeGuidance(),
    )
    masks = _masks("prompt_attention_mask", hidden=2)
    return pipe, _common() | _embeds(32) | masks | {"num_frames": 9}


def helios() -> Case:
    pipe = _pipeline(
        diffusers.HeliosPipeline,
        transformer=DITS["helios"].build(),
        vae=make_wan_vae(diffusers.AutoencoderKLWan),
    )
    chunks = {"num_frames": 9, "num_latent_frames_per_chunk": 3}
    return pipe, _common() | _embeds(32) | chunks


PIPELINES: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        flux, flux_true_cfg, flux_kontext, flux_fill, flux_controlnet, sd3, sd3_controlnet, qwen,
        qwen_edit, zimage, chroma, flux2, lumina2, auraflow, wan, wan_ti2v, wan_vace,
        hunyuan_video, cogvideox, ltx, mochi, pixart_sigma, cogview4, cogview3, hunyuan_image, sana,
        hidream, hunyuan_dit, krea2, ovis, bria, nucleus, prx, lumina_next, ernie, wan_i2v,
        skyreels, allegro, easyanimate, latte, hunyuan_dit_controlnet, bria_fibo2,
        kandinsky5, anyflow, motif, helios,
    )
}  # fmt: skip
