"""The cases whose results tomesd 0.1.3 fixed once and for all: models, inputs, settings.

Weights and inputs come from an integer hash of (name, index), so they depend on no random number
generator and are the same bits everywhere. Models run in float64 (a few in float32): matching is
a discrete choice, and a near-tie must not be decided by rounding.
"""

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

SAMPLES = 128
CONTEXT_DIM = 24
CONTEXT_TOKENS = 7


@dataclass(frozen=True)
class Case:
    """One run of one host: `settings` go to apply_patch, with use_rand=False."""

    host: str
    height: int
    width: int
    batch: int
    settings: dict[str, Any] = field(hash=False)
    dtype: torch.dtype = torch.float64
    salt: str = "a"  # names the input; chosen for the float32 cases so that no choice is close

    @property
    def base(self) -> str:
        """Key of the unpatched output."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.host}/{self.height}x{self.width}/b{self.batch}/{kind}/{self.salt}"

    @property
    def name(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in sorted(self.settings.items()))
        return f"{self.base}/{options}"


@dataclass(frozen=True)
class MatchCase:
    """One call of bipartite_soft_matching_random2d with no_rand=True."""

    batch: int
    w: int
    h: int
    sx: int
    sy: int
    r: int
    channels: int = 5

    @property
    def name(self) -> str:
        return f"match/b{self.batch}/{self.w}x{self.h}/s{self.sx}x{self.sy}/r{self.r}"


def noise(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers of zero mean and unit variance, uniform, from a 32-bit integer hash."""
    mask = 0xFFFFFFFF
    x = torch.arange(math.prod(shape), dtype=torch.int64)
    x = (x * 0x9E3779B1 + zlib.crc32(name.encode())) & mask
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & mask
    x = (x >> 16) ^ x
    return ((x.double() / 2**31 - 1) * math.sqrt(3)).reshape(shape).to(dtype)


def fill(model: torch.nn.Module) -> torch.nn.Module:
    """Give every parameter a non-zero value that keeps activations of order one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = noise(name, tuple(parameter.shape))
            if parameter.ndim > 1:
                value = value / math.sqrt(parameter[0].numel())
            else:  # biases around zero, normalisation weights around one
                value = 0.1 * value + float(name.endswith("weight"))
            parameter.copy_(value)
    return model.eval()


def diffusers_unet(linear: bool) -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64, 64, 64),
        down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        layers_per_block=1,
        cross_attention_dim=CONTEXT_DIM,
        attention_head_dim=(1, 2, 4, 4) if linear else 2,
        use_linear_projection=linear,
    )


def ldm_unet(linear: bool, levels: int = 4) -> torch.nn.Module:
    from ldm.modules.diffusionmodules.openaimodel import UNetModel

    heads = {"num_head_channels": 16} if linear else {"num_heads": 2}
    return UNetModel(
        image_size=32,
        in_channels=4,
        model_channels=32,
        out_channels=4,
        num_res_blocks=1,
        attention_resolutions=[1, 2, 4],
        channel_mult=[1, 2, 2, 2][:levels],
        use_spatial_transformer=True,
        use_linear_in_transformer=linear,
        transformer_depth=1,
        context_dim=CONTEXT_DIM,
        use_checkpoint=False,
        legacy=False,
        **heads,
    )


BUILDERS = {
    "diffusers-sd1": functools.partial(diffusers_unet, linear=False),
    "diffusers-sd2": functools.partial(diffusers_unet, linear=True),
    "ldm-sd1": functools.partial(ldm_unet, linear=False),
    "ldm-sd2": functools.partial(ldm_unet, linear=True),
    # ldm's decoder cannot take sizes that 8 does not divide; without down-sampling it can.
    "ldm-sd1-flat": functools.partial(ldm_unet, linear=False, levels=1),
}


class LatentDiffusionShell(torch.nn.Module):
    """The two attributes through which ldm users hand their UNet over."""

    def __init__(self, unet: torch.nn.Module) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.diffusion_model = unet


@functools.cache
def build(host: str, dtype: torch.dtype) -> torch.nn.Module:
    """What apply_patch is given: a diffusers model, or an object with `.model.diffusion_model`."""
    unet = fill(BUILDERS[host]().type(dtype))
    if host.startswith("diffusers"):
        return unet
    unet.dtype = dtype
    for module in unet.modules():
        if type(module).__name__ == "GroupNorm32":  # computes in float32 whatever it is given
            module.__class__ = torch.nn.GroupNorm
    unet.time_embed.register_forward_pre_hook(lambda _, args: (args[0].to(dtype),))
    return LatentDiffusionShell(unet)


@contextlib.contextmanager
def full_precision_attention() -> Iterator[None]:
    """ldm rounds queries and keys to float32 unless told otherwise."""
    from ldm.modules import attention

    before, attention._ATTN_PRECISION = attention._ATTN_PRECISION, "as given"
    try:
        yield
    finally:
        attention._ATTN_PRECISION = before


@torch.no_grad()
def forward(case: Case) -> torch.Tensor:
    """The host's output. Timestep 0 has an embedding of exact zeros and ones everywhere."""
    model = build(case.host, case.dtype)
    latent = noise(f"latent {case.salt}", (case.batch, 4, case.height, case.width), case.dtype)
    context = noise("context", (case.batch, CONTEXT_TOKENS, CONTEXT_DIM), case.dtype)
    timesteps = torch.zeros(case.batch)
    if case.host.startswith("diffusers"):
        return model(latent, timesteps, context, return_dict=False)[0]
    with full_precision_attention():
        return model.model.diffusion_model(latent, timesteps, context)


