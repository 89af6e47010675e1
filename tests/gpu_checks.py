"""Whether the Triton kernels do on this GPU what they should. Needs neither pytest nor other tests.

    python tests/gpu_checks.py [--device cuda]

With `TRITON_INTERPRET=1` and `--device cpu` it runs without a GPU, on small shapes only.
"""

import argparse
import copy
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor

import tomesd
from tomesd import kernels
from tomesd.bench.models import random_model
from tomesd.bench.modes import replayed
from tomesd.kernels import Cells, draw_key, draw_offsets, reference
from tomesd.plan import MergePlan
from tomesd.selectors import bipartite

KEY, TIMES = draw_key(3, 1), torch.full((2,), 500.0)


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    # Drawn on the CPU: the same whatever the device.
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def problems(device: torch.device) -> Iterator[tuple[torch.dtype, int, Cells, float]]:
    """Dtype, channels, grid and ratio."""
    if device.type == "cuda":
        dtypes = [torch.float16, torch.bfloat16, torch.float32]
        grids, channels = ((64, 64), (45, 51), (24, 33)), (16, 64, 320, 640, 1280, 3072)
    else:  # the interpreter multiplies bfloat16 wrongly
        dtypes = [torch.float16, torch.float32]
        grids, channels = ((16, 8), (7, 9)), (16, 96)
    searched = ((0, 0.5), (8, 0.5), (0, 0.75), (2, 0.75))
    for (h, w), (window, ratio), dtype, width in itertools.product(
        grids, searched, dtypes, channels
    ):
        yield dtype, width, Cells.of(h, w, 2, 2, window), ratio


def check_kernels(device: torch.device) -> None:
    """Plans are right, the same bits in every run, and merging is as exact as the reference."""
    count, worst = 0, 0.0
    for dtype, channels, cells, ratio in problems(device):
        name = f"{dtype}, {channels} channels, {cells}"
        x = random(2, cells.tokens, channels, dtype=dtype, device=device)
        remove = cells.removable(ratio)
        # The timestep may lie anywhere in a list, or be expanded to the batch.
        times = [TIMES.to(device)[run % 2 :][:1] for run in range(4)]
        times.append(torch.tensor([500.0, 1.0], device=device)[:1].expand(2))
        plan, *others = (
            bipartite(x, cells, remove, backend="triton", timestep=time, key=KEY) for time in times
        )
        for other in others:
            parts = zip((*plan.lists, plan.merge(x)), (*other.lists, other.merge(x)), strict=True)
            same = all(torch.equal(*pair) for pair in parts)
            assert same, f"{name}: other bits in another run"
        require_plan_of_float64(plan, x, cells, remove, f"plan of {name}")
        worst = max(worst, require_exact_merging(plan, x, name))
        count += 1
    print(f"check: {count} plans are those of float64")
    print(f"check: {count} plans and means are the same bits in 5 runs")
    print(
        f"check: means, gathered and restored tokens: at most {worst:.2f} x the reference's error"
    )


def require_plan_of_float64(
    plan: MergePlan, x: Tensor, cells: Cells, remove: int, name: str
) -> None:
    """The choices are those for `x` `[B, N, C]` in float64 but for rounding; the rest is exact."""
    offsets = draw_offsets(cells.count, cells.choices, KEY, TIMES[:1].to(x.device))
    src, dst, best, _ = reference.best_pairs(x.double(), cells, offsets)
    alone = cells.sources - remove
    of_src = plan.slot.gather(1, src)  # [B, S]
    merged = of_src >= alone
    assert (merged.sum(1) == remove).all(), f"{name}: not {remove} tokens removed"
    # Sources that stay come first, then the destinations, both in order.
    in_order = torch.where(merged, of_src, (~merged).cumsum(1) - 1)
    slot = reference.pair_lists(src, dst, in_order, alone)[0]
    assert torch.equal(plan.slot, slot), f"{name}: tokens are in wrong slots"
    assert torch.equal(plan.kept[:, alone:], dst), f"{name}: another representative"
    # Sources and destinations are listed window by window.
    of_window = torch.arange(src.shape[1], device=x.device) * cells.windows // src.shape[1]
    inside = (of_src - alone) * cells.windows // cells.count == of_window
    assert inside[merged].all(), f"{name}: a token is merged into one of another window"
    unit = reference.direction(x.double())
    own, chosen = (reference.slot_gather(unit, at) for at in (src, plan.kept.gather(1, of_src)))
    # Sums of so many products, 16 at a time, in float32, each rounded or cut off.
    bound = 2.0**-21 * (4 + x.shape[2] / 16)
    worse = best - (own * chosen).sum(2)
    assert (worse <= bound)[merged].all(), f"{name}: a token is not merged into its best match"
    last = torch.where(merged, best, 2.0).amin(1)
    left = torch.where(merged, -2.0, best).amax(1)
    assert (left - last <= bound).all(), f"{name}: not the most similar tokens are merged"


