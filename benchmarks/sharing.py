"""What sharing a plan, and cheaper ways of matching, do to the images of the embedded model.

    python benchmarks/sharing.py --original FOLDER --captions 200

PSNR and SSIM against the unmerged image of the same seed, on held-out captions, 30 DDIM steps,
guidance 5. One row for each variant, with the 95 % interval of the mean over the images, and of the
difference to the original's PSNR image by image.
"""

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomesd_demo_model
import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

import tomesd
from tomesd import Settings
from tomesd.bench.rows import RowFile
from tomesd.bench.variants import load_original
from tomesd.generation import load_pipeline
from tomesd.kernels import Cells
from tomesd.patch import patch_of
from tomesd.plan import MergePlan
from tomesd.policy import Frame
from tomesd.selectors import bipartite

ALL = {"max_downsample": 4, "merge_crossattn": True, "merge_mlp": True}


def fewer_channels(step: int) -> Any:
    """Matches on every so-many-th channel."""
    return lambda frame, x: frame.make_plan(x[..., ::step].contiguous())


def local(tiles: int) -> Any:
    """Searches each of tiles x tiles parts of the grid on its own; each removes the same share."""

    def plan(frame: Frame, x: Tensor) -> MergePlan:
        h, w = frame.grid  # type: ignore[misc]
        batch, n, channels = x.shape
        th, tw = h // tiles, w // tiles
        order = torch.arange(n, device=x.device).view(tiles, th, tiles, tw)
        order = order.transpose(1, 2).reshape(-1)
        parts = x[:, order].reshape(batch * tiles**2, th * tw, channels)
        cells = Cells.of(th, tw, frame.settings.sy, frame.settings.sx)
        # The draw differs from that of the whole grid, and is the same in every part.
        made = bipartite(
            parts, cells, frame.remove // tiles**2, timestep=frame.call.timestep, key=1
        )
        slots = made.start.shape[1] - 1
        first = torch.arange(tiles**2, device=x.device).view(1, -1, 1) * slots
        slot = (made.slot.view(batch, tiles**2, -1) + first).reshape(batch, n)
        whole = torch.empty_like(slot).scatter_(1, order.expand(batch, -1), slot)
        from tomesd.kernels.reference import members

        return MergePlan(whole, *members(whole, slots * tiles**2), made.triton)

    return plan


def variants() -> list[tuple[str, dict[str, Any], Any]]:
    """Name, settings, planner; "original" is tomesd 0.1.3."""
    rows: list[tuple[str, dict[str, Any], Any]] = []
    for where in ({"ratio": 0.25}, {"ratio": 0.5}, {"ratio": 0.75}, {"ratio": 0.5, **ALL}):
        rows += [
            ("original", where, None),
            ("block", {**where, "share": "block"}, None),
            ("level", {**where, "share": "level"}, None),
        ]
        refreshes = (2, 4, 8, 1000) if where == {"ratio": 0.5} else (4, 1000)
        rows += [(f"steps {k}", {**where, "share": "steps", "refresh": k}, None) for k in refreshes]
    half = {"ratio": 0.5, "share": "block"}
    rows += [(f"block, 1/{k} of the channels", half, fewer_channels(k)) for k in (2, 4, 8)]
    rows += [(f"block, {k}x{k} tiles", half, local(k)) for k in (2, 4, 8)]
    rows += [("block, not random", {**half, "use_rand": False}, None)]
    return rows


@torch.no_grad()
def images(pipe: Any, count: int, batch: int, steps: int) -> tuple[Tensor, float]:
    """`[count, 3, H, W]` in 0..1, and seconds per image."""
    captions = tomesd_demo_model.held_out_captions()[:count]
    made = []
    began = time.perf_counter()
    for start in range(0, count, batch):
        part = captions[start : start + batch]
        made.append(
            pipe(
                part,
                num_inference_steps=steps,
                guidance_scale=5.0,
                generator=[torch.Generator("cpu").manual_seed(start + i) for i in range(len(part))],
                output_type="pt",
            ).images.float()
        )
    images = torch.cat(made)
    images.mean().item()  # waits for the device
    return images, (time.perf_counter() - began) / count


def compared(found: Tensor, base: Tensor) -> dict[str, Tensor]:
    """PSNR and SSIM of each image, `[count]`."""
    error = (found - base).square().mean(dim=(1, 2, 3)).clamp_min(1e-10)
    ssim = torch.cat(
        [
            structural_similarity_index_measure(*parts, reduction="none", data_range=1.0)
            for parts in zip(found.split(25), base.split(25), strict=True)
        ]
    )
    return {"psnr": -10 * torch.log10(error), "ssim": ssim}


def mean_and_interval(name: str, values: Tensor) -> dict[str, float]:
    interval = 1.96 * values.std() / len(values) ** 0.5
    return {name: values.mean().item(), f"{name}_ci95": interval.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", type=Path, required=True)
    parser.add_argument("--captions", type=int, default=200)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sharing.jsonl"))
    args = parser.parse_args()
    pipe = load_pipeline("demo")
    file = RowFile(args.out, pipe.device)
    original = load_original(args.original)
    images(pipe, min(args.batch, args.captions), args.batch, 2)  # warm-up
    base, seconds = images(pipe, args.captions, args.batch, args.steps)
    common = {"section": "sharing", "model": "demo", "images": args.captions, "steps": args.steps}
    common |= {"dtype": str(pipe.unet.dtype).removeprefix("torch."), "height": base.shape[-1]}
    file.add({**common, "variant": "unmerged", "seconds_per_image": seconds})
    originals: dict[str, Tensor] = {}
    for name, options, planner in variants():
        if args.only not in name:
            continue
        if name == "original":
            original.apply_patch(pipe, **({"max_downsample": 1} | options))
        else:
            tomesd.apply_patch(pipe, **options, when="always")
            if planner is not None:
                patch_of(pipe.unet).planner = planner  # type: ignore[union-attr]
        torch.manual_seed(0)  # the original draws from the global generator
        found, seconds = images(pipe, args.captions, args.batch, args.steps)
        (original if name == "original" else tomesd).remove_patch(pipe)
        settings = options if name == "original" else asdict(Settings(**options, when="always"))
        row = {**common, "variant": name, "settings": settings, "seconds_per_image": seconds}
        scores = compared(found, base)
        for score, values in scores.items():
            row |= mean_and_interval(score, values)
        everything = "all" if "merge_mlp" in options else "attn"
        place = f"{options['ratio']} {everything}"
        if name == "original":
            originals[place] = scores["psnr"]
        elif place in originals:
            row |= mean_and_interval("psnr_gain", scores["psnr"] - originals[place])
        row = file.add({**row, "ratio": options["ratio"], "layers": everything})
        print(
            f"{name:32s} r={row['ratio']} {everything:5s} psnr {row['psnr']:.2f} "
            f"+- {row['psnr_ci95']:.2f} ssim {row['ssim']:.4f} {seconds:.3f} s, to the original "
            f"{row.get('psnr_gain', 0):+.2f} +- {row.get('psnr_gain_ci95', 0):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