def run(case: Case, tomesd: ModuleType, **options: object) -> torch.Tensor:
    """The patched output, by whichever tomesd is given."""
    model = build(case.host, case.dtype)
    tomesd.apply_patch(model, use_rand=False, **case.settings, **options)
    try:
        return forward(case)
    finally:
        tomesd.remove_patch(model)


def sample(output: torch.Tensor) -> torch.Tensor:
    """A fixed selection of values and the root mean square, which sees all of them."""
    flat = output.flatten()
    where = (noise("positions", (SAMPLES,)).abs() * 1e6).long() % flat.numel()
    return torch.cat([flat[where], flat.square().mean().sqrt()[None]])


def match_inputs(case: MatchCase) -> tuple[torch.Tensor, torch.Tensor]:
    """The metric, and other tokens with another width to merge by it."""
    n = case.w * case.h
    metric = noise(f"metric {case.name}", (case.batch, n, case.channels))
    return metric, noise(f"tokens {case.name}", (case.batch, n, 3))


def match_outputs(case: MatchCase, matching: Callable) -> dict[str, torch.Tensor]:
    """What the two functions of a matching return, for tokens of several widths."""
    metric, tokens = match_inputs(case)
    sizes = (case.w, case.h, case.sx, case.sy, case.r)
    merge, unmerge = matching(metric, *sizes, no_rand=True, generator=None)
    merged = merge(tokens)
    outputs = {"merged": _sort_dst(case, merged), "unmerged": unmerge(merged[..., :2] ** 2)}
    for mode in ("mean", "sum", "amax"):
        outputs[mode] = _sort_dst(case, merge(metric, mode=mode))
    return {f"{case.name}/{key}": value for key, value in outputs.items()}


