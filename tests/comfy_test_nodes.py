"""Nodes for the tests of the ComfyUI pack: a custom node that the tests' server loads.

ComfyUI tells models apart by the keys and shapes of their weights, and takes no small Flux for one.
"""

from typing import Any

import comfy.model_patcher
import comfy.supported_models
import torch

FLUX: dict[str, Any] = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 12,
    "context_in_dim": 16,
    "hidden_size": 64,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 3,
    "axes_dim": [8, 12, 12],
    "theta": 10000,
    "qkv_bias": True,
    "guidance_embed": True,
}


class TinyFlux:
    """A Flux with random weights."""

    CATEGORY = "tests"
    FUNCTION = "build"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    def build(self) -> tuple[Any]:
        config = comfy.supported_models.Flux(dict(FLUX))
        config.set_inference_dtype(torch.float32, None)
        with torch.inference_mode(False):
            model = config.get_model({}, "")
        generator = torch.Generator().manual_seed(0)
        for parameter in model.diffusion_model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            fan = parameter[0].numel() if parameter.ndim > 1 else 4
            parameter.data = drawn / fan**0.5
        cpu = torch.device("cpu")
        return (comfy.model_patcher.ModelPatcher(model, cpu, cpu),)


class RandomConditioning:
    """What a text encoder might give."""

    CATEGORY = "tests"
    FUNCTION = "make"
    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        whole = ("INT", {"default": 0})
        return {"required": {"seed": whole, "width": whole, "pooled": whole}}

    def make(self, seed: int, width: int, pooled: int) -> tuple[Any]:
        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(1, 7, width, generator=generator)
        return ([[text, {"pooled_output": torch.randn(1, pooled, generator=generator)}]],)


NODE_CLASS_MAPPINGS = {"TinyFlux": TinyFlux, "RandomConditioning": RandomConditioning}
