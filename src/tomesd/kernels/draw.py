"""Random draws without a generator: an integer hash of what identifies the draw.

A draw that depends on nothing but (seed, timestep, level, cell) is the same for the conditional and
the unconditional half, for any batch size, on every device, and when gradient checkpointing runs a
block a second time. It leaves no state to reset and traces into a compiled graph.
"""

import torch
from torch import Tensor

__all__ = ["MASK", "MULTIPLIERS", "draw_key", "draw_offsets"]

MASK = 0x7FFFFFFF  # 31 bits: with a 27-bit multiplier no product overflows int64
MULTIPLIERS = (0x45D9F3B, 0x2C1B3C6D >> 4, 0x297A2D39 >> 4)


def _mix(x: Tensor | int) -> Tensor | int:
    """Scrambles 31 bits; neighbouring inputs give unrelated outputs."""
    for multiplier in MULTIPLIERS:
        x = ((x ^ (x >> 15)) * multiplier) & MASK
    return x ^ (x >> 16)


def draw_key(seed: int, level: int) -> int:
    """What the draws of one level of one run have in common, 31 bits."""
    return int(_mix((seed & MASK) ^ _mix((seed >> 31 & MASK) ^ _mix(int(level)))))


def draw_offsets(cells: int, choices: int, key: int, timestep: Tensor) -> Tensor:
    """One uniform draw from `range(choices)` per cell.

    Args:
        key: from `draw_key`.
        timestep: `[T]`, any dtype; one draw is made for each.

    Returns:
        `[T, cells]`, int64.
    """
    # The bits of the float tell apart fractional timesteps and sigmas; 500 and 500.0 are the same.
    bits = timestep.to(torch.float32).view(torch.int32).to(torch.int64) & MASK
    mixed = _mix(bits ^ key)
    cell = torch.arange(cells, device=timestep.device)
    return _mix(mixed[:, None] ^ _mix(cell)) % choices  # type: ignore[index, return-value]
