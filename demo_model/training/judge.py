"""The judge of caption agreement: which objects, how many of each, what background.

It only ever sees composed scenes (`train_classifier.py`), so what it says about samples is
independent of the models that draw them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tomesd_demo_model.captions import COLORS, PATTERNS, Scene, objects

PIXELS = 128
# Cells along a side of the grid in which centres of objects are looked for.
CELLS = 16
HEADS = {"objects": len(objects()), "colors": len(COLORS), "pattern": len(PATTERNS), "count": 4}
# An object is there if its centre is surer than the first, and its picture is in doubt if another
# centre is surer than the second.
SURE, DOUBT = 0.5, 0.25
_WIDTHS = (32, 64, 128, 256, 384)


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


class Judge(nn.Module):
    """A small residual network on 128 px pictures.

    What is there at all is read from its last features, mean and maximum pooled. Where centres of
    objects are (Zhou et al., Objects as Points, 2019) is read from three resolutions: that tells
    two violins and a clover from a violin and two clovers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, _WIDTHS[0], 5, 2, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(Residual(before, after, 2), Residual(after, after, 1))
            for before, after in itertools.pairwise(_WIDTHS)
        )
        self.out = nn.Linear(2 * _WIDTHS[-1], sum(HEADS.values()))
        self.lift = nn.ModuleList(nn.Conv2d(width, 256, 1) for width in _WIDTHS[2:])
        self.mix = Residual(256, 256, 1)
        self.centers = nn.Conv2d(256, HEADS["objects"], 1)
        nn.init.constant_(self.centers.bias, -5.0)  # nearly all cells are empty

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        """Logits [B, n] per head for pictures [B, 3, 128, 128] in [-1, 1], and `centers`
        [B, objects, CELLS, CELLS].
        """
        x, features = self.conv_in(pictures), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        pooled = torch.cat([x.mean(dim=(2, 3)), x.amax(dim=(2, 3))], dim=1)
        logits = dict(zip(HEADS, self.out(pooled).split(list(HEADS.values()), dim=1), strict=True))
        lifted = [
            F.interpolate(lift(part), size=(CELLS, CELLS))
            for lift, part in zip(self.lift, features[1:], strict=True)
        ]
        logits["centers"] = self.centers(F.silu(self.mix(torch.stack(lifted).sum(dim=0))))
        return logits

    @torch.no_grad()
    def see(self, pictures: Tensor, chunk: int = 256) -> dict[str, Tensor]:
        """The logits for pictures [B, 3, s, s] of any size."""
        parts = []
        for part in pictures.split(chunk):
            small = F.interpolate(part.float(), size=(PIXELS, PIXELS), mode="area")
            parts.append(self(small))
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def load_judge(weights: Path, device: str) -> Judge:
    judge = Judge()
    judge.load_state_dict(load_file(weights))
    return judge.eval().requires_grad_(False).to(device, memory_format=torch.channels_last)


def targets(scenes: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    """Which objects and colours are there [B, n], class indices [B] for pattern and count, and
    where centres of objects are [B, objects, CELLS, CELLS].
    """
    scenes = {k: v.to(device) for k, v in scenes.items()}
    batch = len(scenes["count"])
    present = torch.zeros(batch, HEADS["objects"], device=device)
    present.scatter_reduce_(1, scenes["sprite"], scenes["visible"], "amax")
    colors = torch.zeros(batch, HEADS["colors"], device=device).scatter_(1, scenes["color"], 1.0)
    cell = (scenes["place"][..., :2] * CELLS).long().clamp(0, CELLS - 1)
    index = (scenes["sprite"] * CELLS + cell[..., 1]) * CELLS + cell[..., 0]
    centers = torch.zeros(batch, HEADS["objects"] * CELLS**2, device=device)
    centers.scatter_reduce_(1, index, scenes["visible"], "amax")
    return {
        "objects": present,
        "colors": colors,
        "pattern": scenes["pattern"],
        "count": scenes["count"] - 1,
        "centers": centers.unflatten(1, (-1, CELLS, CELLS)),
    }


def loss_of(logits: dict[str, Tensor], truth: dict[str, Tensor]) -> Tensor:
    multi = [
        F.binary_cross_entropy_with_logits(logits[k].float(), truth[k]) * HEADS[k] / 8
        for k in ("objects", "colors")
    ]
    single = [F.cross_entropy(logits[k].float(), truth[k]) for k in ("pattern", "count")]
    return (
        sum(multi) + 0.5 * sum(single) + _center_loss(logits["centers"].float(), truth["centers"])
    )


def _center_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Focal loss; what lies next to a centre counts as neither there nor not."""
    p = logits.sigmoid()
    near = F.max_pool2d(truth, 3, 1, 1) - truth
    there = -truth * (1 - p).square() * F.logsigmoid(logits)
    empty = -(1 - truth) * (1 - near) * p.square() * F.logsigmoid(-logits)
    return (there + empty).sum() / truth.sum().clamp(min=1)


def numbers(centers: Tensor, threshold: float = SURE) -> Tensor:
    """How many of each object there are [B, objects]: highest of their surroundings, and sure."""
    p = centers.float().sigmoid()
    return ((p == F.max_pool2d(p, 3, 1, 1)) & (p > threshold)).sum(dim=(2, 3))


def right(logits: dict[str, Tensor], wanted: Tensor) -> Tensor:
    """Whether pictures show as many of each object as is wanted [B, objects], beyond doubt: [B]."""
    found = (numbers(logits["centers"], threshold) == wanted for threshold in (SURE, DOUBT))
    return torch.stack([part.all(dim=1) for part in found]).all(dim=0)


def wanted(scenes: Iterable[Scene]) -> Tensor:
    """How many of each object the captions name: [B, objects]."""
    rows = []
    for scene in scenes:
        row = torch.zeros(HEADS["objects"], dtype=torch.long)
        for kind, number in scene.groups:
            row[kind] = number
        rows.append(row)
    return torch.stack(rows)


def agreement(logits: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Share of named objects and colours found; share of pictures right in each respect."""
    found = {k: logits[k] > 0 for k in ("objects", "colors")}
    named = {k: truth[k] > 0 for k in found}
    rows = {f"{k}_found": (found[k] & named[k]).sum() / named[k].sum() for k in found}
    rows["objects_exactly"] = (found["objects"] == named["objects"]).all(dim=1).float().mean()
    for key in ("pattern", "count"):
        rows[f"{key}_right"] = (logits[key].argmax(dim=1) == truth[key]).float().mean()
    rows["numbers_right"] = right(logits, truth["centers"].sum(dim=(2, 3)).long()).float().mean()
    return {key: round(value.item(), 4) for key, value in rows.items()}
