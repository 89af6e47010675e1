"""Train the judge of caption agreement (`judge.py`).

    python train_classifier.py --sprites sprites.npz --tokenizer pipeline/tokenizer --out run

It only ever sees composed scenes, so what it says about samples is independent of the
diffusion model; its score on fresh composed scenes is the ceiling to compare with.
"""

from __future__ import annotations

import json
import time

import torch

import models
from config import ClassifierRun, parse
from data import scene_batches
from judge import PIXELS, Judge, agreement, loss_of, targets
from optimizer import MovingAverage, Optimizers, rate_at
from scenes import Composer
from tokenizer import WordTokenizer


def main() -> None:
    run, args = parse(
        ClassifierRun, sprites="sprites.npz", tokenizer="tokenizer folder", out="run folder"
    )
    device = args.device
    torch.manual_seed(0)
    composer = Composer(args.sprites, device, seed=7)
    tokenizer = WordTokenizer(args.tokenizer)
    stream = scene_batches(tokenizer, run.batch, seed=7, workers=args.workers)
    model = Judge().to(device, memory_format=torch.channels_last)
    optimizers = Optimizers(model, run.learning_rate)
    average = MovingAverage(model, decay=0.998)
    start, step = time.time(), 0
    while (progress := (time.time() - start) / run.seconds) < 1:
        scenes = next(stream)
        pictures = composer(scenes, PIXELS).contiguous(memory_format=torch.channels_last)
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
    model.eval().requires_grad_(False)
    batches = [next(stream) for _ in range(run.judged_batches)]
    scenes = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    report = agreement(model.see(composer(scenes, PIXELS)), targets(scenes, device))
    report |= {"steps": step, "seconds": round(time.time() - start, 1)}
    (args.out / "classifier.json").write_text(json.dumps(report, indent=1) + "\n")
    print(report, flush=True)


if __name__ == "__main__":
    main()
