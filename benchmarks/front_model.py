"""The embedded models of front.py, in the plain loop of their pipelines, and what changes them."""

import argparse
import ast
import copy
import functools
import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any
from unittest import mock

import common  # noqa: F401  (it puts demo_model/training on the path)
import tomesd_demo_model
import torch
from diffusers import FirstBlockCacheConfig, FluxPipeline, MagCacheConfig, TaylorSeerCacheConfig
from diffusers.models.transformers import transformer_flux as flux
from flow import pack, shifted, unpack
from front_ways import Way
from sampling import first_noise
from torch import Tensor

import tomesd
from tomesd.generation.loading import denoiser, load_pipeline

USUAL = {
    "transformer": {"pixels": 512, "steps": 28, "guidance": 4.0, "dtype": "bfloat16"},
    "unet": {"pixels": 256, "steps": 20, "guidance": 5.0, "dtype": "float16"},
}


class Model:
    """An embedded model; both halves of guidance are in one call of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.pipe = load_pipeline(args.model, device=args.device, dtype=args.dtype)
        self.pipe.vae.float()  # what is measured is the model, not the decoder's rounding
        self.device, self.dtype = denoiser(self.pipe).device, denoiser(self.pipe).dtype
        self.guidance, self.pixels = USUAL[args.model]["guidance"], args.pixels
        self.is_unet = args.model == "unet"

    def encode(self, captions: list[str]) -> tuple[Tensor, ...]:
        """What the model is told, without the captions and then with them."""
        empty = [""] * len(captions)
        if self.is_unet:
            told = self.pipe.encode_prompt(captions, self.device, 1, True, empty)
            return (torch.cat(told[::-1]),)
        return tuple(self.pipe.encode_prompt(prompt=empty + captions, prompt_2=None)[:2])

    def noise(self, seeds: range) -> Tensor:
        """[B, 4, side, side] in float32"""
        return torch.cat([first_noise(s, self.pixels // 4) for s in seeds]).to(self.device)

    def loop(
        self,
        model: Any,
        told: tuple[Tensor, ...],
        noise: Tensor,
        steps: int,
        levels: tuple[int, ...] = (),
    ) -> Tensor:
        """Latents of the shape of the noise; with `levels`, at those steps only."""
        scheduler = self.pipe.scheduler
        if self.is_unet:
            x, predict = noise, self._predict_noise
            scheduler.set_timesteps(steps, device=x.device)
        else:
            x, predict = pack(noise), self._predict_flow
            sigmas = shifted(torch.linspace(1, 1 / steps, steps), x.shape[1])
            sigmas = sigmas[list(levels)] if levels else sigmas
            scheduler.set_timesteps(sigmas=sigmas.tolist(), mu=0.0, device=x.device)  # as they are
        for t in scheduler.timesteps:
            plain, wanted = predict(model, told, x, t).float().chunk(2)
            guided = plain + self.guidance * (wanted - plain)
            x = scheduler.step(guided, t, x, return_dict=False)[0]
        return x if self.is_unet else unpack(x)

    def _predict_noise(self, model: Any, told: tuple[Tensor, ...], x: Tensor, t: Tensor) -> Tensor:
        return model(x.to(self.dtype).repeat(2, 1, 1, 1), t, told[0], return_dict=False)[0]

    def _predict_flow(self, model: Any, told: tuple[Tensor, ...], x: Tensor, t: Tensor) -> Tensor:
        grid = round(x.shape[1] ** 0.5)
        ids = FluxPipeline._prepare_latent_image_ids(1, grid, grid, x.device, self.dtype)
        with model.cache_context("cond_uncond"):
            return model(
                hidden_states=x.to(self.dtype).repeat(2, 1, 1),
                encoder_hidden_states=told[0],
                pooled_projections=told[1],
                timestep=(t / 1000).expand(2 * len(x)),
                img_ids=ids,
                txt_ids=ids.new_zeros(told[0].shape[1], 3),
                return_dict=False,
            )[0]

    def decode(self, latents: Tensor) -> Tensor:
        """[B, 3, H, W] of uint8"""
        scale = self.pipe.vae.config.scaling_factor
        parts = [self.pipe.vae.decode(part / scale).sample for part in latents.split(8)]
        return ((torch.cat(parts).clamp(-1, 1) + 1) * 127.5).round().byte()

    @contextmanager
    def changed(self, way: Way, steps: int) -> Iterator[Any]:
        """The model that makes images in this way."""
        model = denoiser(self.pipe)
        with ExitStack() as stack:
            if way.cache == "deep":
                # A package of its own, which is not installed with the others.
                from DeepCache import DeepCacheSDHelper

                helper = DeepCacheSDHelper(self.pipe)
                helper.set_params(**way.options)
                helper.enable()
                stack.callback(helper.disable)
            elif way.cache:
                model = copy.deepcopy(model)  # hooks leave traces in the modules they were on
                model.enable_cache(self._cache(way, model, steps))
            elif way.options:
                stack.enter_context(tomesd.patched(self.pipe, when="always", **way.options))
            yield model

    def _cache(self, way: Way, model: Any, steps: int) -> Any:
        """The configuration of a cache of diffusers."""
        if way.cache == "first block":
            return FirstBlockCacheConfig(**way.options)
        if way.cache == "taylor":
            # Whole blocks are left out. Otherwise only attention would be.
            return TaylorSeerCacheConfig(use_lite_mode=True, **way.options)
        ratios = self._growth(model, steps)
        return MagCacheConfig(mag_ratios=ratios, num_inference_steps=steps, **way.options)

    def _growth(self, model: Any, steps: int) -> list[float]:
        """How the residual of the blocks grows from step to step, which MagCache goes by."""
        model.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=steps))
        told = self.encode(tomesd_demo_model.held_out_captions()[:8])
        printed = io.StringIO()  # it tells its result in no other way
        with redirect_stdout(printed):
            self.loop(model, told, self.noise(range(8)), steps)
        model.disable_cache()
        lists = [line for line in printed.getvalue().splitlines() if line.startswith(("[0", "[1"))]
        return ast.literal_eval(lists[-1])


@contextmanager
def counted_tokens() -> Iterator[list[int]]:
    """Counts the image tokens that a transformer's blocks work on, in a list of one number."""
    count = [0]

    def counting(forward: Any) -> Any:
        @functools.wraps(forward)
        def run(block: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = args[0] if args else kwargs["hidden_states"]  # [B, N, C]
            count[0] += tokens.shape[0] * tokens.shape[1]
            return forward(block, *args, **kwargs)

        return run

    with ExitStack() as stack:
        for cls in (flux.FluxTransformerBlock, flux.FluxSingleTransformerBlock):
            stack.enter_context(mock.patch.object(cls, "forward", counting(cls.forward)))
        yield count
