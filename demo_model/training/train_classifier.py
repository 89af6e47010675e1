"""Train the judge of caption agreement: which objects, how many, what background.

    python train_classifier.py --sprites sprites.npz --tokenizer pipeline/tokenizer --out run

It only ever sees composed scenes, so what it says about samples is independent of the
diffusion model; its score on fresh composed scenes is the ceiling to compare with.
"""

from __future__ import annotations

import itertools
import json
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
from config import ClassifierRun, parse
from data import scene_batches
from optimizer import MovingAverage, Optimizers, rate_at
from scenes import Composer
from tokenizer import WordTokenizer
from tomesd_demo_model.captions import COLORS, PATTERNS, objects

HEADS = {"objects": len(objects()), "colors": len(COLORS), "pattern": len(PATTERNS), "count": 4}


class Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, out)
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1)
        self.skip = nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width, h, w] -> [B, out, h / stride, w / stride]."""
        skip = self.skip(F.avg_pool2d(x, 2) if self.conv1.stride == (2, 2) else x)
        x = self.conv1(F.silu(self.norm1(x)))
        return skip + self.conv2(F.silu(self.norm2(x)))


class Classifier(nn.Module):
    """A small residual network on 128 px pictures; mean and maximum pooled."""

    def __init__(self) -> None:
        super().__init__()
        widths = [32, 64, 128, 256, 384]
        self.conv_in = nn.Conv2d(3, widths[0], 5, 2, 2)
        blocks = []
        for before, after in itertools.pairwise(widths):
            blocks += [Residual(before, after, 2), Residual(after, after, 1)]
        self.body = nn.Sequential(*blocks)
        self.out = nn.Linear(2 * widths[-1], sum(HEADS.values()))

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        """Logits [B, n] per head for pictures [B, 3, 128, 128] in [-1, 1]."""
        features = self.body(self.conv_in(pictures))
        pooled = torch.cat([features.mean(dim=(2, 3)), features.amax(dim=(2, 3))], dim=1)
        return dict(zip(HEADS, self.out(pooled).split(list(HEADS.values()), dim=1), strict=True))


def targets(scenes: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    """Which objects and colours are there [B, n], and class indices [B] for the rest."""
    scenes = {k: v.to(device) for k, v in scenes.items()}
    batch = len(scenes["count"])
    present = torch.zeros(batch, HEADS["objects"], device=device)
    present.scatter_reduce_(1, scenes["sprite"], scenes["visible"], "amax")
    colors = torch.zeros(batch, HEADS["colors"], device=device).scatter_(1, scenes["color"], 1.0)
    return {
        "objects": present,
        "colors": colors,
        "pattern": scenes["pattern"],
        "count": scenes["count"] - 1,
    }


def loss_of(logits: dict[str, Tensor], truth: dict[str, Tensor]) -> Tensor:
    multi = [
        F.binary_cross_entropy_with_logits(logits[k].float(), truth[k]) * HEADS[k] / 8
        for k in ("objects", "colors")
    ]
    single = [F.cross_entropy(logits[k].float(), truth[k]) for k in ("pattern", "count")]
    return sum(multi) + 0.5 * sum(single)


def agreement(logits: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Share of named objects and colours found; share of pictures right in each respect."""
    found = {k: logits[k] > 0 for k in ("objects", "colors")}
    named = {k: truth[k] > 0 for k in found}
    rows = {f"{k}_found": (found[k] & named[k]).sum() / named[k].sum() for k in found}
    rows["objects_exactly"] = (found["objects"] == named["objects"]).all(dim=1).float().mean()
    for key in ("pattern", "count"):
        rows[f"{key}_right"] = (logits[key].argmax(dim=1) == truth[key]).float().mean()
    return {key: round(value.item(), 4) for key, value in rows.items()}


def main() -> None:
    run, args = parse(
        ClassifierRun, sprites="sprites.npz", tokenizer="tokenizer folder", out="run folder"
    )
    device = args.device
    torch.manual_seed(0)
    composer = Composer(args.sprites, device, seed=7)
    tokenizer = WordTokenizer(args.tokenizer)
    stream = scene_batches(tokenizer, run.batch, seed=7, workers=args.workers)
    model = Classifier().to(device, memory_format=torch.channels_last)
    optimizers = Optimizers(model, run.learning_rate)
    average = MovingAverage(model, decay=0.998)
    start, step = time.time(), 0
    while (progress := (time.time() - start) / run.seconds) < 1:
        scenes = next(stream)
        pictures = composer(scenes, run.pixels).contiguous(memory_format=torch.channels_last)
        # Samples have soft edges and faint noise at times: the judge should not mind.
        pictures = pictures + 0.05 * torch.randn_like(pictures)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = loss_of(model(pictures), targets(scenes, device))
        loss.backward()
        optimizers.step(rate_at(progress, step, 100, 0.6))
        average.update(model, step)
        if step % 200 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        step += 1
    model.load_state_dict(average.weights, strict=False)
    models.save_tensors(model.state_dict(), args.out / "classifier.safetensors")
    scenes = next(stream)
    with torch.no_grad():
        report = agreement(model(composer(scenes, run.pixels)), targets(scenes, device))
    report |= {"steps": step, "seconds": round(time.time() - start, 1)}
    (args.out / "classifier.json").write_text(json.dumps(report, indent=1) + "\n")
    print(report, flush=True)


if __name__ == "__main__":
    main()
