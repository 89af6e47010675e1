"""Teach the shipped transformer to draw as many of each object as the caption says.

    python train_numbers.py --sprites sprites.npz --pipeline pipeline \
        --judge run/classifier.safetensors --out run_numbers

Each round draws several pictures of each of many captions, and the judge (`judge.py`) says which
have the right objects. Then predictions move towards pictures that are better than others of
their caption and away from those that are worse, as in DiffusionNFT (Zheng et al., 2025); composed
scenes in every batch keep everything else as it was. 256 px come first, then 512 px.
`run_numbers/start.safetensors` is continued from in place of the shipped weights. `--warm-only 64`
is that of train_transformer.py.
"""

from __future__ import annotations

import json
import random
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch import Tensor

import models
import tomesd_demo_model
from config import NumbersRun, parse
from flow import pack, predict, sample
from judge import load_judge, right, wanted
from sampling import first_noise
from tomesd_demo_model.captions import Scene, sample_scene, sample_scenes
from train_transformer import ImageTrainer
from trainer import Pools, compile_blocks, configure_torch

# Of 28 steps, those that are made while learning: nearly all of the layout is made in the first.
KEPT = (0, 1, 2, 3, 4, 6, 9, 13, 18, 24)


class NumbersTrainer(ImageTrainer):
    """A student, and the mean of its latest weights, which draws what it learns from."""

    kept = ("tokens",)

    def __init__(self, run: NumbersRun, args: Namespace) -> None:
        folder = tomesd_demo_model.path("transformer") / "transformer"
        super().__init__(run, args, FluxTransformer2DModel.from_pretrained(folder))
        # Made anew: a copy would share what was compiled with the student's blocks.
        painter = FluxTransformer2DModel.from_config(self.model.transformer.config)
        self.painter = painter.to(self.device).eval().requires_grad_(False)
        if args.compile:
            compile_blocks((*painter.transformer_blocks, *painter.single_transformer_blocks))
        self.judge = load_judge(args.judge, args.device)
        self.rng = random.Random(run.seed)
        self.pools = Pools(self)

    def captions(self, count: int) -> list[Scene]:
        found: list[Scene] = []
        while len(found) < count:
            scene = sample_scene(self.rng)
            many = sum(number for _, number in scene.groups) > 2
            if many or self.rng.random() < self.run.easy_share:
                found.append(scene)
        return found

    def text_of(self, captions: list[str]) -> Tensor:
        return self.tokenizer.batch(captions, self.device)

    @torch.no_grad()
    def paint(
        self, tokens: Tensor, wants: Tensor, noise: Tensor, kept: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Latents [B, 4, s, s] of tokens [B, T] from noise, and whether they are right: [B]."""
        latents, fine = [], []
        # With both halves of guidance, as many as a step learns from: one compilation serves both.
        chunk = self.batch_size(noise.shape[-1]) // 2
        parts = (part.split(chunk) for part in (tokens, wants, noise))
        guidance, without = self.run.guidance, self.text(self.empty[None])
        for words, asked, start in zip(*parts, strict=True):
            text = self.text(words)
            drawn = sample(self.painter, text, without, start, guidance=guidance, kept=kept)
            latents.append(drawn)
            with torch.autocast(self.kind, torch.bfloat16):
                pictures = models.decode(self.vae, drawn, chunk)
            fine.append(right(self.judge.see(pictures), asked))
        return torch.cat(latents), torch.cat(fine)

    def draw(self, side: int) -> tuple[Tensor, Tensor, Tensor, float]:
        """Pictures of captions of which not all tries were right and not all wrong.

        Latents [B, 4, s, s], tokens [B, T], how much better they are than the mean of their
        caption [B], and the share of all pictures that were right.
        """
        run = self.run
        count = run.captions if side == run.middle_latent else run.full_captions
        scenes = self.captions(count)
        tokens = self.text_of([s.caption for s in scenes]).repeat_interleave(run.tries, 0)
        wants = wanted(scenes).to(self.device).repeat_interleave(run.tries, 0)
        noise = torch.randn(len(tokens), 4, side, side, device=self.device)
        latents, fine = self.paint(tokens, wants, noise, KEPT)
        score = fine.float().unflatten(0, (count, run.tries))
        better = (score - score.mean(dim=1, keepdim=True)).flatten()
        told = better != 0
        return latents[told], tokens[told], better[told], score.mean().item()

    def learn(self, latents: Tensor, tokens: Tensor, better: Tensor) -> Tensor:
        """One step on drawn pictures and on composed scenes; the loss."""
        run, drawn, side = self.run, len(latents), latents.shape[-1]
        scenes, about = self.pools.draw(side, self.batch_size(side) - drawn)
        dropped = torch.rand(len(scenes), 1, device=self.device) < run.caption_dropout
        tokens = torch.cat([tokens, torch.where(dropped, self.empty, about["tokens"])])
        clean = pack(torch.cat([latents, scenes.float()]))
        noise = torch.randn_like(clean)
        high = run.lowest_level + (1 - run.lowest_level) * torch.rand_like(better)
        level = torch.cat([high, self.levels(len(scenes), clean.shape[1])])
        noisy = torch.lerp(clean, noise, level.view(-1, 1, 1))
        # All the way to what a scene says, and as far to a drawn picture as it is better.
        way = torch.cat([run.strength * better, torch.ones_like(level[drawn:])]).view(-1, 1, 1)
        with torch.autocast(self.kind, torch.bfloat16):
            text = self.text(tokens)
            with torch.no_grad():
                old = predict(self.painter, noisy, level, text).float()
            v = predict(self.model.transformer, noisy, level, text)
        loss = F.mse_loss(v.float(), torch.lerp(old, noise - clean, way))
        loss.backward()
        self.hidden = None
        return loss.detach()

    def round(self, side: int, progress: float) -> dict[str, float]:
        """Draw, then learn from it; what happened."""
        self.renew()
        latents, tokens, better, share = self.draw(side)
        drawn = round(self.batch_size(side) * (1 - self.run.composed_share))
        order = [torch.randperm(len(latents), device=self.device) for _ in range(self.run.uses)]
        losses = []
        for part in torch.cat(order).split(drawn):
            if len(part) == drawn:
                losses.append(self.learn(latents[part], tokens[part], better[part]))
                norm = self.update(progress)
                self.images += drawn
        told = {"right": share, "told": len(latents), "step": self.step, "side": side}
        if losses:
            told |= {"loss": torch.stack(losses).mean().item(), "gradient": norm.item()}
        return told

    def renew(self) -> None:
        """The painter gets the student's mean weights."""
        self.painter.load_state_dict(self.averaged())

    def held_out(self, side: int) -> float:
        """Share of the first held-out captions that are drawn right, with all steps."""
        self.renew()
        chunk = self.batch_size(side) // 2
        count = self.run.judged // chunk * chunk
        # The shipped list of held-out captions is made of these scenes.
        scenes = sample_scenes(len(tomesd_demo_model.held_out_captions()))[:count]
        noise = torch.cat([first_noise(seed, side) for seed in range(count)]).to(self.device)
        tokens = self.text_of([scene.caption for scene in scenes])
        _, fine = self.paint(tokens, wanted(scenes).to(self.device), noise)
        return fine.float().mean().item()

    def warm_up(self, side: int) -> None:
        """One step and one call of the painter: fills the compiler's cache on disk."""
        batch = self.batch_size(side)
        drawn = round(batch * (1 - self.run.composed_share))
        latents = torch.randn(drawn, 4, side, side, device=self.device)
        self.learn(latents, self.empty.expand(drawn, -1), torch.zeros(drawn, device=self.device))


def train(trainer: NumbersTrainer, folder: Path) -> None:
    run, began = trainer.run, time.time()
    log = (folder / "numbers.jsonl").open("a")
    (folder / "numbers_config.json").write_text(json.dumps(asdict(run), indent=1) + "\n")

    def write(row: dict[str, float]) -> None:
        row = {"seconds": time.time() - began, **row}
        row = {key: round(value, 4) for key, value in row.items()}
        log.write(json.dumps(row) + "\n")
        log.flush()
        print(row, flush=True)

    sides = (run.middle_latent, run.full_latent)
    for side in sides:
        write({"side": side, "held_out": trainer.held_out(side)})
    began, last_save = time.time(), 0.0
    while (progress := (time.time() - began) / run.seconds) < 1:
        write(trainer.round(sides[progress >= run.middle_share], progress))
        if time.time() - began - last_save > run.checkpoint_every:
            last_save = time.time() - began
            trainer.save(folder)
    trainer.save(folder)
    for side in sides:
        write({"side": side, "held_out": trainer.held_out(side)})


def main() -> None:
    run, args = parse(
        NumbersRun,
        sprites="sprites.npz",
        pipeline="pipeline folder",
        judge="classifier.safetensors",
        out="run folder",
    )
    configure_torch(run)
    torch.manual_seed(run.seed)
    trainer = NumbersTrainer(run, args)
    if run.warm_only:
        return trainer.warm_up(run.warm_only)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer.load(args.out)
    train(trainer, args.out)


if __name__ == "__main__":
    main()
