"""Inputs of the right shape for a model, to find out what it does at an image size."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["example_inputs"]

_TEXT_TOKENS = 77
_FRAMES = 8
_PIXELS_PER_LATENT = 8

Inputs = dict[str, Any]


def example_inputs(module: nn.Module, size: tuple[int, int], batch: int) -> Inputs | None:
    """Arguments for `module.forward` on a latent of `size`, or None if its class is not known."""
    for cls in type(module).__mro__:
        if cls.__name__ in _BUILDERS:
            return _BUILDERS[cls.__name__](module, size, batch)
    return None


def _tensor(module: nn.Module, *shape: int) -> Tensor:
    like = next(p for p in module.parameters() if p.is_floating_point())
    return torch.zeros(shape, device=like.device, dtype=like.dtype)


def _steps(module: nn.Module, batch: int) -> Tensor:
    return torch.ones(batch, device=next(module.parameters()).device, dtype=torch.int64)


def _unet(module: Any, size: tuple[int, int], batch: int, frames: tuple[int, ...] = ()) -> Inputs:
    config = module.config
    width = config.get("encoder_hid_dim") or config["cross_attention_dim"]
    if isinstance(width, (list, tuple)):
        width = width[0]
    inputs: Inputs = {
        "sample": _tensor(module, batch, config["in_channels"], *frames, *size),
        "timestep": _steps(module, batch),
        "encoder_hidden_states": _tensor(module, batch, _TEXT_TOKENS, width),
    }
    if config.get("num_class_embeds") or config.get("class_embed_type") == "timestep":
        inputs["class_labels"] = _steps(module, batch)
    if config.get("addition_embed_type") == "text_time":
        ids = 6
        text = config["projection_class_embeddings_input_dim"]
        text -= ids * config["addition_time_embed_dim"]
        inputs["added_cond_kwargs"] = {
            "text_embeds": _tensor(module, batch, text),
            "time_ids": _tensor(module, batch, ids),
        }
    return inputs


def _video_unet(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    return _unet(module, size, batch, frames=(_FRAMES,))


def _motion_unet(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    inputs = _video_unet(module, size, batch)
    text = inputs["encoder_hidden_states"]  # one caption per frame
    return {**inputs, "encoder_hidden_states": text.repeat_interleave(_FRAMES, dim=0)}


def _controlnet(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    channels = module.config.get("conditioning_channels", 3)
    pixels = (side * _PIXELS_PER_LATENT for side in size)
    condition = _tensor(module, batch, channels, *pixels)
    return {**_unet(module, size, batch), "controlnet_cond": condition}


def _multi_controlnet(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    inputs = _controlnet(module.nets[0], size, batch)
    count = len(module.nets)
    return {
        **inputs,
        "controlnet_cond": [inputs["controlnet_cond"]] * count,
        "conditioning_scale": [1.0] * count,
    }


def _svd(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    width = module.config["cross_attention_dim"]
    return {
        "sample": _tensor(module, batch, _FRAMES, module.config["in_channels"], *size),
        "timestep": _steps(module, batch),
        "encoder_hidden_states": _tensor(
            module, batch, 1, width if isinstance(width, int) else width[0]
        ),
        "added_time_ids": _tensor(module, batch, 3),
    }


def _dit(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    return {
        "hidden_states": _tensor(module, batch, module.config["in_channels"], *size),
        "timestep": _steps(module, batch),
        "class_labels": _steps(module, batch),
    }


def _pixart(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    inputs: Inputs = {
        "hidden_states": _tensor(module, batch, module.config["in_channels"], *size),
        "timestep": _steps(module, batch),
        "encoder_hidden_states": _tensor(
            module, batch, _TEXT_TOKENS, module.config["caption_channels"]
        ),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    if module.use_additional_conditions:
        inputs["added_cond_kwargs"] = {
            "resolution": _tensor(module, batch, 2),
            "aspect_ratio": _tensor(module, batch, 1),
        }
    return inputs


def _ldm_unet(module: Any, size: tuple[int, int], batch: int) -> Inputs:
    inputs: Inputs = {
        "x": _tensor(module, batch, module.in_channels, *size),
        "timesteps": _steps(module, batch),
    }
    widths = [m.attn2.to_k.in_features for m in module.modules() if hasattr(m, "attn2")]
    if widths:
        inputs["context"] = _tensor(module, batch, _TEXT_TOKENS, widths[0])
    if module.num_classes is not None:
        label = module.label_emb
        dense = next((m for m in label.modules() if isinstance(m, nn.Linear)), None)
        inputs["y"] = (
            _steps(module, batch) if dense is None else _tensor(module, batch, dense.in_features)
        )
    return inputs


_BUILDERS: dict[str, Callable[[Any, tuple[int, int], int], Inputs]] = {
    "UNet2DConditionModel": _unet,
    "ControlNetModel": _controlnet,
    "MultiControlNetModel": _multi_controlnet,
    "UNetMotionModel": _motion_unet,
    "UNet3DConditionModel": _video_unet,
    "UNetSpatioTemporalConditionModel": _svd,
    "DiTTransformer2DModel": _dit,
    "PixArtTransformer2DModel": _pixart,
    "UNetModel": _ldm_unet,
}
