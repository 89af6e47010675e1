"""Inputs of the right shape for UNets and ControlNets of theirs; see `inputs`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from .inputs_example import PIXELS_PER_LATENT, Example

__all__ = ["UNETS"]

Inputs = dict[str, Any]


def _unet(c: Example, *frames: int) -> Inputs:
    width = c.encoder_hid_dim or c.cross_attention_dim
    inputs: Inputs = {
        "sample": c.tensor(c.in_channels, *frames, c.height, c.width),
        "timestep": c.whole(value=1),
        "encoder_hidden_states": c.tensor(c.text, width if isinstance(width, int) else width[0]),
    }
    if c.num_class_embeds or c.class_embed_type == "timestep":
        inputs["class_labels"] = c.whole(value=1)
    if c.addition_embed_type == "text_time":
        ids = 6
        text = c.projection_class_embeddings_input_dim - ids * c.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {"text_embeds": c.tensor(text), "time_ids": c.tensor(ids)}
    return inputs


def _motion_unet(c: Example) -> Inputs:
    inputs = _unet(c, c.frames)
    text = inputs["encoder_hidden_states"]  # one caption per frame
    return {**inputs, "encoder_hidden_states": text.repeat_interleave(c.frames, dim=0)}


def _controlnet(c: Example) -> Inputs:
    pixels = (side * PIXELS_PER_LATENT for side in (c.height, c.width))
    return {**_unet(c), "controlnet_cond": c.tensor(c.conditioning_channels or 3, *pixels)}


def _multi_controlnet(c: Example) -> Inputs:
    inputs, count = _controlnet(replace(c, module=c.module.nets[0])), len(c.module.nets)
    given = {"controlnet_cond": [inputs["controlnet_cond"]] * count}
    return {**inputs, **given, "conditioning_scale": [1.0] * count}


def _svd(c: Example) -> Inputs:
    inputs = _unet(replace(c, text=1), c.frames)
    sample = inputs["sample"].transpose(1, 2)
    return {**inputs, "sample": sample, "added_time_ids": c.tensor(3)}


def _ldm_unet(c: Example) -> Inputs:
    module = c.module
    inputs: Inputs = {
        "x": c.tensor(module.in_channels, c.height, c.width),
        "timesteps": c.whole(value=1),
    }
    widths = [m.attn2.to_k.in_features for m in module.modules() if hasattr(m, "attn2")]
    if widths:
        inputs["context"] = c.tensor(c.text, widths[0])
    if module.num_classes is not None:
        dense = next((m for m in module.label_emb.modules() if isinstance(m, nn.Linear)), None)
        inputs["y"] = c.whole(value=1) if dense is None else c.tensor(dense.in_features)
    return inputs


UNETS: dict[str, Callable[[Example], Inputs]] = {
    "UNet2DConditionModel": _unet,
    "ControlNetModel": _controlnet,
    "MultiControlNetModel": _multi_controlnet,
    "UNetModel": _ldm_unet,
    "UNetMotionModel": _motion_unet,
    "UNet3DConditionModel": lambda c: _unet(c, c.frames),
    "UNetSpatioTemporalConditionModel": _svd,
}
"""By class."""
