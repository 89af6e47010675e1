"""Example inputs of the right shapes, to find out what a model does at an image size."""

import inspect
from dataclasses import replace
from typing import Any

from torch import nn

from . import find_row
from .arguments import ARGUMENTS, OF_UNETS, OWN
from .example import Example, Rule
from .layouts import LATENTS
from .levels import LEVELLED
from .names import class_names, is_comfy
from .transformers import Transformer

_FRAMES = 8

Inputs = dict[str, Any]


def example_inputs(
    module: nn.Module,
    size: tuple[int, int],
    batch: int,
    frames: int = _FRAMES,
    text: int | None = None,
) -> Inputs | None:
    """Arguments for `module.forward` on a latent of `size`, or None if its class is not known.

    Floating-point tensors are zeros in place of data, and may be filled with anything. Values that
    matter (positions and masks) are integers or booleans, or are inside tuples. Masks and positions
    are made by `torch.tensor`, so that they are constants under `FakeTensorMode`: some models read
    them to trim the text.

    Args:
        module: a UNet or transformer of diffusers or ComfyUI, or a UNet of ldm.
        size: height and width of the latent, in latent pixels.
        batch: items in the call.
        frames: latent frames of a video; image models ignore it.
        text: tokens of text for a transformer; None: as many as its pipeline makes.
    """
    example, row = Example(module, batch, *size, frames, 77), find_row(module)
    if row is None:
        return _unet_inputs(example, text)
    example = replace(example, text=text or row.text)
    if is_comfy(module):
        return _comfy_inputs(example, row)
    # Some models have positions for texts of one length only.
    fixed = example.max_text_seq_length or example.text_len
    example = replace(example, text=fixed or example.text)
    return _inputs(example, row.name, {"hidden_states": LATENTS[row.layout].axes})


def _inputs(example: Example, name: str, rules: dict[str, Rule]) -> Inputs:
    """Arguments for the forward of a class, where there are rules for them."""
    rules = {**ARGUMENTS, **rules, **OWN.get(name, {})}
    cls: Any = next(cls for cls in type(example.module).__mro__ if cls.__name__ == name)
    inputs = {}
    for argument, parameter in inspect.signature(cls.forward).parameters.items():
        optional = parameter.default is not inspect.Parameter.empty
        if argument in rules and not (argument == "encoder_attention_mask" and optional):
            value = example.make(rules[argument])
            if value is not None or not optional:
                inputs[argument] = value
    return inputs


_DITS = ("DiTTransformer2DModel", "PixArtTransformer2DModel")
_UNETS = (*LEVELLED, "ControlNetModel")


def _unet_inputs(example: Example, text: int | None) -> Inputs | None:
    """Inputs of UNets, their ControlNets, and transformers made of the same blocks."""
    for name in class_names(example.module):
        if name in _UNETS:
            return _inputs(example, name, OF_UNETS)
        if name in _DITS:
            latent: dict[str, Rule] = {"hidden_states": "in_channels height width"}
            return _inputs(replace(example, text=text or 77), name, latent)
        if name == "MultiControlNetModel":
            return _of_several(example)
        if name == "UNetModel":
            return _ldm_inputs(example)
    return None


def _of_several(c: Example) -> Inputs:
    """Inputs of several ControlNets that run together."""
    count = len(c.module.nets)
    inputs = _inputs(replace(c, module=c.module.nets[0]), "ControlNetModel", OF_UNETS)
    given = {"controlnet_cond": [inputs["controlnet_cond"]] * count}
    return {**inputs, **given, "conditioning_scale": [1.0] * count}


def _ldm_inputs(c: Example) -> Inputs:
    """Inputs of UNets of ldm and ComfyUI."""
    module = c.module
    inputs: Inputs = {"x": c.tensor(module.in_channels, *c.size), "timesteps": c.whole(value=1)}
    widths = [m.attn2.to_k.in_features for m in module.modules() if hasattr(m, "attn2")]
    if widths:
        inputs["context"] = c.tensor(c.text, widths[0])
    if module.num_classes is not None:
        dense = next((m for m in module.label_emb.modules() if isinstance(m, nn.Linear)), None)
        inputs["y"] = c.whole(value=1) if dense is None else c.tensor(dense.in_features)
    return inputs


def _comfy_inputs(c: Example, row: Transformer) -> Inputs:
    """Inputs of ComfyUI transformers. These have no configuration: layers give the widths."""
    shape: tuple[int, ...] = (c.frames, *c.size) if LATENTS[row.layout].frames else c.size
    if row.name == "QwenImageTransformer2DModel":  # takes a video of one frame
        shape = (1, *c.size)
    of_latent = _part(c.module, "img_in", "x_embedder", "patch_embedding")
    of_text = _part(c.module, "txt_in", "context_embedder", "cap_embedder", "text_embedding")
    of_vector = _part(c.module, "y_embedder", "vector_in")
    inputs = {
        "x": c.tensor(_channels(c.module, of_latent), *shape),
        row.time: c.tensor().float(),
        "context": c.tensor(c.text, _width(of_text)),
        "transformer_options": {},
    }
    if row.name == "NextDiT":
        inputs["num_tokens"] = c.text
    if row.name in ("Flux", "Chroma"):
        inputs["guidance"] = c.tensor()
    if hasattr(c.module, "vace_in_dim"):
        context = c.tensor(1, c.module.vace_in_dim, *shape)
        inputs |= {"vace_context": context, "vace_strength": [1.0]}
    if of_vector is not None:
        inputs["y"] = c.tensor(_width(of_vector))
    return inputs


def _part(module: nn.Module, *names: str) -> Any:
    """The first of these submodules that the module has."""
    return next((part for name in names if (part := getattr(module, name, None))), None)


def _channels(module: Any, embedder: nn.Module) -> int:
    """Channels of the latent, embedded by a convolution or by a linear layer on patches."""
    for layer in embedder.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            return layer.in_channels
    return _width(embedder) // module.patch_size**2


def _width(embedder: nn.Module) -> int:
    return next(layer.in_features for layer in embedder.modules() if isinstance(layer, nn.Linear))
