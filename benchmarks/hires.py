"""Large images in two passes: the second pass on merged tokens beside the same pass unmerged.

    python benchmarks/hires.py [--model unet transformer]
    python benchmarks/hires.py --model sdxl flux --device cuda --size 2048

`unet` and `transformer` are embedded; `sdxl` and `flux` have random weights, on whose values time
and memory do not depend. Both ways take turns. Rows go to hires_cpu.jsonl or hires_gpu.jsonl.
"""

from dataclasses import asdict
from functools import partial
from typing import Any

import diffusers
import torch
from common import RESULTS, Arguments, Ready, compare
from dit_settings import SETTINGS
from PIL import Image

import tomesd
from tomesd import Settings
from tomesd.bench import Effort, RowFile
from tomesd.bench.calls import random_embeddings
from tomesd.bench.models import VAE, load_subject, random_model
from tomesd.choices import EMBEDDED
from tomesd.generation import Sampling, sample
from tomesd.generation.hires import image_to_image, second_pass
from tomesd.generation.loading import load_pipeline
from tomesd.generation.memory import MemoryProbe
from tomesd.generation.sampling import call_pipeline

PROMPT, STEPS, STRENGTH = "a penguin on a plain orange background", 8, 0.5


def load(name: str, device: torch.device, side: int) -> tuple[Any, dict[str, Any]]:
    """The pipeline that begins with a picture, and its inputs."""
    small = Image.effect_noise((side // 2, side // 2), 60).convert("RGB")
    if name in EMBEDDED:
        pipe = load_pipeline(name, device=str(device))
        text: dict[str, Any] = {"prompt": PROMPT, "negative_prompt": ""}
        small = sample(pipe, PROMPT, size=small.size, steps=STEPS).image
    elif name == "flux":
        make = partial(random_model, device=device, dtype=torch.bfloat16, seed=0)
        vae = VAE | {"latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159}
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
        models = make(diffusers.AutoencoderKL, vae), *[None] * 4  # texts come encoded
        transformer = make(diffusers.FluxTransformer2DModel, SETTINGS["transformers"][0].config)
        pipe = diffusers.FluxPipeline(scheduler, *models, transformer)
        shapes = {"prompt_embeds": (1, 512, 4096), "pooled_prompt_embeds": (1, 768)}
        text = {k: torch.randn(v, device=device).bfloat16() for k, v in shapes.items()}
    else:
        subject = load_subject(name, device=str(device))
        pipe, text = subject.pipe, random_embeddings(subject, 1)
    large = small.resize((side, side), Image.Resampling.LANCZOS)
    return image_to_image(pipe), {**text, "image": large, "strength": STRENGTH}


def main() -> None:
    parser = Arguments(__doc__, device="cpu")
    parser.add_argument("--model", nargs="+", default=["unet", "transformer"])
    parser.add_argument("--size", type=int, default=384, help="side of the large image in pixels")
    args = parser.read(None)
    device, side = torch.device(args.device), args.size
    file = RowFile(RESULTS / f"hires_{'cpu' if args.device == 'cpu' else 'gpu'}.jsonl", device)
    for name in args.model:
        pipe, inputs = load(name, device, side)
        sampling = Sampling.of(pipe, (side, side), steps=STEPS, guidance=EMBEDDED.get(name))
        run = partial(call_pipeline, pipe, inputs, [0], sampling)

        def prepare(ratio: float, pipe: Any = pipe, run: Any = run) -> Ready:
            settings = second_pass(pipe, Settings(ratio=ratio), STRENGTH)
            call = tomesd.patched(pipe, **asdict(settings))(run)
            return call, {"peak_mib": MemoryProbe(device).peak_mib(call)}

        makers = {ratio: partial(prepare, ratio) for ratio in (0.0, 0.5)}
        for ratio, found in compare(makers, device, Effort(seconds=0, min_repeats=3)).items():
            row = {"benchmark": "hires", "model": name, "what": "second pass", "ratio": ratio}
            row |= {"width": side, "height": side, "steps": STEPS, "strength": STRENGTH}
            print(file.add({**row, "dtype": str(pipe.dtype), **found}), flush=True)


if __name__ == "__main__":
    main()
