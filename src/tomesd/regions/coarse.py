"""Running a model on a coarser latent: how its arguments shrink and its prediction is enlarged.

Noise differs from pixel to pixel, while neighbouring pixels of an image hardly differ. So the mean
of 2 x 2 pixels of a noisy latent is a latent of half the height and width with half the noise. At
high noise levels it tells the model nearly as much as the whole latent does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import Layout
from ..schedule import Timeline
from ..state import Grid
from .role import Given

SIDE = 2
"""Side of the squares of latent pixels that are averaged into one."""


@dataclass(eq=False)
class Step:
    """A step at the latent `a image + s noise`, where a + s = 1 for rectified flows, and
    a^2 + s^2 = 1 for other models."""

    latent: Tensor
    """`[..., H, W]`."""
    a: Tensor
    s: Tensor
    """Coefficients of image and noise; both broadcast against the latent."""
    predicts: str
    """What the model predicts: "flow", `noise - image`; "epsilon", the noise; or "v_prediction",
    `a noise - s image`."""

    def __post_init__(self) -> None:
        s = self.s / SIDE
        # Dividing the mean, `a image + s/SIDE noise`, by this restores the constraint on a and s.
        self._norm = self.a + s if self.predicts == "flow" else (self.a**2 + s**2).sqrt()
        self.small_s = s / self._norm

    @property
    def small(self) -> Tensor:
        """The latent at half the height and width, float32, at noise level `small_s`."""
        return average(self.latent) / self._norm

    def prediction(self, small: Tensor) -> Tensor:
        """The prediction for the latent, `[..., H, W]`, from the one for the small latent."""
        s, small = self.small_s, small.float()
        if self.predicts == "flow":
            return (self.latent.float() - enlarge(self.small - s * small)) / self.s
        a = self.a / self._norm
        if self.predicts == "epsilon":
            image = enlarge((self.small - s * small) / a)
        else:
            image = enlarge(a * self.small - s * small)
        noise = (self.latent.float() - self.a * image) / self.s
        return noise if self.predicts == "epsilon" else self.a * noise - self.s * image


def average(latent: Tensor) -> Tensor:
    """Means of squares of pixels, `[..., H, W]` to `[..., H / 2, W / 2]`, in float32.

    Video frames are never averaged with each other: not only their noise differs.
    """
    *more, h, w = latent.shape
    squares = latent.float().reshape(*more, h // SIDE, SIDE, w // SIDE, SIDE)
    return squares.mean(dim=(-3, -1))


def enlarge(latent: Tensor) -> Tensor:
    """Doubles height and width, `[..., H, W]`, by bilinear interpolation."""
    *more, h, w = latent.shape
    flat = F.interpolate(latent.reshape(1, -1, h, w), scale_factor=SIDE, mode="bilinear")
    return flat.reshape(*more, SIDE * h, SIDE * w)


def halved(count: int) -> int:
    """Rows or columns of coarse tokens. Of an odd number, the last one stands for a single one."""
    return -(-count // SIDE)


def fitted(latent: Tensor, h: int, w: int) -> Tensor:
    """The latent with its last row and column repeated until it is `[..., h, w]`.

    A copy of the last row of means has as little noise as they have. Means of a copy would not.
    """
    for axis, side in ((-2, h), (-1, w)):
        last = latent.shape[axis] - 1
        if side - 1 > last:
            places = torch.arange(side, device=latent.device).clamp(max=last)
            latent = latent.index_select(axis, places)
    return latent


def unpack(tokens: Tensor, grid: tuple[int, int, int], side: int) -> Tensor:
    """Tokens `[B, F * h * w, C * side * side]` as a latent `[B, C, F, h * side, w * side]`."""
    frames, h, w = grid
    patches = tokens.reshape(tokens.shape[0], frames, h, w, -1, side, side)
    return patches.permute(0, 4, 1, 2, 5, 3, 6).reshape(
        tokens.shape[0], -1, frames, h * side, w * side
    )


def pack(latent: Tensor, side: int) -> Tensor:
    """Undoes `unpack`."""
    batch, channels, frames, h, w = latent.shape
    patches = latent.reshape(batch, channels, frames, h // side, side, w // side, side)
    return patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)


@dataclass(frozen=True)
class Coarse:
    """How to run a rectified-flow model on a coarser latent.

    The latent is the model's first parameter: `[B, C, H, W]`, `[B, C, F, H, W]`, or a list of
    batch items. The model's output has the same form.
    """

    side: int = 0
    """If the model is given packed tokens, `[B, N, C * side * side]`: the side of the square of
    latent pixels in a token; otherwise 0."""
    places: str = ""
    """The parameter with the tokens' positions, `[..., N, axes]`."""
    grids: str = ""
    """The parameter with grids: (frames, rows, columns), in nested lists."""
    numbers: tuple[str, ...] = ()
    """Parameters with the numbers of rows and columns of tokens."""
    mask: str = ""
    """The parameter with a mask over text and image, `[B, T + N]`."""
    full: tuple[str, ...] = ()
    """Parameters that only fit the full size. Calls that pass one of them are not made coarse."""

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
        for pixels, cells in zip(layout.size, layout.grid[1:], strict=True):
            if pixels % cells or pixels % SIDE:
                return "{}x{} tokens cannot be halved".format(*layout.grid[1:])
        return ""

    def run(
        self, given: Given, layout: Layout, timeline: Timeline, time: str, model: Callable[..., Any]
    ) -> Any:
        """Calls the model on a coarser latent, and returns a prediction for the whole one.

        Args:
            time: the parameter that takes the timestep.
        """
        name, timestep, (frames, h, w) = given.names[0], given[time], layout.grid
        coarse = (frames, halved(h), halved(w))
        high, wide = layout.size
        size = halved(h) * (high // h), halved(w) * (wide // w)
        levels = timeline.level(torch.as_tensor(timestep).float())
        latents = self._latents(given[name], layout.grid)
        noise = _broadcast(levels, given[name], latents)
        steps = [Step(x, 1 - s, s, "flow") for x, s in zip(latents, noise, strict=True)]
        changes = self._smaller(given, layout.grid)
        changes[name] = self._argument([fitted(step.small, *size) for step in steps], given[name])
        small_levels = Step(latents[0], 1 - levels, levels, "flow").small_s
        changes[time] = _like(timestep, timeline.time(small_levels))
        # Models whose timesteps rise predict image - noise.
        sign = -1 if timeline.rises else 1

        def enlarged(sample: Any) -> Any:
            small = [v[..., : high // SIDE, : wide // SIDE] for v in self._latents(sample, coarse)]
            whole = [sign * step.prediction(sign * v) for step, v in zip(steps, small, strict=True)]
            return self._argument(whole, sample)

        return _call(model, given.replaced(changes), enlarged)

    def _latents(self, value: Any, grid: Grid) -> list[Tensor]:
        """Latents `[..., H, W]`: one for the whole batch, or one per item of a list."""
        if isinstance(value, list):
            return value
        return [unpack(value, grid, self.side) if self.side else value]

    def _argument(self, latents: list[Tensor], like: Any) -> Any:
        """Latents in the form in which the model takes and returns them."""
        if isinstance(like, list):
            return [latent.to(other.dtype) for latent, other in zip(latents, like, strict=True)]
        return (pack(latents[0], self.side) if self.side else latents[0]).to(like.dtype)

    def _smaller(self, given: Given, grid: Grid) -> dict[str, Any]:
        """The arguments that describe the grid of tokens, for the coarse grid."""
        _, h, w = grid
        found: dict[str, Any] = {name: halved(given[name]) for name in self.numbers}
        if self.grids:
            found[self.grids] = _halved(given[self.grids])
        if self.places:
            found[self.places] = _mean_places(given[self.places].float(), h, w)
        if self.mask and (mask := given[self.mask]) is not None:
            text, image = mask[:, : -h * w], mask[:, -h * w :].unflatten(1, (h, w))
            found[self.mask] = torch.cat([text, image[:, ::SIDE, ::SIDE].flatten(1)], dim=1)
        return found


def _mean_places(places: Tensor, h: int, w: int) -> Tensor:
    """The mean positions of the tokens that coarse tokens stand for, `[..., N, axes]`."""
    places = places.reshape(*places.shape[:-2], h, w, -1)
    for axis, side in ((-3, h), (-2, w)):
        if side % SIDE:  # where one more token would be
            last, before = (places.narrow(axis, max(0, side - n), 1) for n in (1, 2))
            places = torch.cat([places, 2 * last - before], dim=axis)
    squares = places.reshape(*places.shape[:-3], halved(h), SIDE, halved(w), SIDE, -1)
    return squares.mean(dim=(-4, -2)).flatten(-3, -2)


# Arguments of UNets that only fit the full size.
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
    """Calls a UNet on a coarser latent, and returns a prediction for the whole one."""
    latent, timestep = given[given.names[0]], given[time]
    share = timeline.share(torch.as_tensor(timestep, device=latent.device).float())
    (noise,) = _broadcast(share, latent, [latent])
    step = Step(latent, (1 - noise).sqrt(), noise.sqrt(), timeline.prediction)
    small = {
        given.names[0]: step.small.to(latent.dtype),
        time: _like(timestep, timeline.time_of_share(step.small_s**2).view(share.shape)),
    }
    return _call(model, given.replaced(small), lambda x: step.prediction(x).to(x.dtype))


def _call(model: Callable[..., Any], given: Given, enlarged: Callable[[Any], Any]) -> Any:
    """Calls a model and enlarges the sample in its output."""
    output = model(*given.args, **given.kwargs)
    if isinstance(output, tuple):
        return (enlarged(output[0]), *output[1:])
    return replace(output, sample=enlarged(output.sample))


def _broadcast(levels: Tensor, value: Any, latents: list[Tensor]) -> list[Tensor]:
    """Noise levels `[]`, `[1]` or `[B]`, shaped to broadcast against each of the latents.

    Args:
        value: what the latents were made from: a list of items, or one tensor for all of them.
    """
    levels = levels.to(latents[0].device)
    if isinstance(value, list):
        return [*levels.expand(len(latents))]
    return [levels.reshape(-1, *[1] * (latents[0].ndim - 1))]


def _like(timestep: Any, value: Tensor) -> Any:
    """A timestep of the given one's type; integers are not fine enough and become floats."""
    if not isinstance(timestep, Tensor):
        return float(value)
    return value.to(timestep.dtype) if timestep.is_floating_point() else value


def _halved(grids: Any) -> Any:
    """Grids in nested lists, with half the rows and columns."""
    if isinstance(grids[0], int):
        frames, h, w = grids
        return (frames, halved(h), halved(w))
    return [_halved(inner) for inner in grids]
