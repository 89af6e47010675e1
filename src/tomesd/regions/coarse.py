"""A call of a transformer on a coarser image: what of its arguments changes, and what it gives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..coarse import SIDE, FlowStep, VarianceStep, flow_level, pack, unpack, variance_share
from ..layout import Layout
from ..schedule import Timeline
from ..state import Grid
from .given import Given


@dataclass(frozen=True)
class Coarse:
    """How a model of a rectified flow is given a coarser image.

    The latent is the model's first parameter: `[B, C, H, W]`, `[B, C, F, H, W]`, or a list of
    items. The model gives back as much.
    """

    side: int = 0
    """Where the model gets tokens `[B, N, C * side * side]`: side of the square that is one."""
    places: str = ""
    """The parameter with the places of tokens, `[..., N, axes]`."""
    grids: str = ""
    """The parameter with grids: tuples of frames, rows and columns, in lists."""
    numbers: tuple[str, ...] = ()
    """Parameters with the number of rows, and of columns."""
    mask: str = ""
    """A parameter `[B, T + N]`."""
    full: tuple[str, ...] = ()
    """Parameters that only go with the whole image. Calls with one of them are not made coarse."""

    def obstacle(self, module: Any, given: Given, layout: Layout, time: str) -> str:
        """Why a call cannot be made coarse; empty if it can."""
        latent, config = given[given.names[0]], module.config
        for name in self.full:
            if given[name] is not None:
                return f"{name} is given"
        if isinstance(given[time], Tensor) and given[time].ndim > 1:
            return "tokens have times of their own"
        if isinstance(latent, list) and not all(isinstance(item, Tensor) for item in latent):
            return "reference images are given"
        if not isinstance(latent, list) and len(layout.parts) > 1:
            return "reference images or frames are given"
        made = config.get("out_channels") or config["in_channels"]
        if self.side:
            found, made = latent.shape[-1], made * (config.get("patch_size") or 1) ** 2
        else:
            found = latent[0].shape[0] if isinstance(latent, list) else latent.shape[1]
        if found != made:
            return f"the latent has {found} channels, of which {made} are made"
        sides = tuple(zip(layout.size, layout.grid[1:], strict=True))
        if any(cells % SIDE or length % cells for length, cells in sides):
            return "{}x{} tokens cannot be halved".format(*layout.grid[1:])
        return ""

    def run(
        self, given: Given, layout: Layout, timeline: Timeline, time: str, model: Callable[..., Any]
    ) -> Any:
        """Calls the model on a coarser image, and gives what it would have given for the whole one.

        Args:
            time: the parameter that takes the timestep.
        """
        name, timestep, (frames, h, w) = given.names[0], given[time], layout.grid
        grid = (frames, h // SIDE, w // SIDE)
        levels = timeline.level(torch.as_tensor(timestep).float())
        latents = self._latents(given[name], layout.grid)
        steps = [*map(FlowStep, latents, _beside(levels, given[name], latents))]
        changes = self._smaller(given, layout.grid)
        changes[name] = self._argument([step.small for step in steps], given[name])
        changes[time] = _like(timestep, timeline.time(flow_level(levels)))
        given = given.replaced(changes)
        output = model(*given.args, **given.kwargs)

        sample = _sample(output)
        # Models whose times rise predict the image less the noise.
        sign = -1 if timeline.rises else 1
        small = self._latents(sample, grid)
        whole = [sign * step.velocity(sign * v) for step, v in zip(steps, small, strict=True)]
        return _with_sample(output, self._argument(whole, sample))

    def _latents(self, value: Any, grid: Grid) -> list[Tensor]:
        """Latents `[..., H, W]`: of the batch at once, or one for each of a list."""
        if isinstance(value, list):
            return value
        return [unpack(value, grid, self.side) if self.side else value]

    def _argument(self, latents: list[Tensor], like: Any) -> Any:
        """Latents as the model gets or gives them."""
        if isinstance(like, list):
            return [latent.to(other.dtype) for latent, other in zip(latents, like, strict=True)]
        return (pack(latents[0], self.side) if self.side else latents[0]).to(like.dtype)

    def _smaller(self, given: Given, grid: Grid) -> dict[str, Any]:
        """What says which tokens there are, for the coarse ones."""
        _, h, w = grid
        found: dict[str, Any] = {name: given[name] // SIDE for name in self.numbers}
        if self.grids:
            found[self.grids] = _halved(given[self.grids])
        if self.places:  # in the middle of the tokens that each one stands for
            places = given[self.places].float().unflatten(-2, (h // SIDE, SIDE, w // SIDE, SIDE))
            found[self.places] = places.mean(dim=(-4, -2)).flatten(-3, -2)
        if self.mask and (mask := given[self.mask]) is not None:
            text, image = mask[:, : -h * w], mask[:, -h * w :].unflatten(1, (h, w))
            found[self.mask] = torch.cat([text, image[:, ::SIDE, ::SIDE].flatten(1)], dim=1)
        return found


# Arguments of UNets that only go with the whole image.
_FULL = (
    "down_block_additional_residuals",
    "mid_block_additional_residual",
    "down_intrablock_additional_residuals",
)


def unet_obstacle(module: Any, given: Given) -> str:
    """Why a call of a UNet of diffusers cannot be made coarse; empty if it can."""
    latent, made = given[given.names[0]], module.config["out_channels"]
    for name in _FULL:
        if given[name] is not None:
            return f"{name} is given"
    if latent.shape[1] != made:
        return f"the latent has {latent.shape[1]} channels, of which {made} are made"
    if any(length % SIDE for length in latent.shape[-2:]):
        return "{}x{} pixels cannot be halved".format(*latent.shape[-2:])
    return ""


def coarse_unet(given: Given, timeline: Timeline, time: str, model: Callable[..., Any]) -> Any:
    """Calls a UNet on a coarser image, and gives what it would have given for the whole one."""
    latent, timestep = given[given.names[0]], given[time]
    times = torch.as_tensor(timestep, device=latent.device).float()
    share = timeline.share(times)
    (beside,) = _beside(share, latent, [latent])
    step = VarianceStep(latent, beside, timeline.prediction == "epsilon")
    small = {
        given.names[0]: step.small.to(latent.dtype),
        time: _like(timestep, timeline.time_of_share(variance_share(share))),
    }
    given = given.replaced(small)
    output = model(*given.args, **given.kwargs)
    sample = _sample(output)
    return _with_sample(output, step.prediction(sample).to(sample.dtype))


def _sample(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output.sample


def _with_sample(output: Any, sample: Any) -> Any:
    if isinstance(output, tuple):
        return (sample, *output[1:])
    return replace(output, sample=sample)


def _beside(levels: Tensor, value: Any, latents: list[Tensor]) -> list[Tensor]:
    """Noise levels `[]`, `[1]` or `[B]` in shapes that go with the latents."""
    levels = levels.to(latents[0].device)
    if isinstance(value, list):
        return [*levels.expand(len(latents))]
    return [levels.reshape(-1, *[1] * (latents[0].ndim - 1))]


def _like(timestep: Any, value: Tensor) -> Any:
    """A time of the kind that was given. Whole numbers would be too coarse, and become floats."""
    if not isinstance(timestep, Tensor):
        return float(value)
    return value.to(timestep.dtype) if timestep.is_floating_point() else value


def _halved(grids: Any) -> Any:
    """Grids, however deep they are in lists, with half the rows and columns."""
    if isinstance(grids[0], int):
        frames, h, w = grids
        return (frames, h // SIDE, w // SIDE)
    return [_halved(inner) for inner in grids]
