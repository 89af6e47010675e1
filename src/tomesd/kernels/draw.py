"""Random draws without a generator: an integer hash of what identifies the draw.

A draw that depends on nothing but (seed, timestep, level, cell) is the same for the conditional and
the unconditional half, for any batch size, on every device, and when gradient checkpointing runs a
block a second time. It leaves no state to reset and traces into a compiled graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .cells import Cells

MASK = 0x7FFFFFFF  # 31 bits: with a 27-bit multiplier no product overflows int64
MULTIPLIERS = (0x45D9F3B, 0x2C1B3C6D >> 4, 0x297A2D39 >> 4)


@dataclass(frozen=True)
class Draw:
    """Which token of each cell is its destination."""

    timestep: Tensor | None = None
    """`[]` or `[T]`: one for all items of the batch, or for as many as there are batch / T."""
    key: int = -1
    """From `draw_key`. Negative: nothing is drawn, and the destinations are the top left tokens."""

    def offsets(self, cells: Cells, batch: int, device: torch.device) -> Tensor:
        """The destination of each cell, counted row by row in it, `[1 or batch, cells.count]`."""
        if self.key < 0:
            return torch.zeros(1, cells.count, dtype=torch.int64, device=device)
        timestep = torch.zeros(1, device=device) if self.timestep is None else self.timestep
        drawn = draw_offsets(cells.count, cells.choices, self.key, timestep.reshape(-1))
        images = drawn.shape[0]
        if batch % images:
            return drawn[:1]  # a part of a batch: in sampling, all have the same timestep
        # One timestep per image; a video model folds its frames into the batch.
        return drawn.repeat_interleave(batch // images, dim=0) if images > 1 else drawn


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
