"""What training a transformer takes, whatever it draws: steps, pools, compiling, checkpoints."""

from __future__ import annotations

import functools
import json
import random
import time
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from safetensors.torch import load_file
from torch import Tensor, nn

import checkpoint
import models
from config import FlowRun
from data import LatentPool, scene_batches
from flow import FlowModel, Text, TextEncoder, shifted
from optimizer import MovingAverage, Optimizers, rate_at
from scenes import Composer
from tokenizer import WordTokenizer

STARTED = time.time()
# Modulations, embeddings and the last layer start at zero or are no maps between features.
_NOT_MATRICES = ("norm", "embed", "probe", "transformer.proj_out", "scale_shift_table")
# Numbers in a token: 2 x 2 latents of 4 channels.
_TOKEN = 16


class Trainer(ABC):
    """Everything one step needs, and what a checkpoint must hold.

    Subclasses say what is drawn and by which transformer. The size of a step is a number that
    means something to them, `size_name`: the side of the latents, or how many frames.
    """

    size_name: str
    composer: Composer
    # Parts of a scene's description that are kept beside its latents.
    kept: tuple[str, ...] = ("tokens", "sprite", "visible", "place", "angle")

    def __init__(
        self,
        run: Any,
        args: Namespace,
        transformer: nn.Module,
        blocks: Iterable[nn.Module],
        watched: nn.Module,
    ) -> None:
        """`blocks` are compiled; the layout is read from what the block `watched` gives."""
        self.run, self.args, self.device = run, args, args.device
        self.kind = torch.device(args.device).type
        self.model = FlowModel(transformer).to(self.device)
        self.tokenizer = WordTokenizer(args.pipeline / "tokenizer")
        self.text = TextEncoder(args.pipeline, args.device)
        vae = AutoencoderKL.from_pretrained(args.pipeline / "vae").to(args.device).eval()
        self.vae = vae.requires_grad_(False).to(memory_format=torch.channels_last)
        self.optimizers = Optimizers(
            self.model, run.learning_rate, run.adam_factor, run.weight_decay, _NOT_MATRICES
        )
        self.average = MovingAverage(self.model, run.ema_decay)
        self.hidden: Tensor | None = None
        watched.register_forward_hook(self._watch)
        if args.compile:
            compile_blocks(blocks)
        self.empty = torch.tensor(self.tokenizer(""), device=self.device)
        self.step, self.elapsed, self.images = 0, 0.0, 0

    @abstractmethod
    def pick(self, progress: float, rng: random.Random) -> int:
        """Size of the next step."""

    @abstractmethod
    def batch_size(self, size: int) -> int:
        """How many pictures or clips a step of that size has."""

    @abstractmethod
    def encode(self, scenes: dict[str, Tensor], size: int) -> Tensor:
        """Latents [B, ...] of described scenes."""

    @abstractmethod
    def arrange(self, latents: Tensor) -> Tensor:
        """Latents [B, ...] as the transformer takes them."""

    @abstractmethod
    def predict(self, noisy: Tensor, level: Tensor, text: Text) -> Tensor:
        """The direction at arranged latents and noise levels [B]."""

    @abstractmethod
    def layout(self, scenes: dict[str, Tensor], latents: Tensor) -> tuple[Tensor, Tensor]:
        """`Composer.layout` of the tokens of these latents."""

    @abstractmethod
    def write_sheets(self, transformer: nn.Module, folder: Path) -> None:
        """Show what averaged weights draw."""

    def seed(self) -> int:
        """Differs between runs, and between the parts of a run."""
        return 1_000_000 * self.run.seed + self.step

    def scenes(self) -> Iterator[dict[str, Tensor]]:
        run, args = self.run, self.args
        return scene_batches(self.tokenizer, run.scenes_at_once, self.seed(), args.workers)

    def levels(self, batch: int, tokens: int) -> Tensor:
        """Noise levels [batch]: mostly logit-normal, the rest uniform, shifted by size.

        A share of them is drawn again from the top quarter.
        """
        normal = torch.randn(batch, device=self.device).sigmoid()
        uniform = torch.rand(batch, device=self.device)
        chosen = torch.rand(batch, device=self.device) < self.run.uniform_timesteps
        level = shifted(torch.where(chosen, uniform, normal), tokens)
        high = torch.rand(batch, device=self.device) < self.run.high_noise
        return torch.where(high, 1 - uniform / 4, level)

    def backward(
        self, latents: Tensor, scenes: dict[str, Tensor], layout_weight: float
    ) -> tuple[Tensor, Tensor]:
        """Flow and layout loss of latents [B, ...]; leaves the gradients of both."""
        clean = self.arrange(latents.float())
        noise = torch.randn_like(clean)
        level = self.levels(len(clean), clean[0].numel() // _TOKEN)
        noisy = torch.lerp(clean, noise, level.view(-1, *[1] * (clean.ndim - 1)))
        dropped = torch.rand(len(clean), 1, device=self.device) < self.run.caption_dropout
        tokens = torch.where(dropped, self.empty, scenes["tokens"])
        loss = self.flow_loss(noisy, level, tokens, noise - clean)
        layout = self._layout_loss(scenes, latents) if layout_weight else 0 * loss
        (loss + layout_weight * layout).backward()
        self.hidden = None
        return loss.detach(), layout.detach()

    def flow_loss(self, noisy: Tensor, level: Tensor, tokens: Tensor, direction: Tensor) -> Tensor:
        """Loss against the true direction, both as `arrange` gives them; tokens [B, T]."""
        with torch.autocast(self.kind, torch.bfloat16):
            v = self.predict(noisy, level, self.text(tokens))
        return F.mse_loss(v.float(), direction)

    def _watch(self, block: nn.Module, inputs: tuple, outputs: Any) -> None:
        self.hidden = outputs[1] if isinstance(outputs, tuple) else outputs

    def _layout_loss(self, scenes: dict[str, Tensor], latents: Tensor) -> Tensor:
        assert self.hidden is not None
        with torch.autocast(self.kind, torch.bfloat16):
            return self.model.probe(self.hidden, *self.layout(scenes, latents))

    def update(self, progress: float) -> Tensor:
        rate = rate_at(progress, self.step, self.run.warmup_steps, self.run.decay_share)
        norm = self.optimizers.step(rate)
        self.average.update(self.model, self.step)
        self.step += 1
        return norm

    def averaged(self) -> dict[str, Tensor]:
        """The transformer's averaged weights under their own names."""
        part = "transformer."
        weights = self.average.weights.items()
        return {name.removeprefix(part): w for name, w in weights if name.startswith(part)}

    def save(self, folder: Path) -> None:
        counters = {k: getattr(self, k) for k in ("step", "elapsed", "images")}
        checkpoint.save(folder, self.model, self.average, self.optimizers, counters)
        models.save_tensors(self.averaged(), folder / "transformer.safetensors", torch.float16)

    def load(self, folder: Path) -> None:
        counters = checkpoint.load(folder, self.model, self.average, self.optimizers)
        if counters:
            self.step, self.images = int(counters["step"]), int(counters["images"])
            self.elapsed = counters["elapsed"]
            print(f"resumed at step {self.step}", flush=True)
        elif (folder / "start.safetensors").exists():
            self.model.transformer.load_state_dict(load_file(folder / "start.safetensors"))
            self.average = MovingAverage(self.model, self.run.ema_decay)
            print("started from given weights", flush=True)


def _run_block(forward: Callable[..., Any], block: nn.Module, *inputs: Any, **named: Any) -> Any:
    """A block whose outputs are laid out like its inputs: one compilation serves all of a kind."""
    outputs = forward(block, *inputs, **named)
    if isinstance(outputs, tuple):
        return tuple(part.contiguous() for part in outputs)
    return outputs.contiguous()


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile one block of each kind for each size, instead of all of them."""
    compiled = torch.compile(_run_block, dynamic=False, fullgraph=True)
    for block in blocks:
        # The hooks of a block stay outside, where they may keep what they see.
        block.forward = functools.partial(compiled, type(block).forward, block)


def configure_torch(run: FlowRun) -> None:
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 32
    if hasattr(torch._inductor.config, "mix_order_reduction"):
        # An earlier transformer did not compile with it under torch 2.11.
        torch._inductor.config.mix_order_reduction = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(bool(run.cudnn_attention))
    torch.backends.cuda.enable_flash_sdp(not run.cudnn_attention)


class Pools:
    """One pool of latents for each size, made when first asked for."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.scenes = trainer, trainer.scenes()
        self.pools: dict[int, LatentPool] = {}
        # Scenes still to be composed at each size, so that each is used `replays` times.
        self.owed: dict[int, float] = {}

    def draw(self, size: int, batch: int) -> tuple[Tensor, dict[str, Tensor]]:
        trainer, run = self.trainer, self.trainer.run
        if size not in self.pools:
            encode = functools.partial(trainer.encode, size=size)
            self.pools[size] = LatentPool(encode, self.scenes, run.pool_scenes, trainer.kept)
            self.owed[size] = 8.0 * batch
        self.owed[size] += batch / run.replays
        while self.owed[size] >= run.scenes_at_once:
            self.pools[size].add()
            self.owed[size] -= run.scenes_at_once
        return self.pools[size].draw(batch)


def start(make: Callable[[Any, Namespace], Trainer], run: FlowRun, args: Namespace) -> None:
    """Make a trainer, and go on from its checkpoint."""
    configure_torch(run)
    torch.manual_seed(0)
    trainer = make(run, args)
    if run.warm_only:
        return warm_up(trainer, run.warm_only)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer.load(args.out)
    # What was drawn before a stop is not drawn again.
    torch.manual_seed(trainer.seed())
    trainer.composer.generator.manual_seed(trainer.seed())
    train(trainer, args.out)
    if run.sheet_images:
        transformer = trainer.model.transformer
        averaged = type(transformer).from_config(transformer.config)
        averaged.load_state_dict(trainer.averaged())
        trainer.write_sheets(averaged.to(args.device).eval(), args.out / "sheets")


def warm_up(trainer: Trainer, size: int) -> None:
    """One step: fills the compiler's cache on disk."""
    started = time.time()
    latents, scenes = Pools(trainer).draw(size, trainer.batch_size(size))
    trainer.backward(latents, scenes, trainer.run.layout_weight)
    print(f"compiled {trainer.size_name} {size} in {time.time() - started:.0f} s", flush=True)


def train(trainer: Trainer, folder: Path) -> None:
    run, pools = trainer.run, Pools(trainer)
    log = (folder / "transformer.jsonl").open("a")
    (folder / "transformer_config.json").write_text(json.dumps(asdict(run), indent=1) + "\n")
    rng = random.Random(trainer.step)
    began = time.time() - trainer.elapsed
    last_save = last_row = trainer.elapsed
    while (progress := trainer.elapsed / run.seconds) < 1:
        if time.time() - STARTED > run.pause_after:
            break
        size = trainer.pick(progress, rng)
        batch = trainer.batch_size(size)
        weight = run.layout_weight * max(0.0, 1 - progress / run.layout_share)
        losses = trainer.backward(*pools.draw(size, batch), weight)
        norm = trainer.update(progress)
        trainer.images += batch
        trainer.elapsed = time.time() - began
        if trainer.step % run.log_every == 0:
            loss, layout = (value.item() for value in losses)
            row = {"step": trainer.step, "seconds": trainer.elapsed, "images": trainer.images}
            row |= {
                trainer.size_name: size,
                "loss": loss,
                "layout": layout,
                "gradient": norm.item(),
            }
            row = {key: round(value, 4) for key, value in row.items()}
            log.write(json.dumps(row) + "\n")
            log.flush()
            if trainer.elapsed - last_row > 15:
                last_row = trainer.elapsed
                print(row, flush=True)
        if trainer.elapsed - last_save > run.checkpoint_every:
            last_save = trainer.elapsed
            trainer.save(folder)
    trainer.save(folder)
    print(f"{trainer.step} steps, {trainer.images} images, {trainer.elapsed:.0f} s", flush=True)
