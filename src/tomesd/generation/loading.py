"""Loads any diffusers pipeline: an embedded model, a folder, a single file, or a hub id."""

import importlib.util
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import torch

from ..choices import DEMO_MODEL, EMBEDDED, Dtype, Offload
from ..hosts import find_models


class LoadError(RuntimeError):
    """A model could not be loaded, or not in the way that was asked for."""


def need(*packages: str, extra: str = "eval") -> None:
    """Raises if a package is missing, before hours of work rather than after."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise LoadError(f"{package} is not installed: pip install 'tomesd[{extra}]'")


def load_pipeline(
    model: str | Path = DEMO_MODEL,
    *,
    config: str | Path | None = None,
    device: str = "auto",
    dtype: Dtype = "auto",
    attention: str = "default",
    compile: bool = False,
    offload: Offload = "none",
) -> Any:
    """A diffusers pipeline, ready to run.

    Args:
        model: "unet" or "transformer" for an embedded model, a folder in diffusers format, a single
            `.safetensors` or `.ckpt` file, or a hub id such as
            "stabilityai/stable-diffusion-xl-base-1.0".
        config: for a single file only: a local folder in diffusers format that says how the model
            is built, and has the tokenizer and the scheduler. Its weights, if any, are not read.
            Without it, diffusers guesses the model and asks the hub.
        device: "auto" takes a GPU if there is one.
        dtype: "auto" is float16 on a GPU and float32 on a CPU.
        attention: "default", "eager", "sdpa", "xformers", or a backend name of diffusers.
        compile: compile the denoising model with `torch.compile`.
        offload: move parts to the GPU only when they run: whole models, or layer by layer.

    Raises:
        LoadError: in one line, what could not be done.
    """
    place = pick_device(device)
    numbers = pick_dtype(dtype, place)
    pipe = _load(str(model), None if config is None else Path(config), numbers)
    pipe.set_progress_bar_config(disable=True)
    if offload == "none":
        pipe.to(place)
    elif place.type == "cpu":
        raise LoadError(f"offload={offload!r} needs a GPU to offload from; the device is the CPU")
    elif offload == "model":
        pipe.enable_model_cpu_offload(device=place)
    else:
        pipe.enable_sequential_cpu_offload(device=place)
    set_attention(pipe, attention)
    if compile:
        denoiser(pipe).compile()
    return pipe


def denoiser(pipe: Any) -> Any:
    """The model that runs at every step."""
    return getattr(pipe, denoiser_name(pipe))


def denoiser_name(pipe: Any) -> str:
    """What the pipeline calls the model that runs at every step."""
    for name in ("unet", "transformer"):
        if getattr(pipe, name, None) is not None:
            return name
    raise LoadError(f"{type(pipe).__name__} has neither a unet nor a transformer")


def preset_traits(pipe: Any) -> dict[str, Any]:
    """What presets depend on, as arguments of `presets.preset`.

    Raises:
        UnsupportedModelError: no tokens can be merged in it.
    """
    return find_models(pipe)[0].preset_traits


def pick_device(device: str) -> torch.device:
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise LoadError(f"device={device!r}: {first_line(error)}") from error
    return place


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]


def quiet_diffusers() -> Any:
    """diffusers, without its and transformers' progress bars and advice."""
    # Which diffusers imports where it is installed: it tells what it does without.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise LoadError(f"{error.name} is not installed: pip install 'tomesd[cli]'") from error
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    return diffusers


def _load(model: str, config: Path | None, dtype: torch.dtype) -> Any:
    diffusers = quiet_diffusers()
    path = Path(model)
    if path.suffix in (".safetensors", ".ckpt") or path.is_file():
        return _load_single_file(path, config, dtype)
    if config is not None:
        raise LoadError(
            f"config={str(config)!r}: only a single .safetensors or .ckpt file takes one, and "
            f"{model} is none"
        )
    if model in EMBEDDED:
        return _load_embedded(model, dtype)
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
            raise LoadError(f"could not load {model}: {first_line(error)}") from error
        raise LoadError(
            f"could not get {model} from the hub: it is not in the local cache, and the hub did "
            f"not answer or does not have it ({type(error).__name__})"
        ) from error


def _load_single_file(path: Path, config: Path | None, dtype: torch.dtype) -> Any:
    """diffusers reads a `.ckpt` with `weights_only=True`: a pickle that holds code is refused."""
    if not path.is_file():
        raise LoadError(f"no such file: {path}")
    configured = None if config is None else _configured_class(config)
    source = {} if config is None else {"config": str(config), "local_files_only": True}
    try:
        pipeline_class = configured or _guessed_class(path)
        pipe = pipeline_class.from_single_file(str(path), torch_dtype=dtype, **source)
    except Exception as error:
        raise LoadError(f"could not load {path}: {_single_file_problem(error)}") from error
    for name, part in pipe.components.items():
        # diffusers leaves layers of the text encoder that the file lacks without values.
        if isinstance(part, torch.nn.Module) and any(p.is_meta for p in part.parameters()):
            raise LoadError(f"could not load {path}: it lacks weights of the {name}")
    return pipe


def _guessed_class(path: Path) -> Any:
    """The pipeline class that the names of the weights speak for."""
    diffusers = quiet_diffusers()
    from diffusers.loaders.single_file_utils import (
        infer_diffusers_model_type,
        load_single_file_checkpoint,
    )

    kind = infer_diffusers_model_type(load_single_file_checkpoint(str(path)))
    name = "StableDiffusionXLPipeline" if "xl" in kind else "StableDiffusionPipeline"
    return getattr(diffusers, name)


def _configured_class(config: Path) -> Any:
    """The pipeline class that a folder in diffusers format names."""
    index = config / "model_index.json"
    if not config.is_dir():
        raise LoadError(f"config={str(config)!r}: no such folder")
    if not index.is_file():
        raise LoadError(f"config={str(config)!r}: not a diffusers pipeline, no model_index.json")
    try:
        name = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"config={str(config)!r}: model_index.json names no pipeline") from error
    found = getattr(quiet_diffusers(), str(name), None)
    if not hasattr(found, "from_single_file"):
        raise LoadError(f"config={str(config)!r}: {name} cannot be loaded from a single file")
    return found


def _single_file_problem(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        # diffusers reports a refused pickle as a file that it cannot find.
        if isinstance(cause, pickle.UnpicklingError):
            return "it holds more than weights, or is damaged; a pickle may only hold weights"
        cause = cause.__cause__ or cause.__context__
    if "meta tensor" in str(error):
        return "it lacks weights that the configuration asks for"
    if type(error).__module__.startswith("huggingface_hub"):
        return "the hub did not answer; give a local folder as config to do without it"
    return first_line(error)


def _load_embedded(name: str, dtype: torch.dtype) -> Any:
    diffusers = quiet_diffusers()
    try:
        import tomesd_demo_model
    except ImportError as error:
        raise LoadError(
            "the embedded models are not installed: pip install ./demo_model, or name another model"
        ) from error
    if name == "transformer":
        from tomesd_demo_model.flux import load_transformer  # type: ignore[import-untyped]

        pipe = load_transformer(dtype)
    else:
        folder = tomesd_demo_model.path("unet")
        pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder, torch_dtype=dtype)
    pipe.own_guidance = EMBEDDED[name]  # the default of their classes is for other models
    return pipe


def set_attention(pipe: Any, attention: str) -> None:
    model = denoiser(pipe)
    if denoiser_name(pipe) == "transformer":  # whose attention layers have processors of their own
        attention = {"eager": "_native_math", "sdpa": "native"}.get(attention, attention)
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
        raise LoadError(f"attention={attention!r}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
