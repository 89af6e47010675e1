"""Quality against speed on the embedded models: merging, steps left out, fewer steps, rivals.

    python benchmarks/front.py --sprites sprites.npz [--model unet] [--pixels 256] [--rows reuse]
    python benchmarks/front.py --device cpu --images 3 --pixels 256 --steps 20

Rows are made in the order of front_ways.py and written as they come, with the images of all of
them on one sheet. Image i has held-out caption i and seed i. Both halves of guidance of many images
are one call of the model, so that the GPU is the limit in eager mode too; what a cache of diffusers
decides, it then decides for all of them together.
"""

import argparse
import copy
import itertools
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import compose_scenes  # noqa: F401  (it puts demo_model/training on the path)
import front_caches
import numpy as np
import tomesd_demo_model
import torch
import torch.nn.functional as F
from common import RESULTS, Arguments
from diffusers import FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from flow import pack, unpack
from front_judge import Judge
from front_ways import WAYS, Way
from PIL import Image
from sampling import first_noise
from torch import Tensor

import tomesd
from tomesd.bench import RowFile
from tomesd.bench.measure import attempt
from tomesd.bench.rows import Row
from tomesd.generation.comparison import label_grid
from tomesd.generation.loading import denoiser, load_pipeline
from tomesd.generation.sampling import set_scheduler
from tomesd.machine import synchronize

SHOWN, COLUMNS = 256, 8
"""Side of the images on the sheet, and how many of them a row has."""
TOLD = ("speedup", "work", "lpips", "kid", "kid_change")
"""Fields of a row that are printed."""
USUAL = {
    "transformer": {"pixels": 512, "steps": 28, "guidance": 4.0, "number": "bfloat16"},
    "unet": {"pixels": 256, "steps": 20, "guidance": 5.0, "number": "float16"},
}


class Model:
    """An embedded model in the plain loop of its pipeline."""

    def __init__(self, args: argparse.Namespace) -> None:
        cpu = args.device == "cpu"
        number = "float32" if cpu else USUAL[args.model]["number"]
        self.pipe = load_pipeline(args.model, device=args.device, dtype=number)
        set_scheduler(self.pipe, args.scheduler)
        self.pipe.vae.float()  # what is measured is the model, not the decoder's rounding
        self.device, self.dtype = denoiser(self.pipe).device, denoiser(self.pipe).dtype
        self.guidance, self.pixels = args.guidance, args.pixels
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

    def loop(self, model: Any, told: tuple[Tensor, ...], noise: Tensor, steps: int) -> Tensor:
        """Latents of the shape of the noise."""
        run = self._unet_loop if self.is_unet else self._flow_loop
        return run(model, told, noise, steps)

    def _flow_loop(self, model: Any, told: Any, noise: Tensor, steps: int) -> Tensor:
        """Euler steps between the noise levels of FluxPipeline."""
        x, grid = pack(noise), noise.shape[-1] // 2
        ids = FluxPipeline._prepare_latent_image_ids(1, grid, grid, x.device, self.dtype)
        scheduler = self.pipe.scheduler
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        shift = calculate_shift(x.shape[1], *(scheduler.config[name] for name in names))
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=shift)
        for now, after in itertools.pairwise(scheduler.sigmas.to(x.device)):
            with model.cache_context("cond_uncond"):
                v = model(
                    hidden_states=x.to(self.dtype).repeat(2, 1, 1),
                    encoder_hidden_states=told[0],
                    pooled_projections=told[1],
                    timestep=now.expand(2 * len(x)),
                    img_ids=ids,
                    txt_ids=ids.new_zeros(told[0].shape[1], 3),
                    return_dict=False,
                )[0]
            x = x + (after - now) * self._guided(v)
        return unpack(x)

    def _unet_loop(self, model: Any, told: Any, noise: Tensor, steps: int) -> Tensor:
        scheduler, x = self.pipe.scheduler, noise
        scheduler.set_timesteps(steps, device=x.device)
        for t in scheduler.timesteps:
            v = model(x.to(self.dtype).repeat(2, 1, 1, 1), t, told[0], return_dict=False)[0]
            x = scheduler.step(self._guided(v), t, x, return_dict=False)[0]
        return x

    def _guided(self, prediction: Tensor) -> Tensor:
        plain, wanted = prediction.float().chunk(2)
        return plain + self.guidance * (wanted - plain)

    def decode(self, latents: Tensor) -> Tensor:
        """[B, 3, H, W] of uint8"""
        scale = self.pipe.vae.config.scaling_factor
        parts = [self.pipe.vae.decode(part / scale).sample for part in latents.split(8)]
        return ((torch.cat(parts).clamp(-1, 1) + 1) * 127.5).round().byte()

    @contextmanager
    def changed(self, way: Way, steps: int) -> Iterator[Any]:
        """The model that makes images in this way."""
        model = denoiser(self.pipe)
        if way.cache == "deep":
            with front_caches.deep_cache(self.pipe, way.options):
                yield model
        elif way.cache:
            model = copy.deepcopy(model)  # hooks leave traces in the modules they were on
            told = self.encode(tomesd_demo_model.held_out_captions()[:8])

            def calibrate(model: Any) -> None:
                self.loop(model, told, self.noise(range(8)), steps)

            model.enable_cache(front_caches.config(way.cache, way.options, model, steps, calibrate))
            yield model
        elif way.options:
            with tomesd.patched(self.pipe, when="always", **way.options):
                yield model
        else:
            yield model


