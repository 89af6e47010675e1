"""Inputs of the right shape for ComfyUI's transformers; see `inputs`."""

from typing import Any

import torch
from torch import Tensor, nn

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


def comfy_inputs(
    module: Any, size: tuple[int, int], batch: int, frames: int, text: int | None
) -> dict[str, Any] | None:
    """Keyword arguments of the model's forward, or None if its class is not known."""
    name = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _INPUTS), None)
    if name is None:
        return None
    usual, time, has_frames, of_latent, of_text = _INPUTS[name]
    like = next(p for p in module.parameters() if p.is_floating_point())

    def tensor(*shape: int) -> Tensor:
        return torch.zeros(batch, *shape, device=like.device, dtype=module.dtype or like.dtype)

    shape = (frames if name == "WanModel" else 1, *size) if has_frames else size
    inputs = {
        "x": tensor(_channels(module, getattr(module, of_latent)), *shape),
        time: tensor().float(),
        "context": tensor(text or usual, _width(getattr(module, of_text))),
        "transformer_options": {},
    }
    if name == "NextDiT":
        inputs["num_tokens"] = text or usual
    if name in ("Flux", "Chroma"):
        inputs["guidance"] = tensor()
    if hasattr(module, "vace_in_dim"):
        inputs |= {"vace_context": tensor(1, module.vace_in_dim, *shape), "vace_strength": [1.0]}
    vector = getattr(module, "y_embedder", None) or getattr(module, "vector_in", None)
    if vector is not None:
        inputs["y"] = tensor(_width(vector))
    return inputs


def _channels(module: Any, embedder: nn.Module) -> int:
    """Of the latent: a convolution takes them, or a linear layer those of a whole patch."""
    for layer in embedder.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            return layer.in_channels
    return _width(embedder) // module.patch_size**2


def _width(embedder: nn.Module) -> int:
    return next(layer.in_features for layer in embedder.modules() if isinstance(layer, nn.Linear))
