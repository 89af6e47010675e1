"""Text to image with diffusers and merged tokens: python diffusers_txt2img.py MODEL PROMPT"""

import sys
import time

import torch
from diffusers import DiffusionPipeline

import tomesd

model, prompt = sys.argv[1:3]
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.float32
pipe = DiffusionPipeline.from_pretrained(model).to(device, dtype)

for ratio in (0.0, 0.5):
    with tomesd.patched(pipe, ratio=ratio):
        if ratio:
            print(tomesd.describe(pipe))
        start = time.perf_counter()
        image = pipe(prompt, generator=torch.Generator().manual_seed(0)).images[0]
        print(f"ratio {ratio}: {time.perf_counter() - start:.1f} s")
        image.save(f"ratio_{ratio}.png")