@torch.no_grad()
def make(model: Model, way: Way, count: int, args: argparse.Namespace) -> tuple[Tensor, Row]:
    """Images [N, 3, H, W] of uint8, and what they took."""
    captions = tomesd_demo_model.held_out_captions()[:count]
    steps = max(1, round(way.steps * args.steps))
    images, seconds = [], []
    with (
        front_caches.counted_tokens(denoiser(model.pipe)) as counted,
        model.changed(way, steps) as changed,
    ):
        counted[0] = 0  # what was made to calibrate does not count
        for first in range(0, count, args.batch):
            seeds = range(first, min(first + args.batch, count))
            told, noise = model.encode(captions[first : seeds.stop]), model.noise(seeds)
            synchronize(model.device)
            start = time.perf_counter()
            latents = model.loop(changed, told, noise, steps)
            synchronize(model.device)
            seconds.append((time.perf_counter() - start) / len(seeds))
            if way.cache and way.cache != "deep":
                changed._reset_stateful_cache()
            images.append(model.decode(latents))
    # The last batch may be smaller, and the first one loads and tunes kernels.
    typical = statistics.median(seconds[:-1] if len(seconds) > 3 else seconds)
    took = {"steps": steps, "seconds_per_image": typical, "batch_seconds": seconds}
    took["block_tokens"] = None if model.is_unet else counted[0] / count
    return torch.cat(images), took


def shrunk(images: Tensor) -> list[Image.Image]:
    """The first images, as the sheet shows them."""
    few = F.interpolate(images[:COLUMNS].float(), size=(SHOWN, SHOWN), mode="area")
    return [Image.fromarray(x) for x in few.round().byte().permute(0, 2, 3, 1).cpu().numpy()]


def run(args: argparse.Namespace) -> list[str]:
    """Makes and judges the rows; returns what went wrong."""
    model = Model(args)
    judge = Judge(args, model.device)
    file = RowFile(args.rows_file, model.device)
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [way for way in WAYS[args.model] if re.search(args.rows, way.label)]
    problems, strips, base = [], {}, None

    def made_and_judged(way: Way) -> tuple[Tensor, Row, Row, dict[str, Any]]:
        images, took = make(model, way, max(1, round(way.share * args.images)), args)
        return images, took, *judge.scores(images)

    for number, way in enumerate([Way("unmerged", "unmerged"), *chosen]):
        late = args.spent() > args.budget
        outcome = "no time left" if late else attempt(partial(made_and_judged, way), model.device)
        if isinstance(outcome, str):  # the other rows can do without this one
            problems.append(f"{way.label}: {outcome}")
            print(problems[-1], flush=True)
            if base is None:
                break
            continue
        images, took, scores, kept = outcome
        base = base or took
        row = {**identity(way, model, args), "images": len(images), **took, **scores}
        row["speedup"] = base["seconds_per_image"] / took["seconds_per_image"]
        row["work"] = took["block_tokens"] and took["block_tokens"] / base["block_tokens"]
        file.add(row)
        np.savez(args.out / f"{number:02d}-{re.sub(r'[^A-Za-z0-9.]+', '-', way.label)}.npz", **kept)
        strips[way.label] = shrunk(images)
        told = [f"{name} {row[name]:.4g}" for name in TOLD if row.get(name) is not None]
        print(f"{args.spent():4.0f} s  {way.label}: {', '.join(told)}", flush=True)
        del images, outcome
    if strips:
        sheet = label_grid([*strips.values()], [""] * COLUMNS, [*strips])
        sheet.save(args.out / "sheet.jpg", quality=85)
    return problems


def identity(way: Way, model: Model, args: argparse.Namespace) -> Row:
    """What a row is of."""
    return {
        **{"section": "front", "setting": way.family, "model": f"embedded {args.model}"},
        **{"what": "images", "height": args.pixels, "width": args.pixels, "batch": args.batch},
        **{"all_steps": args.steps, "guidance": args.guidance, "scheduler": args.scheduler},
        **{"dtype": str(model.dtype).removeprefix("torch."), "attention": "default"},
        **{"mode": "eager", "variant": way.variant, "label": way.label, "settings": way.options},
        "reference_scenes": args.scenes if args.sprites else None,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = Arguments(__doc__, device="auto")
    add = parser.add_argument
    add("--model", choices=list(WAYS), default="transformer")
    add("--pixels", type=int, help="of a side; 512 on the transformer, 256 on the UNet")
    add("--steps", type=int, help="of unmerged images; 28 on the transformer, 20 on the UNet")
    add("--guidance", type=float, help="4 on the transformer, 5 on the UNet")
    add("--scheduler", choices=["own", "ddim", "plms"], default="own")
    add("--images", type=int, default=512, help="of the most important rows; others have fewer")
    add("--batch", type=int, default=32, help="images made together")
    add("--rows", default="", help="regular expression that labels must match")
    add("--budget", type=float, default=1e9, help="seconds after which no row begins")
    add("--sprites", type=Path, help="what scenes are composed of, to compare with")
    add("--scenes", type=int, default=2000)
    add("--inception", type=Path, help="weights, if the package is not installed")
    add("--lpips", type=Path, help="weights, if the package is not installed")
    add("--rows-file", type=Path, default=RESULTS / "front.jsonl")
    add("--out", type=Path, default=Path("front_output"), help="folder of features and the sheet")
    args = parser.read(arguments)
    for name in ("pixels", "steps", "guidance"):
        setattr(args, name, getattr(args, name) or USUAL[args.model][name])
    if problems := run(args):
        raise SystemExit("left out:\n" + "\n".join(problems))


if __name__ == "__main__":
    main()
