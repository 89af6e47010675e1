"""tomesd calibrate: what the machine can do."""

from dataclasses import dataclass
from typing import Literal

from rich.console import Console


@dataclass(frozen=True)
class Calibrate:
    """Show the rates of this machine that decide where merging pays, measured if need be."""

    device: str = "auto"
    """Where the model runs: "auto", "cpu", "cuda", "cuda:1", ..."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Of the model."""
    renew: bool = False
    """Measure again, and keep what is measured now."""

    def run(self, console: Console) -> None:
        import torch

        from ..generation.loading import pick_device, pick_dtype
        from ..machine import cache_file, machine_of

        device = pick_device(self.device)
        dtype = pick_dtype(self.dtype, device)
        machine = machine_of(device, dtype, renew=self.renew)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        lines = {
            "linear layers": f"{machine.operations / 1e12:.3g} Tflop/s",
            "attention": f"{machine.attention / 1e12:.3g} Tflop/s",
            "memory": f"{machine.bytes / 1e9:.3g} GB/s",
            "starting a kernel": f"{machine.launch * 1e6:.3g} us",
        }
        console.print(f"{name}, {str(dtype).removeprefix('torch.')}:")
        for what, rate in lines.items():
            console.print(f"  {what:<18} {rate}")
        console.print(f"kept in {cache_file()}; --renew measures again")
