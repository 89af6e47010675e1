"""Text to image with Flux and merged tokens: python diffusers_flux.py PROMPT [MODEL]"""

import sys
import time

import torch
from diffusers import FluxPipeline

import tomesd

prompt = sys.argv[1]
model = sys.argv[2] if len(sys.argv) > 2 else "black-forest-labs/FLUX.1-dev"
pipe = FluxPipeline.from_pretrained(model, torch_dtype=torch.bfloat16)
pipe.enable_model_cpu_offload()  # or pipe.to("cuda"), where the GPU has room for all of it

for ratio in (0.0, 0.5):
    with tomesd.patched(pipe, ratio=ratio):
        generator = torch.Generator("cpu").manual_seed(0)
        start = time.perf_counter()
        image = pipe(prompt, height=1024, width=1024, generator=generator).images[0]
        print(f"ratio {ratio}: {time.perf_counter() - start:.1f} s")
        image.save(f"flux_ratio_{ratio}.png")
