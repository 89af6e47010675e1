"""Which batch, layout and precision make a step of the embedded model fast, and does compiling?"""

import argparse
import time
from typing import Any

import tomesd_demo_model
import torch
from quality_sampling import Clock, Sampler, compiled, compiled_in_parts

from tomesd.bench.measure import attempt, free_memory
from tomesd.bench.models import shared_copy
from tomesd.generation import load_pipeline

CALLS = 3


def profile(args: argparse.Namespace) -> None:
    """Prints a line for each way, with how long a row of `args.images` images would take."""
    began = time.monotonic()
    captions = tomesd_demo_model.held_out_captions()[:20]
    batches = sorted({max(1, args.batch // 2), args.batch, 2 * args.batch})
    for dtype in ("float16", "bfloat16"):
        if args.device == "cpu" and dtype == "float16":
            continue  # slow there, and of no interest
        pipe = load_pipeline("demo", device=args.device, dtype=dtype)
        for layout in (torch.channels_last, torch.contiguous_format):
            pipe.unet.to(memory_format=layout)
            pipe.vae.to(memory_format=layout)
            for batch in batches:
                name = f"{dtype}, {str(layout).removeprefix('torch.')}, batch {batch}"
                sampler = Sampler(pipe, captions, args.size, batch)
                _report(name, sampler, pipe.unet, args)
        if dtype == "float16" or args.device == "cpu":
            _decoding(Sampler(pipe, captions, args.size, args.batch), args)
            _compiled(pipe, Sampler(pipe, captions, args.size, args.batch), args)
        print(f"{time.monotonic() - began:.0f} s so far", flush=True)


def _report(name: str, sampler: Sampler, unet: Any, args: argparse.Namespace) -> None:
    outcome = attempt(lambda: _seconds(sampler, unet), sampler.device)
    if isinstance(outcome, str):
        print(f"{name:48s} {outcome}", flush=True)
    else:
        first, step = outcome
        row = step / sampler.batch * args.images * (args.steps + 1)
        print(
            f"{name:48s} {1000 * step / sampler.batch:.3f} ms per image and step, "
            f"a row {row:.0f} s; first call {first:.1f} s",
            flush=True,
        )
    free_memory(sampler.device)


@torch.inference_mode()
def _seconds(sampler: Sampler, unet: Any) -> tuple[float, float]:
    """Of the first call, and of a later one."""
    latents, texts = sampler.latents(0, sampler.batch, 0), sampler.texts(0, sampler.batch)
    both = torch.cat([latents, latents])
    t = torch.tensor(500, device=sampler.device)

    def call() -> None:
        unet(both, t, encoder_hidden_states=texts, return_dict=False)

    began = time.perf_counter()
    call()
    sampler._wait()
    first = time.perf_counter() - began
    call()
    clock = Clock(sampler.device)
    with clock:
        for _ in range(CALLS):
            call()
    sampler._wait()
    return first, clock.seconds() / CALLS


def _decoding(sampler: Sampler, args: argparse.Namespace) -> None:
    latents = sampler.latents(0, sampler.batch, 0)
    sampler.decode(latents)
    clock = Clock(sampler.device)
    with clock:
        sampler.decode(latents)
    sampler._wait()
    seconds = clock.seconds() * args.images / sampler.batch
    print(f"decoding the images of a row: {seconds:.1f} s", flush=True)


def _compiled(pipe: Any, sampler: Sampler, args: argparse.Namespace) -> None:
    """In the layout that came last."""
    for name, make in (("in parts", compiled_in_parts), ("compiled", compiled)):
        model = make(shared_copy(pipe.unet))
        _report(f"{name}, batch {sampler.batch}", sampler, model, args)
