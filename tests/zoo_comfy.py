"""Tiny, seeded diffusion transformers of the real ComfyUI, and inputs for them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import exact_cases
import torch
import zoo_ldm
from torch import Tensor, nn

from tomesd.hosts.inputs import example_inputs

Inputs = dict[str, Any]
TEXT, HEIGHT, WIDTH, FRAMES = 5, 12, 8, 3


@dataclass(frozen=True)
class ComfyDit:
    """One model, and where its blocks have what merging is about."""

    module: str
    kind: str
    config: dict[str, Any]
    blocks: dict[str, tuple[str, int | None, bool]]
    """Lists of blocks: the argument with the image tokens, their place in the output, and whether
    the text is in the same sequence."""
    rope: tuple[str, int, bool] | None = None
    """The argument with positions, the axis of its rows, and whether it has rows for the text."""
    thousand: bool = False
    """Whether its times are 0 ... 1000, not 0 ... 1."""
    more: Callable[[int], Inputs] = field(default=lambda batch: {})

    def build(self) -> nn.Module:
        model_class = getattr(zoo_ldm.comfy(self.module), self.kind)
        config = {"dtype": torch.float32, "operations": zoo_ldm.comfy("ops").disable_weight_init}
        if self.kind.endswith("WanModel"):
            config["device"] = "cpu"
        model = model_class(**config, **self.config)
        for name, buffer in model.named_buffers():  # a checkpoint would have them
            buffer.copy_(zoo_ldm.noise(name, 0, *buffer.shape))
        return exact_cases.fill(model)

    def inputs(
        self, model: nn.Module, batch: int = 2, size: tuple[int, int] | None = None
    ) -> Inputs:
        """Noise of each item's own, at times of late steps."""
        plain = example_inputs(model, size or (HEIGHT, WIDTH), batch, FRAMES, TEXT)
        assert plain is not None
        filled = {}
        for name, value in (plain | self.more(batch)).items():
            if name in ("timestep", "timesteps"):
                filled[name] = torch.full((batch,), 200.0 if self.thousand else 0.2)
            elif isinstance(value, list):
                filled[name] = [_items(name, v) if isinstance(v, Tensor) else v for v in value]
            else:
                filled[name] = _items(name, value) if isinstance(value, Tensor) else value
        return filled

    def run(self, model: nn.Module, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            return model(**inputs | {"transformer_options": dict(inputs["transformer_options"])})


def _items(name: str, like: Tensor) -> Tensor:
    parts = [zoo_ldm.noise(f"{name} {k}", 0, *like.shape[1:]) for k in range(like.shape[0])]
    return torch.stack(parts)


def alone(inputs: Inputs, k: int) -> Inputs:
    """Item k of a batch, as a batch of one."""

    def item(value: Any) -> Any:
        if isinstance(value, list):
            return [item(part) for part in value]
        return value[k : k + 1] if isinstance(value, Tensor) else value

    return {name: item(value) for name, value in inputs.items()}


def block_parameters(block: nn.Module) -> list[str]:
    names = list(inspect.signature(block.forward).parameters)
    return ["context", "x"] if names == ["args", "kwargs"] else names


_FLUX: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "vec_in_dim": 12,
    "context_in_dim": 16,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 3,
    "axes_dim": [4, 6, 6],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
}
_NEXT: dict[str, Any] = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 4,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "multiple_of": 32,
    "cap_feat_dim": 16,
    "qk_norm": True,
    "axes_dims": [4, 6, 6],
    "axes_lens": [64, 64, 64],
}
_FLUX_BLOCKS = {"double_blocks": ("img", 0, False), "single_blocks": ("x", None, True)}
_NEXT_BLOCKS = {"layers": ("x", None, True)}
_WAN: dict[str, Any] = {
    "in_dim": 4,
    "out_dim": 4,
    "dim": 32,
    "ffn_dim": 48,
    "text_dim": 16,
    "num_heads": 2,
    "num_layers": 4,
}
_WAN_BLOCKS, _WAN_ROPE = {"blocks": ("x", None, False)}, ("freqs", 1, False)
_LUMINA, _ROPE = "ldm.lumina.model", ("pe", 2, True)


def _reference(batch: int) -> Inputs:
    return {"ref_latents": [torch.zeros(batch, 4, 4, 8)]}


COMFY_DITS = {
    "flux": ComfyDit("ldm.flux.model", "Flux", _FLUX, _FLUX_BLOCKS, _ROPE),
    "flux_kontext": ComfyDit("ldm.flux.model", "Flux", _FLUX, _FLUX_BLOCKS, _ROPE, more=_reference),
    "flux2": ComfyDit(
        "ldm.flux.model",
        "Flux",
        _FLUX
        | {"vec_in_dim": None, "global_modulation": True, "mlp_silu_act": True, "ops_bias": False},
        _FLUX_BLOCKS,
        _ROPE,
    ),
    "chroma": ComfyDit(
        "ldm.chroma.model",
        "Chroma",
        {
            name: value
            for name, value in _FLUX.items()
            if name not in ("vec_in_dim", "guidance_embed")
        }
        | {"in_channels": 16, "out_channels": 16}
        | {"in_dim": 64, "out_dim": 32, "hidden_dim": 32, "n_layers": 2},
        _FLUX_BLOCKS,
        _ROPE,
    ),
    "sd3": ComfyDit(
        "ldm.modules.diffusionmodules.mmdit",
        "OpenAISignatureMMDITWrapper",
        {
            "input_size": None,
            "depth": 1,
            "num_blocks": 4,
            "in_channels": 4,
            "adm_in_channels": 12,
            "context_embedder_config": {
                "target": "torch.nn.Linear",
                "params": {"in_features": 16, "out_features": 64},
            },
            "pos_embed_max_size": 16,
            "num_patches": 256,
            "qk_norm": "rms",
            "x_block_self_attn_layers": [1, 2],
        },
        {"joint_blocks": ("x", 1, False)},
        thousand=True,
    ),
    "qwen": ComfyDit(
        "ldm.qwen_image.model",
        "QwenImageTransformer2DModel",
        {
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 4,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (4, 6, 6),
        },
        {"transformer_blocks": ("hidden_states", 1, False)},
        ("image_rotary_emb", 2, True),
    ),
    "wan": ComfyDit("ldm.wan.model", "WanModel", _WAN, _WAN_BLOCKS, _WAN_ROPE, thousand=True),
    "wan_vace": ComfyDit(
        "ldm.wan.model",
        "VaceWanModel",
        _WAN | {"vace_layers": 2, "vace_in_dim": 6},
        _WAN_BLOCKS,
        _WAN_ROPE,
        thousand=True,
        more=lambda batch: {"vace_context": torch.zeros(batch, 1, 6, FRAMES, HEIGHT, WIDTH)},
    ),
    "lumina2": ComfyDit(_LUMINA, "NextDiT", _NEXT, _NEXT_BLOCKS, ("freqs_cis", 1, True)),
    "z_image": ComfyDit(
        _LUMINA,
        "NextDiT",
        _NEXT
        | {"z_image_modulation": True, "pad_tokens_multiple": 32, "time_scale": 1000.0}
        | {"dim": 256, "axes_dims": [32, 48, 48]},  # its modulation has 256 channels or more
        _NEXT_BLOCKS,
        ("freqs_cis", 1, True),
    ),
}
