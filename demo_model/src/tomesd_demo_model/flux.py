"""The transformer as a pipeline, with what it shares with the UNet. Needs torch and diffusers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from . import path

GRID = 64
"""Rows of tokens at 512 px, the largest size of the training."""


class SpreadFluxTransformer(FluxTransformer2DModel):
    """Flux, with the positions of every grid spread over the range of the largest.

    So a place in the picture has the same position at every size. At 512 px nothing changes.
    """

    @functools.wraps(FluxTransformer2DModel.forward)
    def forward(self, *args: Any, img_ids: Tensor, **kwargs: Any) -> Any:
        """
        Args:
            img_ids: 0, row and column of each token, `[N, 3]`, as FluxPipeline makes them; or the
                middle of several tokens.
        """
        places = img_ids[:, 1:].float()
        # The first token is as far from one edge as the last one is from the other.
        places = (places + 0.5) * (GRID / (places.amin() + places.amax() + 1)) - 0.5
        spread = torch.cat([img_ids[:, :1].float(), places], dim=1)
        return super().forward(*args, img_ids=spread, **kwargs)


class ShortTextModel(CLIPTextModel):
    """Reads as many tokens as it has positions: what FluxPipeline adds to them is padding."""

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        return super().forward(input_ids[:, : self.config.max_position_embeddings], **options)


def load_transformer(dtype: torch.dtype = torch.float32) -> FluxPipeline:
    """The transformer's pipeline, right at every size.

    Call it with `negative_prompt=""` and `true_cfg_scale=4`.
    """
    own, shared = path("transformer"), path("unet")
    text = ShortTextModel.from_pretrained(shared / "text_encoder", dtype=dtype)
    tokenizer = CLIPTokenizer.from_pretrained(shared / "tokenizer")
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(own / "scheduler"),
        vae=AutoencoderKL.from_pretrained(shared / "vae", torch_dtype=dtype),
        text_encoder=text,
        tokenizer=tokenizer,
        text_encoder_2=text,
        tokenizer_2=tokenizer,
        transformer=SpreadFluxTransformer.from_pretrained(own / "transformer", torch_dtype=dtype),
    )
    # Flux itself reads 512 tokens of text: example calls of tomesd shall be like those of this one.
    pipe.transformer.register_to_config(text_len=text.config.max_position_embeddings)
    pipe.default_sample_size = GRID  # latent pixels of a side: 256 px
    return pipe
