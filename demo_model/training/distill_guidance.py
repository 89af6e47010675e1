"""Teach the shipped transformer to take guidance as an input; resumes from its checkpoint.

    python distill_guidance.py --sprites sprites.npz --pipeline pipeline --out run_guidance

Its targets are the shipped weights' own guided predictions, which take two calls of the model;
afterwards one is enough, as with Flux-dev. `run_guidance/transformer.safetensors` has a guidance
embedder more than the shipped weights. `--warm-only` is that of train_transformer.py.
"""

from __future__ import annotations

import functools
from argparse import Namespace

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

import tomesd_demo_model
from config import TRANSFORMER, GuidanceRun, parse
from flow import guided, predict
from train_transformer import ImageTrainer
from trainer import compile_blocks, start


def student_of(teacher: FluxTransformer2DModel) -> FluxTransformer2DModel:
    """A copy that takes guidance, and at first makes nothing of it: a guidance of 1."""
    student = FluxTransformer2DModel(**TRANSFORMER, guidance_embeds=True)
    student.load_state_dict(teacher.state_dict(), strict=False)
    last = student.time_text_embed.guidance_embedder.linear_2
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return student


class GuidanceTrainer(ImageTrainer):
    """A student with guidance as an input, and the teacher it is compared with."""

    def __init__(self, run: GuidanceRun, args: Namespace) -> None:
        folder = tomesd_demo_model.path("transformer") / "transformer"
        teacher = FluxTransformer2DModel.from_pretrained(folder).requires_grad_(False)
        super().__init__(run, args, student_of(teacher))
        self.teacher = teacher.to(args.device).eval()
        if args.compile:
            compile_blocks((*teacher.transformer_blocks, *teacher.single_transformer_blocks))

    def flow_loss(self, noisy: Tensor, level: Tensor, tokens: Tensor, direction: Tensor) -> Tensor:
        """Loss against the teacher's guided prediction, at guidance drawn for each picture.

        The part that guidance adds grows in proportion to it, and its square with the square:
        dividing by guidance once keeps small ones from being forgotten, and large ones first.
        """
        low, high = self.run.guidance_low, self.run.guidance_high
        guidance = low + (high - low) * torch.rand(len(noisy), device=self.device)
        with torch.autocast(self.kind, torch.bfloat16):
            text, without = self.text(tokens), self.text(self.empty[None])
            teacher = functools.partial(predict, self.teacher)
            with torch.no_grad():
                scale = guidance.view(-1, 1, 1)
                target = guided(teacher, noisy, level, text, without, scale)
            v = predict(self.model.transformer, noisy, level, text, guidance)
        error = (v.float() - target).square().mean(dim=(1, 2))
        return (error / guidance).mean()


if __name__ == "__main__":
    run, args = parse(
        GuidanceRun, sprites="sprites.npz", pipeline="pipeline folder", out="run folder"
    )
    start(GuidanceTrainer, run, args)
