"""Build the parts, save them, and find their tensors again."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from config import AUTOENCODER, TEXT_ENCODER, UNET
from tokenizer import WordTokenizer


def autoencoder() -> AutoencoderKL:
    return AutoencoderKL(**AUTOENCODER)


def text_encoder(tokenizer: WordTokenizer) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=tokenizer.size,
        bos_token_id=tokenizer.start,
        eos_token_id=tokenizer.end,
        pad_token_id=tokenizer.end,
        **TEXT_ENCODER,
    )
    return CLIPTextModel(config)


class Denoiser(nn.Module):
    """Text encoder and UNet as one trainable module."""

    def __init__(self, tokenizer: WordTokenizer) -> None:
        super().__init__()
        self.text = text_encoder(tokenizer)
        self.unet = UNet2DConditionModel(**UNET)


def load_autoencoder(path: Path, device: str) -> AutoencoderKL:
    model = autoencoder()
    model.load_state_dict(load_file(path))
    return model.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)


def encode(model: AutoencoderKL, pictures: Tensor, chunk: int = 64) -> Tensor:
    """Latents [B, 4, h / 4, w / 4] as float16; zero mean, unit variance per channel."""
    parts = []
    with torch.no_grad(), torch.autocast(pictures.device.type, torch.bfloat16):
        for part in pictures.split(chunk):
            part = part.contiguous(memory_format=torch.channels_last)
            parts.append(model.encode(part).latent_dist.mode().half())
    return torch.cat(parts)


def decode(model: AutoencoderKL, latents: Tensor, chunk: int = 64) -> Tensor:
    """Pictures [B, 3, 4 h, 4 w] in [-1, 1]."""
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        parts = [model.decode(part.to(dtype)).sample for part in latents.split(chunk)]
    return torch.cat(parts).clamp(-1, 1)


def save_tensors(tensors: dict[str, Tensor], path: Path, dtype: torch.dtype | None = None) -> None:
    """Write contiguous copies; through a temporary name, so a kill leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ready = {
        name: tensor.detach().to(dtype if tensor.is_floating_point() else None).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    save_file(ready, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
