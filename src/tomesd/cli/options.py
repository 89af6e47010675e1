"""Options that several commands share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from .. import presets
from ..generation.loading import DEMO_MODEL, Dtype, Offload, load_pipeline
from ..settings import Protect, Schedule, Settings

__all__ = ["MergeOptions", "ModelOptions", "types"]


@dataclass(frozen=True)
class MergeOptions(Settings):
    """How tokens are merged."""

    settings: Path | None = None
    """A settings file to begin with, as tomesd tune writes it. Other options that are given here
    win over what it says."""

    preset: presets.Preset | None = None
    """Or settings by name to begin with."""

    def __post_init__(self) -> None:
        """Checks nothing: while the command line is parsed, an error would come out garbled."""

    def checked(self) -> Settings:
        return Settings(**{**self.base(), **self.given()})

    def given(self) -> dict[str, Any]:
        """What the command line says, as far as it is not the default."""
        return presets.changed(self)

    def base(self) -> dict[str, Any]:
        """What the settings file or the preset says."""
        if self.settings is not None and self.preset is not None:
            raise ValueError("give either --settings or --preset")
        if self.settings is not None:
            return presets.load(self.settings)
        return {} if self.preset is None else presets.preset(self.preset)


types = ConstructorRegistry()
"""How types are given on the command line that can be functions and tensors in Python."""


@types.primitive_rule
def _schedule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    return (
        _words("linear|cosine|RATIO [RATIO ...]", _word_or_ratios)
        if info.type == Schedule
        else None
    )


@types.primitive_rule
def _protect(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    return _words("guidance", " ".join) if info.type == Protect else None


def _words(metavar: str, read: Callable[[list[str]], Any]) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=metavar,
        instance_from_str=lambda words: None if words == ["None"] else read(words),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _word_or_ratios(words: list[str]) -> str | list[float]:
    try:
        return [float(word) for word in words]
    except ValueError:
        return " ".join(words)


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
