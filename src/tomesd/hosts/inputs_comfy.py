"""Inputs of the right shape for ComfyUI's transformers; see `inputs`."""

from typing import Any

from torch import nn

from .inputs_example import Example
from .names import class_names

__all__ = ["comfy_inputs"]

# By class: tokens of text, the parameter of the time, whether a latent has frames, and what makes
# tokens of the latent and of the text.
_INPUTS = {
    "Flux": (512, "timestep", False, "img_in", "txt_in"),
    "Chroma": (512, "timestep", False, "img_in", "txt_in"),
    "MMDiT": (154, "timesteps", False, "x_embedder", "context_embedder"),
    "QwenImageTransformer2DModel": (256, "timestep", True, "img_in", "txt_in"),
    "NextDiT": (256, "timesteps", False, "x_embedder", "cap_embedder"),
    "WanModel": (512, "timestep", True, "patch_embedding", "text_embedding"),
}


def comfy_inputs(c: Example, text: int | None) -> dict[str, Any] | None:
    """Keyword arguments of the model's forward, or None if its class is not known.

    Args:
        text: tokens of text; as many as ComfyUI makes, if None.
    """
    name = next((name for name in class_names(c.module) if name in _INPUTS), None)
    if name is None:
        return None
    usual, time, has_frames, of_latent, of_text = _INPUTS[name]
    shape: tuple[int, ...] = (c.height, c.width)
    if has_frames:
        shape = (c.frames if name == "WanModel" else 1, *shape)
    inputs = {
        "x": c.tensor(_channels(c.module, getattr(c.module, of_latent)), *shape),
        time: c.tensor().float(),
        "context": c.tensor(text or usual, _width(getattr(c.module, of_text))),
        "transformer_options": {},
    }
    if name == "NextDiT":
        inputs["num_tokens"] = text or usual
    if name in ("Flux", "Chroma"):
        inputs["guidance"] = c.tensor()
    if hasattr(c.module, "vace_in_dim"):
        context = c.tensor(1, c.module.vace_in_dim, *shape)
        inputs |= {"vace_context": context, "vace_strength": [1.0]}
    vector = getattr(c.module, "y_embedder", None) or getattr(c.module, "vector_in", None)
    if vector is not None:
        inputs["y"] = c.tensor(_width(vector))
    return inputs


def _channels(module: Any, embedder: nn.Module) -> int:
    """Of the latent: a convolution takes them, or a linear layer those of a whole patch."""
    for layer in embedder.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            return layer.in_channels
    return _width(embedder) // module.patch_size**2


def _width(embedder: nn.Module) -> int:
    return next(layer.in_features for layer in embedder.modules() if isinstance(layer, nn.Linear))
