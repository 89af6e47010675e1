"""Rectified flow the way FluxPipeline runs it: packing, positions, noise levels, sampling.

A picture is mixed with noise along a straight line, x_t = (1 - t) x_0 + t noise, and the
transformer predicts the line's direction, noise - x_0. Latents [B, 4, h, w] travel as tokens
[B, h / 2 * w / 2, 16].
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPTextModel

from config import FLOW_SCHEDULER, GRID
from tomesd_demo_model.captions import objects

# States [B, T, 256] of the tokens, and one pooled state [B, 256].
Text = tuple[Tensor, Tensor]
# Deviation of a coordinate spread evenly over [-0.5, 0.5].
_SPOT_DEVIATION = 12**-0.5


def pack(latents: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, h / 2 * w / 2, 4 C], in the order of FluxPipeline."""
    return F.pixel_unshuffle(latents, 2).flatten(2).mT


def unpack(tokens: Tensor) -> Tensor:
    """The square latents that `pack` made tokens of."""
    grid = math.isqrt(tokens.shape[1])
    return F.pixel_shuffle(tokens.mT.unflatten(2, (grid, grid)), 2)


def positions(grid: int, device: torch.device | str) -> Tensor:
    """RoPE positions [grid * grid, 3] of the image tokens: 0, row, column.

    Small grids are spread over the range of the largest, so that a place in the picture has
    the same position at every size. At 512 px these are FluxPipeline's own.
    """
    centres = (torch.arange(grid, device=device) + 0.5) * (GRID / grid) - 0.5
    rows, columns = torch.meshgrid(centres, centres, indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1)


def shifted(level: Tensor, tokens: int) -> Tensor:
    """Noise levels in [0, 1], moved towards 1 the more tokens share one picture.

    More tokens show the same thing through more noise; this is FluxPipeline's rule.
    """
    low, high = FLOW_SCHEDULER["base_image_seq_len"], FLOW_SCHEDULER["max_image_seq_len"]
    start, end = FLOW_SCHEDULER["base_shift"], FLOW_SCHEDULER["max_shift"]
    factor = math.exp(start + (end - start) * (tokens - low) / (high - low))
    return factor * level / (1 + (factor - 1) * level)


class LayoutProbe(nn.Module):
    """Reads from a token which object it belongs to, and which part of it.

    Only training uses it: a composed scene says both, and asking for them half-way up teaches
    the lower blocks to keep objects apart long before the pictures alone would.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.kind = nn.Linear(width, 1 + len(objects()))
        self.spot = nn.Linear(width, 2)

    def forward(self, hidden: Tensor, kind: Tensor, spot: Tensor) -> Tensor:
        """Loss of hidden [B, N, width] against `Composer.layout` of the same grid."""
        hidden = self.norm(hidden)
        kinds, spots = self.kind(hidden).float(), self.spot(hidden).float()
        which = F.cross_entropy(kinds.flatten(0, 1), kind.flatten())
        error = (spots - spot.flatten(1, -2) / _SPOT_DEVIATION).square().mean(-1)
        on_object = (kind.flatten(1) > 0).float()
        return which + 0.5 * (error * on_object).sum() / on_object.sum().clamp(min=1)


class FlowModel(nn.Module):
    """Transformer and probe as one trainable module."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer
        self.probe = LayoutProbe(transformer.proj_out.in_features)


def initialise(transformer: nn.Module, zero: str = r"proj_out|.*norm.*\.linear") -> None:
    """Every block starts as the identity and the prediction as zero (AdaLN-Zero).

    `zero` is a pattern of the names of linear layers; its default fits Flux.
    """
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
            if re.fullmatch(zero, name):
                nn.init.zeros_(module.weight)


class TextEncoder:
    """The frozen text encoder of the package, for both text inputs of the transformer."""

    def __init__(self, pipeline: Path, device: str) -> None:
        model = CLIPTextModel.from_pretrained(pipeline / "text_encoder")
        self.model = model.float().to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Text:
        """Tokens [B, T] -> one state each [B, T, 256], and the state at the first end token."""
        output = self.model(input_ids=tokens)
        return output.last_hidden_state, output.pooler_output


def predict(
    transformer: nn.Module,
    noisy: Tensor,
    level: Tensor,
    text: Text,
    guidance: Tensor | None = None,
) -> Tensor:
    """Direction [B, N, 16] at tokens [B, N, 16] and noise levels [B] in [0, 1].

    `guidance` [B] is for a transformer that takes it.
    """
    context, pooled = text
    return transformer(
        hidden_states=noisy,
        encoder_hidden_states=context,
        pooled_projections=pooled,
        timestep=level,
        guidance=guidance,
        img_ids=positions(math.isqrt(noisy.shape[1]), noisy.device),
        txt_ids=torch.zeros(context.shape[1], 3, device=noisy.device),
        return_dict=False,
    )[0]


def guided(
    predict: Callable[[Tensor, Tensor, Text], Tensor],
    noisy: Tensor,
    level: Tensor,
    text: Text,
    without: Text,
    guidance: float | Tensor,
) -> Tensor:
    """The direction with captions, moved away from the one without: both in one call.

    `without` is what `TextEncoder` gives for no caption, `guidance` a number or broadcasts.
    """
    both = tuple(torch.cat([n.expand_as(t), t]) for n, t in zip(without, text, strict=True))
    v = predict(torch.cat([noisy, noisy]), torch.cat([level, level]), both)
    plain, wanted = v.float().chunk(2)
    return plain + guidance * (wanted - plain)


def euler(
    direction: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    tokens: int,
    steps: int,
    kept: Sequence[int] = (),
) -> Tensor:
    """Data from noise `x` [B, ...] by Euler steps along `direction(x, levels [B])`.

    With `kept`, only those of the steps are made.
    """
    levels = torch.linspace(1, 1 / steps, steps, device=x.device)
    if kept:
        levels = levels[list(kept)]
    levels = F.pad(shifted(levels, tokens), (0, 1))
    for now, after in itertools.pairwise(levels):
        with torch.autocast(x.device.type, torch.bfloat16):
            v = direction(x, now.expand(len(x)))
        x = x + (after - now) * v.float()
    return x


@torch.no_grad()
def sample(
    transformer: nn.Module,
    text: Text,
    without: Text,
    noise: Tensor,
    *,
    guidance: float = 4.0,
    steps: int = 28,
    kept: Sequence[int] = (),
) -> Tensor:
    """Latents [B, 4, h, w] from noise of that shape; with `kept`, by those steps only.

    `text` and `without` are what `TextEncoder` gives for the captions and for no caption.
    """
    x = pack(noise)
    direction = functools.partial(predict, transformer)
    if transformer.config.guidance_embeds:
        asked = torch.full((len(x),), guidance, device=x.device)
        step = functools.partial(direction, text=text, guidance=asked)
    else:
        step = functools.partial(guided, direction, text=text, without=without, guidance=guidance)
    return unpack(euler(step, x, x.shape[1], steps, kept))
