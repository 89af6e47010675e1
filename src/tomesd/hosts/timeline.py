"""The timeline of a model's timesteps, as its scheduler defines it."""

import functools
from typing import Any

import torch
from torch import Tensor

from ..schedule import Shift, Timeline
from .names import class_names

_OTHER_TIMES = {
    *("DDIMInverseScheduler", "DPMSolverMultistepInverseScheduler", "IPNDMScheduler"),
    *("KarrasVeScheduler", "ScoreSdeVeScheduler"),
}
"""Schedulers of diffusers whose timesteps rise, or are no count."""


def find_timeline(model: Any) -> Timeline:
    """The timeline of a pipeline, an ldm model, or a wrapper around one; the default if unknown."""
    scheduler = getattr(model, "scheduler", None)  # a diffusers pipeline
    config = getattr(scheduler, "config", None)
    if config is not None:
        counts = config.get("timestep_type") != "continuous" and "sigma_data" not in config
        counts &= _OTHER_TIMES.isdisjoint(class_names(scheduler))
        noise = config.get("num_train_timesteps", 1000) - 1.0 if counts else None
        shares = _shares(getattr(scheduler, "alphas_cumprod", None))
        prediction = config.get("prediction_type", "")
        return Timeline(noise, shares=shares, prediction=prediction, shift=_shift(config))
    for owner in (model, getattr(model, "model", None)):
        shares = _shares(getattr(owner, "alphas_cumprod", None))  # ldm
        sampling = getattr(owner, "model_sampling", None)  # ComfyUI
        if sampling is not None and "CONST" in class_names(sampling):
            middle = sampling.percent_to_sigma(0.5)
            shift = Shift(middle / (1 - middle))
            return Timeline(float(sampling.timestep(torch.tensor(1.0))), flow=True, shift=shift)
        sigmas = getattr(sampling, "sigmas", None)
        if shares is None and isinstance(sigmas, Tensor):
            variance = sigmas.double() ** 2
            shares = tuple((variance / (1 + variance)).tolist())
        if shares is not None:
            return Timeline(len(shares) - 1.0, shares=shares)
    return Timeline()


def _shift(config: Any) -> Shift:
    """The shift of a flow scheduler."""
    if config.get("use_dynamic_shifting") and "base_shift" in config:
        few, many = config["base_image_seq_len"], config["max_image_seq_len"]
        low, high = config["base_shift"], config["max_shift"]
        return Shift(growth=functools.partial(_evenly, few, many, low, high))
    factor = config.get("shift", config.get("flow_shift"))
    return Shift() if factor is None else Shift(float(factor))


def _evenly(few: int, many: int, low: float, high: float, tokens: int) -> float:
    """log s, if it grows evenly from `low` at `few` tokens to `high` at `many`."""
    return low + (high - low) * (tokens - few) / (many - few)


def _shares(kept: Any) -> tuple[float, ...] | None:
    """The noise's share of the variance at each timestep, from that of the image, `[T]`."""
    if not isinstance(kept, Tensor):
        return None
    return tuple((1 - kept.double()).tolist())
