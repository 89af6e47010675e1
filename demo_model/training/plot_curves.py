"""Draw the training curves: `python plot_curves.py results`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    folder = Path(sys.argv[1])
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    auto = rows(folder / "autoencoder.jsonl")
    for side in sorted({row["side"] for row in auto}):
        part = [row for row in auto if row["side"] == side]
        label = f"{side} px"
        left.plot([r["seconds"] for r in part], [r["psnr"] for r in part], ".-", label=label)
    left.set(title="autoencoder", xlabel="seconds", ylabel="PSNR of the batch (dB)")
    left.legend()
    diffusion = rows(folder / "diffusion.jsonl")
    for side in sorted({row["side"] for row in diffusion}):
        part = [row for row in diffusion if row["side"] == side]
        label = f"{side} x {side} latents"
        right.plot([r["step"] for r in part], [r["loss"] for r in part], ".", label=label)
    right.set(title="diffusion", xlabel="step", ylabel="loss (v, mean squared error)")
    right.legend()
    figure.savefig(folder / "curves.png", dpi=110)


if __name__ == "__main__":
    main()
