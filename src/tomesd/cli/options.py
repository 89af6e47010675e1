"""Options that several commands share."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..generation.loading import DEMO_MODEL, Dtype, Offload, load_pipeline
from ..settings import Settings

__all__ = ["MergeOptions", "ModelOptions"]


@dataclass(frozen=True)
class MergeOptions(Settings):
    """How tokens are merged."""

    def __post_init__(self) -> None:
        """Checks nothing: while the command line is parsed, an error would come out garbled."""

    def checked(self) -> Settings:
        return Settings(**asdict(self))


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it runs."""

    model: str = DEMO_MODEL
    """`demo` for the embedded model, a folder in diffusers format, a single .safetensors or .ckpt
    file, or a hub id."""

    config: Path | None = None
    """For a single file: a local folder in diffusers format to take the configuration, the
    tokenizer and the scheduler from. Without it, diffusers asks the hub."""

    device: str = "auto"
    """Where to run: auto, cpu, cuda, cuda:1, mps."""

    dtype: Dtype = "auto"
    """Precision. auto: float16 on a GPU, float32 on a CPU."""

    attention: str = "default"
    """default, eager, sdpa, xformers, or an attention backend of diffusers by name."""

    compile: bool = False
    """Compile the model with torch.compile: a slow first image, then faster ones."""

    offload: Offload = "none"
    """Keep in GPU memory only what runs: whole models, or layer by layer."""

    def load(self) -> Any:
        return load_pipeline(
            self.model,
            config=self.config,
            device=self.device,
            dtype=self.dtype,
            attention=self.attention,
            compile=self.compile,
            offload=self.offload,
        )