def _sort_dst(case: MatchCase, merged: torch.Tensor) -> torch.Tensor:
    """Kept src come first, by falling similarity; the order of the dst is left to a sort with ties
    in the original, so it is no part of the contract."""
    if case.r <= 0:
        return merged
    first = merged.shape[1] - (case.w // case.sx) * (case.h // case.sy)
    kept, dst = merged[:, :first], merged[:, first:]
    order = dst[..., :1].argsort(dim=1).expand_as(dst)
    return torch.cat([kept, dst.gather(1, order)], dim=1)


def _cases() -> list[Case]:
    # Chosen so that every value of every axis meets several of the others, not as a full product.
    attn: dict[str, Any] = {}
    cross = {"merge_crossattn": True}
    mlp = {"merge_mlp": True}
    everything = cross | mlp
    only_cross = {"merge_attn": False, "merge_crossattn": True}
    only_mlp = {"merge_attn": False, "merge_mlp": True}
    # (height, width, batch, ratio, max_downsample, sx, sy, layers), the same for all four hosts
    shared: list[tuple[int, int, int, float, int, int, int, dict[str, Any]]] = [
        (16, 16, 2, 0.5, 1, 2, 2, attn),
        (16, 16, 1, 0.1, 1, 2, 2, everything),
        (16, 16, 2, 0.25, 8, 2, 2, cross),
        (16, 16, 2, 0.6, 2, 4, 4, mlp),
        (24, 32, 3, 0.3, 4, 2, 4, everything),
        (24, 32, 1, 0.75, 8, 2, 2, everything),
        (24, 32, 4, 0.5, 2, 4, 2, cross),
        (24, 40, 2, 0.6, 8, 2, 2, attn),
        (32, 40, 1, 0.75, 8, 4, 4, mlp),
    ]
    per_host: dict[str, list[tuple[int, int, int, float, int, int, int, dict[str, Any]]]] = {
        "diffusers-sd1": [
            (65, 77, 1, 0.5, 1, 2, 2, attn),
            (65, 77, 1, 0.75, 8, 2, 4, everything),
            (33, 17, 2, 0.5, 8, 2, 2, everything),
            (33, 17, 4, 0.3, 4, 4, 4, cross),
            (16, 16, 2, 0.5, 4, 2, 2, only_cross),
            (32, 40, 2, 0.9, 2, 4, 4, attn),
        ],
        "diffusers-sd2": [
            (65, 77, 1, 0.6, 4, 4, 4, mlp),
            (77, 65, 1, 0.25, 2, 2, 2, cross),
            (33, 17, 3, 0.75, 2, 2, 2, attn),
            (17, 33, 1, 0.1, 8, 2, 2, everything),
            (16, 16, 2, 0.5, 8, 2, 2, only_mlp),
        ],
        "ldm-sd1": [(40, 24, 2, 0.1, 4, 4, 2, everything), (16, 16, 4, 0.3, 2, 2, 2, only_mlp)],
        "ldm-sd2": [(56, 24, 1, 0.5, 4, 2, 2, attn), (16, 16, 3, 0.75, 1, 4, 4, only_cross)],
        "ldm-sd1-flat": [
            (33, 17, 2, 0.5, 1, 2, 2, attn),
            (33, 17, 1, 0.75, 1, 4, 4, everything),
            (49, 35, 1, 0.6, 1, 2, 2, cross),
        ],
    }
    single = [
        ("diffusers-sd1", (16, 16, 2, 0.5, 1, 2, 2, attn), "l"),
        ("diffusers-sd2", (16, 24, 1, 0.3, 2, 2, 2, everything), "a"),
        ("diffusers-sd1", (17, 13, 1, 0.6, 1, 4, 4, cross), "h"),
        ("ldm-sd1", (16, 16, 1, 0.5, 2, 2, 2, mlp), "p"),
        ("ldm-sd2", (16, 16, 2, 0.25, 1, 2, 4, attn), "t"),
        ("ldm-sd1-flat", (13, 11, 1, 0.75, 1, 2, 2, everything), "e"),
    ]
    rows = [(host, row) for host in list(per_host)[:4] for row in shared]
    rows += [(host, row) for host, own in per_host.items() for row in own]
    cases = [_case(host, row, torch.float64, "a") for host, row in rows]
    return cases + [_case(host, row, torch.float32, salt) for host, row, salt in single]


def _case(host: str, row: tuple[Any, ...], dtype: torch.dtype, salt: str) -> Case:
    height, width, batch, ratio, max_downsample, sx, sy, layers = row
    settings = {"ratio": ratio, "max_downsample": max_downsample, "sx": sx, "sy": sy, **layers}
    return Case(host, height, width, batch, settings, dtype, salt)


CASES = _cases()
MATCH_CASES = [
    MatchCase(2, 8, 6, 2, 2, 20),
    MatchCase(1, 8, 6, 2, 2, 0),
    MatchCase(1, 8, 6, 2, 2, -3),
    MatchCase(2, 8, 6, 2, 2, 1000),
    MatchCase(3, 7, 5, 2, 2, 12),
    MatchCase(1, 5, 9, 4, 2, 30),
    MatchCase(4, 5, 9, 2, 4, 1),
    MatchCase(1, 16, 16, 4, 4, 230),
    MatchCase(2, 3, 4, 3, 4, 11),
    MatchCase(1, 11, 13, 3, 1, 60, channels=3),
]
