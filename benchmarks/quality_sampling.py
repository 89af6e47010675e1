"""Makes and judges images for quality.py, on the GPU: what a pipeline does, without its waits."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tomesd.bench.measure import MemoryProbe
from tomesd.bench.models import shared_copy
from tomesd.evaluation.metrics import Estimate, mean_estimate, paired_scores
from tomesd.evaluation.sampling import set_scheduler
from tomesd.generation.loading import set_attention
from tomesd.patch import role_of

GUIDANCE = 5.0
DECODED_AT_ONCE = 50
SCORED_AT_ONCE = 50


@dataclass(frozen=True)
class Images:
    """What one way of sampling has made, and what it took."""

    pixels: Tensor
    """`[count, 3, H, W]` of uint8, on the device."""
    seconds: float
    """Of all steps and decoding."""
    peak_mib: float | None
    """Of the steps, beyond what was in use before; None on a CPU."""


class Sampler:
    """Images of captions: image i has caption i and seed i, whatever the batch size."""

    def __init__(self, pipe: Any, captions: list[str], size: int, batch: int):
        self.pipe, self.size, self.batch = pipe, size, batch
        self.device, self.dtype = pipe.unet.device, pipe.unet.dtype
        self.text = self._encode(captions)
        self.no_text = self._encode([""])

    @torch.inference_mode()
    def _encode(self, captions: list[str]) -> Tensor:
        """`[captions, L, C]`; each caption is encoded once for all rows."""
        parts = [captions[i : i + 250] for i in range(0, len(captions), 250)]
        return torch.cat([self.pipe.encode_prompt(p, self.device, 1, False)[0] for p in parts])

    def latents(self, first: int, count: int, seed: int) -> Tensor:
        """Noise as pipelines draw it from a list of generators, `[count, 4, h, w]`."""
        side = self.size // self.pipe.vae_scale_factor
        shape = (1, self.pipe.unet.config.in_channels, side, side)
        drawn = [
            torch.randn(
                shape, generator=torch.Generator().manual_seed(seed + first + i), dtype=self.dtype
            )
            for i in range(count)
        ]
        return torch.cat(drawn).to(self.device)

    def texts(self, first: int, count: int) -> Tensor:
        """Encodings of no text and of captions, in a circle: `[2 * count, L, C]`."""
        places = torch.arange(first, first + count, device=self.device) % len(self.text)
        return torch.cat([self.no_text.expand(count, -1, -1), self.text[places]])

    @torch.inference_mode()
    def denoise(self, unet: Any, latents: Tensor, texts: Tensor, scheduler: str, steps: int) -> Any:
        with scheduled(self.pipe, scheduler) as solver:
            # The solver looks up its tables on the CPU: with times on the GPU it would wait for it.
            solver.set_timesteps(steps)
            times = solver.timesteps.to(self.device)
            latents = latents * solver.init_noise_sigma
            for here, there in zip(solver.timesteps, times, strict=True):
                both = solver.scale_model_input(torch.cat([latents, latents]), here)
                both = unet(both, there, encoder_hidden_states=texts, return_dict=False)[0]
                without, given = both.chunk(2)
                guided = without + GUIDANCE * (given - without)
                latents = solver.step(guided, here, latents, return_dict=False)[0]
        return latents

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """`[B, 4, h, w]` to pixels `[B, 3, H, W]` of uint8."""
        vae = self.pipe.vae
        made = []
        for part in (latents / vae.config.scaling_factor).split(DECODED_AT_ONCE):
            image = vae.decode(part, return_dict=False)[0]
            image = (image * 0.5 + 0.5).clamp(0, 1).float()
            made.append((image * 255).round().to(torch.uint8).contiguous())
        return torch.cat(made)

    def images(
        self,
        unet: Any,
        count: int,
        steps: int,
        scheduler: str,
        *,
        seed: int = 0,
        whole_batches: bool = False,
    ) -> Images:
        """`count` images, in batches. The first call of `unet` is not timed.

        Args:
            whole_batches: fill the last batch up with images that are dropped then: another size
                would be compiled anew.
        """
        first = min(self.batch, count)
        # Kernels are loaded and tuned, and memory is got.
        self.denoise(unet, self.latents(0, first, seed), self.texts(0, first), "ddim", 1)
        before = self._reset_peak()
        made, peak, began = [], None, time.perf_counter()
        for start in range(0, count, self.batch):
            size = first if whole_batches else min(self.batch, count - start)
            latents, texts = self.latents(start, size, seed), self.texts(start, size)
            latents = self.denoise(unet, latents, texts, scheduler, steps)
            if before is not None and start == 0:
                peak = (torch.cuda.max_memory_allocated(self.device) - before) / 2**20
            made.append(self.decode(latents))
        pixels = torch.cat(made)[:count]
        self._wait()
        return Images(pixels, time.perf_counter() - began, peak)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _reset_peak(self) -> int | None:
        self._wait()
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def timesteps(self, steps: int) -> Tensor:
        with scheduled(self.pipe, "ddim") as solver:
            solver.set_timesteps(steps)
            return solver.timesteps.to(self.device)

    def inputs(self, count: int) -> tuple[Tensor, Tensor]:
        """Latents `[2 * count, 4, h, w]` and texts `[2 * count, L, C]` of a step with guidance."""
        latents = self.latents(0, count, 0)
        return torch.cat([latents, latents]), self.texts(0, count)

    @torch.inference_mode()
    def step_peak(self, make: Callable[[], Any], count: int) -> float:
        """MiB that a step takes per image at most, beyond the weights and the inputs.

        Args:
            make: patches the model: what the patch keeps counts too.
        """
        (both, texts), times = self.inputs(count), self.timesteps(3)
        probe = MemoryProbe(self.device)
        unet = make()

        def call() -> None:
            for t in times:  # some merge at a part of the noise levels only
                unet(both, t, encoder_hidden_states=texts, return_dict=False)

        call()
        return probe.peak_mib(call) / count

    def step_times(
        self,
        models: dict[str, Any],
        count: int,
        steps: int,
        repeats: int = 1,
        *,
        spread: bool = False,
        every_step_first: bool = False,
    ) -> dict[str, list[float]]:
        """Seconds that each model takes for the UNet's calls of `count` images, once per repeat.

        They take turns at every step, so that what changes on the machine meets all of them, and
        go through all of the noise levels, as some merge at a part of them only.

        Args:
            spread: each repeat takes its share of the steps, and all repeats together take all.
            every_step_first: to warm up, all steps are taken, and not three of them: every number
                of tokens has libraries choose among their kernels, which takes a while.
        """
        times = self.timesteps(steps)
        both, texts = self.inputs(count)
        found: dict[str, list[float]] = {name: [] for name in models}
        with torch.inference_mode():
            for repeat in range(repeats + 1):
                chosen = times[repeat - 1 :: repeats] if spread else times
                if repeat == 0:  # to warm up: whatever is merged at some noise levels only, too
                    chosen = times if every_step_first else times[[0, steps // 2, -1]]
                clocks = {name: Clock(self.device) for name in models}
                for t in chosen:
                    for name, unet in models.items():
                        with clocks[name]:
                            unet(both, t, encoder_hidden_states=texts, return_dict=False)
                self._wait()
                for name, clock in clocks.items():
                    if repeat:
                        found[name].append(clock.seconds())
        return found


class Clock:
    """Adds up the time of `with` blocks; on a GPU by its own clock, so that nothing has to wait."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(self, *_: Any) -> None:
        self._spans.append((self._began, self._now()))

    def seconds(self) -> float:
        if self._cuda:
            return sum(begin.elapsed_time(end) for begin, end in self._spans) / 1000
        return sum(end - begin for begin, end in self._spans)


