"""Text to image with Stability-AI's `ldm`: python ldm_txt2img.py CONFIG CHECKPOINT PROMPT"""

import sys

import torch
from ldm.models.diffusion.ddim import DDIMSampler
from ldm.util import instantiate_from_config
from omegaconf import OmegaConf
from PIL import Image

import tomesd

config, checkpoint, prompt = sys.argv[1:4]
model = instantiate_from_config(OmegaConf.load(config).model).eval()
weights = torch.load(checkpoint, map_location="cpu", weights_only=True)
model.load_state_dict(weights.get("state_dict", weights), strict=False)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = tomesd.apply_patch(model.to(device), ratio=0.5)

with torch.no_grad(), model.ema_scope():
    text, empty = (model.get_learned_conditioning([p]) for p in (prompt, ""))
    sampler = DDIMSampler(model, device=torch.device(device))
    latent, _ = sampler.sample(
        50, 1, (4, 64, 64), text, verbose=False,
        unconditional_guidance_scale=7.5, unconditional_conditioning=empty,
    )  # fmt: skip
    image = model.decode_first_stage(latent).clamp(-1, 1)[0].permute(1, 2, 0)
Image.fromarray(((image + 1) * 127.5).byte().cpu().numpy()).save("image.png")
