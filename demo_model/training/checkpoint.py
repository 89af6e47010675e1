"""Save a run so that the same command goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from models import save_tensors
from optimizer import MovingAverage, Optimizers


def save(
    folder: Path,
    model: nn.Module,
    average: MovingAverage,
    optimizers: Optimizers,
    counters: dict[str, float],
) -> None:
    """Weights and their average as safetensors; the optimizers' state never leaves the run."""
    save_tensors(dict(model.named_parameters()), folder / "weights.safetensors")
    save_tensors(average.weights, folder / "average.safetensors")
    torch.save({"optimizers": optimizers.state_dict(), "counters": counters}, folder / "state.part")
    (folder / "state.part").rename(folder / "state.pt")


def load(
    folder: Path, model: nn.Module, average: MovingAverage, optimizers: Optimizers
) -> dict[str, float] | None:
    """Restore what `save` wrote and return its counters, or None if there is nothing."""
    if not (folder / "state.pt").exists():
        return None
    model.load_state_dict(load_file(folder / "weights.safetensors"), strict=False)
    for name, tensor in load_file(folder / "average.safetensors").items():
        average.weights[name].copy_(tensor)
    state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    optimizers.load_state_dict(state["optimizers"])
    return state["counters"]