@contextmanager
def scheduled(pipe: Any, name: str) -> Iterator[Any]:
    """A new scheduler with the settings of the pipeline's own, which stays."""
    holder = SimpleNamespace(scheduler=pipe.scheduler)
    set_scheduler(holder, name)
    yield holder.scheduler


def unfused(unet: Any) -> Any:
    """A copy with the attention of the paper, which writes all scores down."""
    copy = shared_copy(unet)
    set_attention(SimpleNamespace(unet=copy), "eager")
    return copy


def compiled(unet: Any) -> Any:
    """All of a model, patched or not. 0.1.3 interrupts the graph where it draws; that is allowed.

    What was compiled before is dropped, as it would count towards the limits.
    """
    torch._dynamo.reset()
    _raise_limits()
    return torch.compile(unet, dynamic=False)


PARTS = ("ResnetBlock2D", "FeedForward", "GroupNorm", "Downsample2D", "Upsample2D")


def compiled_in_parts(unet: Any) -> Any:
    """Has those parts of a model compiled that are the same whatever is merged: once for all."""
    _raise_limits()
    for module in unet.modules():
        if type(module).__name__ in PARTS and role_of(module) is None:
            module.compile(dynamic=False)
    return unet


def _raise_limits() -> None:
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 256)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4096)


def pair_estimates(one: Tensor, other: Tensor, lpips: Any) -> dict[str, Estimate]:
    """PSNR, SSIM and LPIPS of `[n, 3, H, W]` images to others, pair by pair."""
    parts = [
        paired_scores(a, b, lpips)
        for a, b in zip(one.split(SCORED_AT_ONCE), other.split(SCORED_AT_ONCE), strict=True)
    ]
    joined = {name: torch.cat([torch.from_numpy(p[name]) for p in parts]) for name in parts[0]}
    return {name: mean_estimate(values.numpy()) for name, values in joined.items()}


@torch.inference_mode()
def features(pixels: Tensor, inception: Callable[[Tensor], Tensor]) -> Tensor:
    """`[n, 3, H, W]` of uint8 to Inception features `[n, 2048]`."""
    return torch.cat([inception(part) for part in pixels.split(SCORED_AT_ONCE)])


def fields(estimates: dict[str, Estimate]) -> dict[str, float | None]:
    """Of a row: each value and the ends of its interval."""
    found: dict[str, float | None] = {}
    for name, estimate in estimates.items():
        found |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return found
