"""Loads any diffusers pipeline: the embedded model, a folder, a single file, or a hub id."""

from pathlib import Path
from typing import Any, Literal

import torch

__all__ = ["DEMO_MODEL", "Attention", "Dtype", "LoadError", "Offload", "load_pipeline"]

DEMO_MODEL = "demo"
"""Name of the embedded model."""

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Offload = Literal["none", "model", "sequential"]
Attention = str


class LoadError(RuntimeError):
    """A model could not be loaded, or not in the way that was asked for."""


def load_pipeline(
    model: str | Path = DEMO_MODEL,
    *,
    device: str = "auto",
    dtype: Dtype = "auto",
    attention: Attention = "default",
    compile: bool = False,
    offload: Offload = "none",
) -> Any:
    """A diffusers pipeline, ready to run.

    Args:
        model: "demo" for the embedded model, a folder in diffusers format, a single `.safetensors`
            or `.ckpt` file, or a hub id such as "stabilityai/stable-diffusion-xl-base-1.0".
        device: "auto" takes a GPU if there is one.
        dtype: "auto" is float16 on a GPU and float32 on a CPU.
        attention: "default", "eager", "sdpa", "xformers", or a backend name of diffusers.
        compile: compile the denoising model with `torch.compile`.
        offload: move parts to the GPU only when they run: whole models, or layer by layer.

    Raises:
        LoadError: in one line, what could not be done.
    """
    place = _device(device)
    numbers = _dtype(dtype, place)
    pipe = _load(str(model), numbers)
    pipe.set_progress_bar_config(disable=True)
    if offload == "none":
        pipe.to(place)
    elif place.type == "cpu":
        raise LoadError(f"offload={offload!r} needs a GPU to offload from; the device is the CPU")
    elif offload == "model":
        pipe.enable_model_cpu_offload(device=place)
    else:
        pipe.enable_sequential_cpu_offload(device=place)
    _set_attention(pipe, attention)
    if compile:
        denoiser(pipe).compile()
    return pipe


def denoiser(pipe: Any) -> Any:
    """The model that runs at every step."""
    for name in ("unet", "transformer"):
        if getattr(pipe, name, None) is not None:
            return getattr(pipe, name)
    raise LoadError(f"{type(pipe).__name__} has neither a unet nor a transformer")


def _device(device: str) -> torch.device:
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise LoadError(f"device={device!r}: {_first_line(error)}") from error
    return place


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]


def _quiet_diffusers() -> Any:
    """diffusers, without its and transformers' progress bars and advice."""
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise LoadError(f"{error.name} is not installed: pip install 'tomesd[cli]'") from error
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    return diffusers


def _load(model: str, dtype: torch.dtype) -> Any:
    diffusers = _quiet_diffusers()
    path = _demo_path() if model == DEMO_MODEL else Path(model)
    if path.suffix in (".safetensors", ".ckpt") or path.is_file():
        return _load_single_file(path, dtype)
    local = path.is_dir()
    if local and not (path / "model_index.json").is_file():
        raise LoadError(f"{path} is not a diffusers pipeline: it has no model_index.json")
    if not local and (model.count("/") != 1 or model.startswith(("/", "."))):
        raise LoadError(f"no such model: {model} is neither a folder, a file nor a hub id")
    try:
        return diffusers.DiffusionPipeline.from_pretrained(
            path if local else model, torch_dtype=dtype, local_files_only=local
        )
    except Exception as error:
        if local:
            raise LoadError(f"could not load {model}: {_first_line(error)}") from error
        raise LoadError(
            f"could not get {model} from the hub: it is not in the local cache, and the hub did "
            f"not answer or does not have it ({type(error).__name__})"
        ) from error


def _load_single_file(path: Path, dtype: torch.dtype) -> Any:
    diffusers = _quiet_diffusers()
    from diffusers.loaders.single_file_utils import (
        infer_diffusers_model_type,
        load_single_file_checkpoint,
    )

    if not path.is_file():
        raise LoadError(f"no such file: {path}")
    try:
        kind = infer_diffusers_model_type(load_single_file_checkpoint(str(path)))
        name = "StableDiffusionXLPipeline" if "xl" in kind else "StableDiffusionPipeline"
        return getattr(diffusers, name).from_single_file(str(path), torch_dtype=dtype)
    except Exception as error:
        raise LoadError(f"could not load {path}: {_first_line(error)}") from error


def _demo_path() -> Path:
    try:
        import tomesd_demo_model
    except ImportError as error:
        raise LoadError(
            "the embedded model is not installed: pip install ./demo_model, or name another model"
        ) from error
    return Path(tomesd_demo_model.path())


def _set_attention(pipe: Any, attention: str) -> None:
    model = denoiser(pipe)
    try:
        if attention in ("eager", "sdpa"):
            from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

            processor = AttnProcessor if attention == "eager" else AttnProcessor2_0
            model.set_attn_processor(processor())
        elif attention == "xformers":
            model.enable_xformers_memory_efficient_attention()
        elif attention != "default":
            model.set_attention_backend(attention)
    except Exception as error:
        raise LoadError(f"attention={attention!r}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
