"""What sharing a plan, and cheaper ways of matching, do to the images of the embedded model.

    python benchmarks/sharing.py --original FOLDER --captions 200

PSNR and SSIM against the unmerged image of the same seed, on held-out captions, 30 DDIM steps,
guidance 5. One row for each variant, with the 95 % interval of the mean over the images, and of the
difference to the original's PSNR image by image.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomesd_demo_model
import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

import tomesd
from tomesd.bench import RowFile, load_original
from tomesd.generation import load_pipeline
from tomesd.kernels import Cells, list_members, reference, use_triton
from tomesd.patch import patch_of
from tomesd.plan import MergePlan
from tomesd.planning import make_plan
from tomesd.policy import Frame
from tomesd.selectors import bipartite

ALL = {"max_downsample": 4, "merge_crossattn": True, "merge_mlp": True}


def local_plan(frame: Frame, x: Tensor, tiles: int, ranked: str) -> MergePlan:
    """Searches each of tiles x tiles parts of the grid on its own.

    Args:
        ranked: "tile": each removes the same share. "grid": the best matches of all are merged.
    """
    h, w = frame.grid  # type: ignore[misc]
    batch, n, channels = x.shape
    th, tw = h // tiles, w // tiles
    order = torch.arange(n, device=x.device).view(tiles, th, tiles, tw)
    order = order.transpose(1, 2).reshape(-1)
    parts = x[:, order].reshape(batch * tiles**2, th * tw, channels)
    cells = Cells.of(th, tw, frame.settings.sy, frame.settings.sx)
    remove = frame.remove if ranked == "grid" else frame.remove // tiles**2
    # The draw is another than on the whole grid, and the same in every part.
    where = {"timestep": frame.call.timestep, "key": 1}
    if ranked == "tile":
        made = bipartite(parts, cells, remove, **where)
        slots = made.span.shape[1]
        first = torch.arange(tiles**2, device=x.device).view(1, -1, 1) * slots
        slot = (made.slot.view(batch, tiles**2, -1) + first).reshape(batch, n)
        slots *= tiles**2
    else:
        slot, slots = ranked_by_grid(parts, cells, batch, remove, **where)
    whole = torch.empty_like(slot).scatter_(1, order.expand(batch, -1), slot)
    return MergePlan(*list_members(whole, slots), use_triton("auto", x))


def ranked_by_grid(
    parts: Tensor, cells: Cells, batch: int, remove: int, **where: Any
) -> tuple[Tensor, int]:
    offsets = reference._offsets(
        parts, where["timestep"].reshape(-1)[:1], None, cells, where["key"]
    )
    src, dst = (index[0] for index in cells.split(offsets[:1]))
    unit = reference._direction(parts)
    score, match = (unit[:, src] @ unit[:, dst].transpose(1, 2)).float().max(dim=-1)
    tiles, n = parts.shape[0] // batch, parts.shape[1]
    first = torch.arange(tiles, device=parts.device)[:, None]
    src, dst = (first * n + src).flatten(), (first * n + dst).flatten()
    match = (match.view(batch, tiles, -1) + first * cells.count).flatten(1)
    rank = score.view(batch, -1).argsort(dim=1, descending=True)
    merged, kept = rank[:, :remove], rank[:, remove:]
    slot = torch.empty(batch, tiles * n, dtype=torch.int64, device=parts.device)
    slot[:, dst] = torch.arange(kept.shape[1], tiles * n - remove, device=parts.device)
    slot.scatter_(1, src[kept], torch.arange(kept.shape[1], device=parts.device).expand_as(kept))
    slot.scatter_(1, src[merged], match.gather(1, merged) + kept.shape[1])
    return slot, tiles * n - remove


@dataclass(frozen=True)
class Way:
    """A way of matching. Says who shares a plan, for how many steps, and how it is searched."""

    scope: str = "block"
    """"block", "level", or "run": the blocks at one level that follow each other, so that the way
    down and the way up of a UNet have plans of their own."""
    refresh: int = 1
    tiles: int = 1
    ranked: str = "tile"
    """Whether each "tile" removes the same share, or the best matches of the "grid" are merged."""
    channels: int = 1
    """Looks at every so-many-th channel."""

    def __str__(self) -> str:
        words = [self.scope]
        if self.refresh > 1:
            words.append(f"kept {self.refresh} steps" if self.refresh < 100 else "kept")
        if self.tiles > 1:
            words.append(f"{self.tiles}x{self.tiles} tiles, ranked by {self.ranked}")
        if self.channels > 1:
            words.append(f"1/{self.channels} of the channels")
        return ", ".join(words)

    def planner(self) -> Any:
        kept: dict[Any, tuple[MergePlan, int, float]] = {}
        seen: dict[str, Any] = {"call": None}

        def plan(frame: Frame, x: Tensor, remove: int) -> MergePlan:
            if seen["call"] is not frame.call:
                seen.update(call=frame.call, blocks=0, runs=0, grid=None, made={})
            seen["blocks"] += 1
            seen["runs"] += seen["grid"] != frame.grid
            seen["grid"] = frame.grid
            place = {"block": seen["blocks"], "run": seen["runs"], "level": 0}[self.scope]
            key = (frame.grid, place, x.shape[0])
            if key in seen["made"]:
                return seen["made"][key]
            time = float(frame.call.timestep.flatten()[0])  # type: ignore[union-attr]
            if key in kept and kept[key][1] < self.refresh and time < kept[key][2]:
                made, age, _ = kept[key]
            else:
                metric = x[..., :: self.channels].contiguous()
                made, age = (
                    (
                        local_plan(frame, metric, self.tiles, self.ranked)
                        if self.tiles > 1
                        else make_plan(frame, metric, remove)
                    ),
                    0,
                )
            kept[key] = (made, age + 1, time)
            seen["made"][key] = made
            return made

        return plan


def variants() -> list[tuple[dict[str, Any], Way | None]]:
    """Settings, and a way of matching; none is tomesd 0.1.3."""
    rows: list[tuple[dict[str, Any], Way | None]] = []
    half = {"ratio": 0.5}
    few = (
        None,
        Way(),
        Way("level"),
        Way(tiles=8),
        Way(tiles=8, ranked="grid"),
        Way("level", tiles=8, ranked="grid"),
    )
    for where in (half, {"ratio": 0.5, **ALL}, {"ratio": 0.25}, {"ratio": 0.75}):
        rows += [(where, way) for way in few]
    rows += [(half, Way(tiles=t, ranked=r)) for t in (4, 16) for r in ("tile", "grid")]
    rows += [(half, Way(refresh=4)), (half, Way("level", 4)), (half, Way("run"))]
    rows += [(half, Way(refresh=r, tiles=8, ranked="grid")) for r in (2, 4, 1000)]
    rows += [(half, Way(channels=2)), ({**half, "use_rand": False}, Way())]
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
    for options, way in variants():
        torch.manual_seed(0)  # the original draws from the global generator
        if way is None:
            original.apply_patch(pipe, **({"max_downsample": 1} | options))
        else:
            tomesd.apply_patch(pipe, **options, when="always")
            patch_of(pipe.unet).planner = way.planner()  # type: ignore[union-attr]
        found, seconds = images(pipe, args.captions, args.batch, args.steps)
        (original if way is None else tomesd).remove_patch(pipe)
        layers = "all" if "merge_mlp" in options else "attn"
        place = f"{options['ratio']} {layers}"
        row = {**common, "variant": "original" if way is None else str(way), "settings": options}
        row |= {"ratio": options["ratio"], "layers": layers, "seconds_per_image": seconds}
        scores = compared(found, base)
        for score, values in scores.items():
            row |= mean_and_interval(score, values)
        if way is None:
            originals[place] = scores["psnr"]
        else:
            row |= mean_and_interval("psnr_gain", scores["psnr"] - originals[place])
        row = file.add(row)
        print(
            f"{row['variant']:32s} {place:9s} psnr {row['psnr']:.2f} +- {row['psnr_ci95']:.2f} "
            f"ssim {row['ssim']:.4f} {seconds:.3f} s, to the original "
            f"{row.get('psnr_gain', 0):+.2f} +- {row.get('psnr_gain_ci95', 0):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
