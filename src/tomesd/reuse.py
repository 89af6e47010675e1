"""What regions gave at the last step that ran them, kept for the steps that do not."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .state import Call


def use_or_keep(call: Call, name: str, x: Tensor, y: Tensor) -> Tensor:
    """The output of a region that adds to its tokens, at a step that runs it or reuses it.

    Args:
        name: of the region, the same at every step.
        x: what goes in, `[B, N, C]`.
        y: what comes out, the same shape; at a step that reuses it, of no account.
    """
    last = LastResult(call, name)
    if call.reuses:
        return x + last.read(x.shape, x)
    last.write(y - x)
    return y


@dataclass(frozen=True)
class LastResult:
    """A tensor that some steps compute and the steps between them use again."""

    call: Call
    name: str
    """The same at every step."""

    def write(self, value: Tensor) -> None:
        """Keeps what this step computed."""
        kept, slope, last = self._tensors(value.shape, value)
        assert self.call.moment is not None
        if slope is not None and last is not None:
            if self.call.moment.first:
                slope.zero_()
            else:
                slope.copy_((value - kept) / (last - self._now()).to(value.dtype))
            last.copy_(self._now())
        kept.copy_(value)

    def read(self, shape: torch.Size, like: Tensor) -> Tensor:
        """What was kept, or where that leads to by now.

        Args:
            like: has the dtype and the device.
        """
        kept, slope, last = self._tensors(shape, like)
        if slope is None or last is None:
            return kept
        return kept + slope * (last - self._now()).to(kept.dtype)

    def _now(self) -> Tensor:
        assert self.call.timestep is not None
        return self.call.timestep.float().mean()

    def _tensors(
        self, shape: torch.Size, like: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The value; and with extrapolation, its change per unit of time, and its time `[]`."""
        assert self.call.moment is not None
        name = f"reuse_{self.name}_{self.call.moment.nth}"
        tensor = self.call.patch.kept.tensor
        value = tensor(name, tuple(shape), like.dtype, like.device)
        if not self.call.settings.extrapolate:
            return value, None, None
        slope = tensor(f"{name}_slope", tuple(shape), like.dtype, like.device)
        return value, slope, tensor(f"{name}_time", (), torch.float32, like.device)