def require_exact_merging(plan: MergePlan, x: Tensor, name: str) -> float:
    """Error at most twice that of the reference in the same precision, both against float64.

    Returns:
        How many times it is.
    """
    worst = 0.0
    y = random(2, plan.span.shape[1], x.shape[2], dtype=x.dtype, device=x.device, seed=1)
    for kernel, operands, rest in (
        ("slot_mean", (x,), plan.lists),
        ("slot_gather", (y,), plan.slot),
        ("slot_restore", (x, y, plan.merge(x)), plan.slot),
    ):
        fast, plain = getattr(kernels, kernel), getattr(reference, kernel)
        exact = plain(*(one.double() for one in operands), rest)
        outs = fast(*operands, rest, triton=True), plain(*operands, rest)
        error, allowed = ((out.double() - exact).abs().max().item() for out in outs)
        message = f"{kernel} of {name}: error {error:.1e}, of the reference {allowed:.1e}"
        assert error <= 2 * allowed + 1e-7, message
        worst = max(worst, error / (allowed + 1e-7))
    return worst


def make_unet(device: torch.device) -> tuple[Any, Tensor, Tensor]:
    """A small UNet, latents `[6, 2, 4, side, side]` for six steps, and a text."""
    config = {
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        **{"block_out_channels": (64, 128), "layers_per_block": 1, "norm_num_groups": 8},
        **{"cross_attention_dim": 64, "attention_head_dim": 4},
    }
    dtype, side = (torch.float16, 32) if device.type == "cuda" else (torch.float32, 8)
    unet = random_model(UNet2DConditionModel, config, device, dtype, seed=0)
    shapes = (6, 2, 4, side, side), (2, 7, 64)
    return unet, *(random(*shape, dtype=dtype, device=device) for shape in shapes)


@torch.no_grad()
def check_model(device: torch.device) -> None:
    """A CUDA graph replays what eager mode computes, and that is what the reference computes."""
    plain, latents, text = make_unet(device)
    # Two images, the second beginning before the first one's plan has served its calls.
    times = (900.0, 700.0, 500.0, 800.0, 600.0, 400.0)
    for share, selector in (("block", "bipartite"), ("steps", "bipartite"), ("steps", "kmeans")):
        options: dict[str, Any] = {"share": share, "refresh": 2, "selector": selector}
        options |= {"max_downsample": 2, "merge_mlp": True} if share == "block" else {}
        eager, captured = (merged(plain, "triton", **options) for _ in range(2))
        sample, timestep = latents[0].clone(), torch.tensor(times[0], device=device)
        replay = replayed(lambda m=captured, s=sample, t=timestep: m(s, t, text).sample, device)
        name = f'{selector}, share="{share}"'
        for step, given in zip(times, latents, strict=True):
            sample.copy_(given)
            timestep.fill_(step)
            expected = eager(given, torch.tensor(step, device=device), text).sample
            same = torch.equal(replay(), expected)
            assert same, f"{name}, timestep {step:g}: the graph differs from eager mode"
        print(f"check: {name}: a graph replays {len(times)} eager steps bit for bit")
        effect = (plain(given, timestep, text).sample.float() - expected).norm()
        assert effect > 0, f"{name}: nothing is merged"
        if share == "block":
            slow = merged(plain, "reference", **options)(given, timestep, text).sample
            error = (slow.float() - expected).norm()
            print(f"check: fast kernels to reference {error / effect:.1e} of what merging changes")
            # Where two matches are equally good to half precision, either is right.
            assert error <= 0.5 * effect, "a merged model differs from that with the reference"


def merged(plain: Any, backend: str, **options: Any) -> Any:
    """A copy of the model that merges half of the tokens."""
    return tomesd.apply_patch(copy.deepcopy(plain), 0.5, backend=backend, when="always", **options)


def check_gpu(device: torch.device) -> None:
    """Raises `AssertionError` at the first thing that is wrong."""
    start = time.monotonic()
    for check in (check_kernels, check_model):
        check(device)
    print(f"check: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    check_gpu(parser.parse_args().device)
