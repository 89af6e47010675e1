"""Sample with the moving-average weights, and lay pictures out on sheets."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import DDIMScheduler, PNDMScheduler
from torch import Tensor

from config import BETA_SCHEDULE, TRAIN_STEPS
from models import Denoiser

SCHEDULER = {
    **BETA_SCHEDULE,
    "num_train_timesteps": TRAIN_STEPS,
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "clip_sample": False,
    "set_alpha_to_one": True,
    # Unused with trailing spacing; other values make the pipeline warn.
    "steps_offset": 1,
}


def scheduler(name: str = "ddim") -> DDIMScheduler | PNDMScheduler:
    if name == "plms":
        ddim = DDIMScheduler(**SCHEDULER)
        return PNDMScheduler.from_config(ddim.config, skip_prk_steps=True)
    return DDIMScheduler(**SCHEDULER)


@torch.no_grad()
def sample(
    model: Denoiser,
    tokens: Tensor,
    empty: Tensor,
    *,
    side: int = 64,
    guidance: float = 5.0,
    steps: int = 30,
    method: str = "ddim",
    seed: int = 0,
) -> Tensor:
    """Latents [B, 4, side, side] for tokens [B, T]; `empty` [T] are those of no caption."""
    device = tokens.device
    noise = scheduler(method)
    noise.set_timesteps(steps, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    latents = torch.randn(len(tokens), 4, side, side, generator=generator, device=device)
    both = torch.cat([empty.expand_as(tokens), tokens])
    with torch.autocast(device.type, torch.bfloat16):
        context = model.text(input_ids=both).last_hidden_state
    for t in noise.timesteps:
        with torch.autocast(device.type, torch.bfloat16):
            v = model.unet(latents.repeat(2, 1, 1, 1), t, context, return_dict=False)[0].float()
        without, with_caption = v.chunk(2)
        v = without + guidance * (with_caption - without)
        latents = noise.step(v, t, latents, return_dict=False)[0]
    return latents


def first_noise(seed: int, side: int) -> Tensor:
    """[1, 4, side, side], the same on every device and in every precision.

    Some versions of torch draw float16 numbers from other random bits than float32 ones.
    """
    return torch.randn(1, 4, side, side, generator=torch.Generator("cpu").manual_seed(seed))


def save_sheet(
    pictures: Tensor, path: Path, columns: int, captions: list[str] | None = None
) -> None:
    """Pictures [B, 3, s, s] in [-1, 1] as one PNG, captions (if any) below each."""
    import textwrap

    from PIL import Image, ImageDraw

    side = pictures.shape[-1]
    line = 12
    height = side + (2 * line + 6 if captions else 2)
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (side + 4), rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    arrays = pictures.add(1).mul(127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu()
    for i, array in enumerate(arrays.numpy()):
        x, y = i % columns * (side + 4), i // columns * height
        sheet.paste(Image.fromarray(array), (x, y))
        if captions:
            lines = textwrap.wrap(captions[i], side // 6)[:2]
            for row, text in enumerate(lines):
                draw.text((x + 2, y + side + 1 + row * line), text, fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True, quality=85)  # PNG knows no quality
