"""What regions gave at the last step that ran them, kept for the steps that do not."""

import torch
from torch import Tensor

from .state import Call


def use_or_keep(call: Call, name: str, x: Tensor, y: Tensor) -> Tensor:
    """The output of a region that adds to its tokens, at a step that runs it or reuses it.

    Args:
        name: of the region, the same at every step.
        x: what goes in, `[B, N, C]`.
        y: what comes out, the same shape; ignored at a step that reuses it.
    """
    if call.reuses:
        return x + recall(call, name, x.shape, x)
    keep(call, name, (y - x).to(x.dtype))  # under autocast, some blocks return another one
    return y


def keep(call: Call, name: str, result: Tensor) -> None:
    """Keeps what this step computed, under a name that is the same at every step."""
    kept, slope, time = _tensors(call, name, result.shape, result)
    assert call.moment is not None
    if slope is not None and time is not None:
        now = _now(call, result.device)
        if call.moment.first:
            slope.zero_()
        else:
            slope.copy_((result - kept) / (time - now).to(result.dtype))
        time.copy_(now)
    kept.copy_(result)


def recall(call: Call, name: str, shape: torch.Size, like: Tensor) -> Tensor:
    """What was kept, or where that leads to by now.

    Args:
        like: has the dtype and the device.
    """
    kept, slope, time = _tensors(call, name, shape, like)
    if slope is None or time is None:
        return kept
    return kept + slope * (time - _now(call, kept.device)).to(kept.dtype)


def _now(call: Call, device: torch.device) -> Tensor:
    assert call.timestep is not None
    return call.timestep.float().mean().to(device)


def _tensors(
    call: Call, name: str, shape: torch.Size, like: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The result; and with extrapolation, its change per unit of time, and its time `[]`."""
    assert call.moment is not None
    name, tensor = f"reuse_{name}_{call.moment.nth}", call.patch.kept.tensor
    result = tensor(name, shape, like.dtype, like.device)
    if not call.settings.extrapolate:
        return result, None, None
    slope = tensor(f"{name}_slope", shape, like.dtype, like.device)
    return result, slope, tensor(f"{name}_time", (), torch.float32, like.device)
