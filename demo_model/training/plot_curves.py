"""Draw the training curves: `python plot_curves.py results`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(axes: Axes, log: list[dict]) -> None:
    """Loss against steps, one colour for each size."""
    for side in sorted({row["side"] for row in log}):
        part = [row for row in log if row["side"] == side]
        label = f"{side} x {side} latents"
        axes.plot([r["step"] for r in part], [r["loss"] for r in part], ".", label=label)
    axes.set_xlabel("step")
    axes.legend()


def counting(axes: Axes, log: list[dict]) -> None:
    """Share of pictures with the right objects against steps; larger marks are held out."""
    for side in sorted({row["side"] for row in log}):
        drawn = [row for row in log if row["side"] == side and "right" in row]
        label = f"{side} x {side} latents"
        [dots] = axes.plot(
            [r["step"] for r in drawn], [r["right"] for r in drawn], ".", label=label
        )
        step, held_out = 0, []
        for row in log:
            step = row.get("step", step)
            if row["side"] == side and "held_out" in row:
                held_out.append((step, row["held_out"]))
        axes.plot(*zip(*held_out, strict=True), "D-", color=dots.get_color(), label="held out")
    axes.set(title="learning to count", xlabel="step", ylabel="share of pictures that are right")
    axes.legend()


def main() -> None:
    folder = Path(sys.argv[1])
    figure, axes = plt.subplots(1, 4, figsize=(18, 3.6), layout="constrained")
    left, middle, right, last = axes
    auto = rows(folder / "autoencoder.jsonl")
    for side in sorted({row["side"] for row in auto}):
        part = [row for row in auto if row["side"] == side]
        label = f"{side} px"
        left.plot([r["seconds"] for r in part], [r["psnr"] for r in part], ".-", label=label)
    left.set(title="autoencoder", xlabel="seconds", ylabel="PSNR of the batch (dB)")
    left.legend()
    losses(middle, rows(folder / "diffusion.jsonl"))
    middle.set(title="UNet", ylabel="loss (v, mean squared error)")
    losses(right, rows(folder / "transformer.jsonl"))
    right.set(title="transformer", ylabel="loss (flow, mean squared error)", ylim=(0, 0.6))
    counting(last, rows(folder / "numbers.jsonl"))
    figure.savefig(folder / "curves.png", dpi=110)


if __name__ == "__main__":
    main()
