"""Quality against speed on the embedded models: merging, steps left out, fewer steps, rivals.

    python benchmarks/front.py --sprites sprites.npz [--model unet] [--pixels 256] [--rows reuse]
    python benchmarks/front.py --device cpu --images 3 --pixels 256 --steps 20

Rows are made in the order of front_ways.py and written as they come, with the images of all of
them on one sheet. Image i has held-out caption i and seed i. Both halves of guidance of many images
are one call of the model, so that the GPU is the limit in eager mode too; what a cache of diffusers
decides, it then decides for all of them together.
"""

import argparse
import re
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np
import tomesd_demo_model
import torch
import torch.nn.functional as F
from common import RESULTS, Arguments
from compose_scenes import compose
from front_model import USUAL, Model, counted_tokens
from front_ways import WAYS, Way
from PIL import Image
from torch import Tensor

from tomesd.bench import RowFile
from tomesd.bench.measure import attempt
from tomesd.bench.rows import Row
from tomesd.evaluation.distances import fid_estimate, kid_estimate, kid_shares
from tomesd.evaluation.estimates import Array, Estimate, mean_estimate
from tomesd.evaluation.metrics import paired_scores
from tomesd.evaluation.networks import Inception, Lpips
from tomesd.generation.comparison import label_grid
from tomesd.machine import synchronize

SHOWN, COLUMNS = 256, 8
"""Side of the images on the sheet, and how many of them a row has."""
TOLD = ("speedup", "work", "lpips", "kid", "kid_change")
"""Fields of a row that are printed."""
FEWEST_FOR_KID, FEWEST_FOR_FID = 50, 500
SCENES = 2000
"""That images are compared with."""


class Judge:
    """Compares images with the unmerged ones, which come first, and with composed scenes."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        # Stored in half precision, they are smaller to carry to a GPU.
        self.lpips = Lpips(path=args.lpips).float().to(device)
        self.inception = Inception(args.inception).float().to(device)
        self.device = device
        self.unmerged: Tensor | None = None
        self.unmerged_features: Tensor | None = None
        self.scenes: Tensor | None = None  # their features
        if args.sprites:
            parts = compose(args.sprites, SCENES, args.pixels, device)
            self.scenes = torch.cat([self.features(part) for part in parts])

    def features(self, images: Tensor) -> Tensor:
        """[N, 2048] of images [N, 3, H, W] of uint8"""
        return torch.cat([self.inception(part.to(self.device)) for part in images.split(64)])

    def scores(self, images: Tensor) -> tuple[Row, dict[str, Array]]:
        """Estimates for images [N, 3, H, W] of uint8, and what they are worked out from."""
        kept = self._paired(images)
        found = {name: mean_estimate(values) for name, values in kept.items()}
        if len(images) >= FEWEST_FOR_KID:
            features = self.features(images)
            found |= self._distances(features)
            kept["features"] = features.half().cpu().numpy()
        return {k: v for name, one in found.items() for k, v in one.fields(name).items()}, kept

    def _paired(self, images: Tensor) -> dict[str, Array]:
        """Scores [N] of each image beside the unmerged one."""
        if self.unmerged is None:
            self.unmerged = images
            return {}
        pairs = zip(images.split(16), self.unmerged[: len(images)].split(16), strict=True)
        parts = [paired_scores(one, other, self.lpips) for one, other in pairs]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _distances(self, features: Tensor) -> dict[str, Estimate]:
        """Of features [N, 2048]. Intervals are bootstraps over images; scenes are taken as given.

        `kid_change` is how much KID to the scenes rises over that of the unmerged images of the
        same captions and seeds: much surer than either.
        """
        found, unmerged = {}, self.unmerged_features
        if unmerged is None:
            self.unmerged_features = features
        else:
            unmerged = unmerged[: len(features)]
            found["kid_unmerged"] = kid_estimate(features, unmerged, paired=True)
        if self.scenes is not None:
            shares = kid_shares(features, self.scenes)
            found["kid"] = mean_estimate(shares)
            if unmerged is not None:
                found["kid_change"] = mean_estimate(shares - kid_shares(unmerged, self.scenes))
            if len(features) >= FEWEST_FOR_FID:
                found["fid"] = fid_estimate(features, self.scenes)
        return found


@torch.no_grad()
def make(model: Model, way: Way, args: argparse.Namespace) -> tuple[Tensor, Row]:
    """Images [N, 3, H, W] of uint8, and what they took."""
    count, steps = (max(1, round(n)) for n in (way.share * args.images, way.steps * args.steps))
    captions = tomesd_demo_model.held_out_captions()[:count]
    images, seconds = [], []
    with counted_tokens() as counted, model.changed(way, steps) as changed:
        counted[0] = 0  # what was made to calibrate does not count
        for first in range(0, count, args.batch):
            seeds = range(first, min(first + args.batch, count))
            told, noise = model.encode(captions[first : seeds.stop]), model.noise(seeds)
            synchronize(model.device)
            start = time.perf_counter()
            latents = model.loop(changed, told, noise, steps, way.levels)
            synchronize(model.device)
            seconds.append((time.perf_counter() - start) / len(seeds))
            if way.cache and way.cache != "deep":
                changed._reset_stateful_cache()
            images.append(model.decode(latents))
    # The last batch may be smaller, and the first one loads and tunes kernels.
    typical = statistics.median(seconds[:-1] if len(seconds) > 3 else seconds)
    took = {
        "steps": len(way.levels) or steps,
        "seconds_per_image": typical,
        "batch_seconds": seconds,
    }
    took["block_tokens"] = counted[0] / count or None  # a UNet has no such blocks
    return torch.cat(images), took


def shrunk(images: Tensor) -> list[Image.Image]:
    """The first of images [N, 3, H, W], as the sheet shows them."""
    few = F.interpolate(images[:COLUMNS].float(), size=(SHOWN, SHOWN), mode="area")
    return [Image.fromarray(x) for x in few.round().byte().permute(0, 2, 3, 1).cpu().numpy()]


def run(args: argparse.Namespace) -> list[str]:
    """Makes and judges the rows; returns what went wrong."""
    model = Model(args)
    judge, file = Judge(args, model.device), RowFile(args.rows_file, model.device)
    args.out.mkdir(parents=True, exist_ok=True)
    ways = [way for way in WAYS[args.model] if re.search(args.rows, way.label)]
    problems, strips, base = [], {}, None

    def made_and_judged(way: Way) -> tuple[Row, dict[str, Array], list[Image.Image]]:
        images, took = make(model, way, args)
        scores, kept = judge.scores(images)
        row = {**identity(way, model, args), "images": len(images), **took, **scores}
        return row, kept, shrunk(images)

    for number, way in enumerate([Way("unmerged", "unmerged"), *ways]):
        late = args.spent() > args.budget
        outcome = "no time left" if late else attempt(partial(made_and_judged, way), model.device)
        if isinstance(outcome, str):
            problems.append(f"{way.label}: {outcome}")
            print(problems[-1], flush=True)
            if base is None:
                break
            continue  # the other rows can do without this one
        row, kept, strips[way.label] = outcome
        base = base or row
        row["speedup"] = base["seconds_per_image"] / row["seconds_per_image"]
        row["work"] = row["block_tokens"] and row["block_tokens"] / base["block_tokens"]
        file.add(row)
        np.savez(args.out / f"{number:02d}-{re.sub(r'[^A-Za-z0-9.]+', '-', way.label)}.npz", **kept)
        told = [f"{name} {row[name]:.4g}" for name in TOLD if row.get(name) is not None]
        print(f"{args.spent():4.0f} s  {way.label}: {', '.join(told)}", flush=True)
    if strips:
        sheet = label_grid([*strips.values()], [""] * len(strips["unmerged"]), [*strips])
        sheet.save(args.out / "sheet.jpg", quality=85)
    return problems


def identity(way: Way, model: Model, args: argparse.Namespace) -> Row:
    """What a row is of."""
    return {
        **{"section": "front", "setting": way.family, "model": f"embedded {args.model}"},
        **{"what": "images", "height": args.pixels, "width": args.pixels, "batch": args.batch},
        **{"all_steps": args.steps, "guidance": model.guidance, "scheduler": "own"},
        **{"dtype": str(model.dtype).removeprefix("torch."), "attention": "default"},
        **{"mode": "eager", "variant": way.variant, "label": way.label, "settings": way.options},
        "reference_scenes": SCENES if args.sprites else None,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = Arguments(__doc__, device="auto")
    add = parser.add_argument
    add("--model", choices=list(WAYS), default="transformer")
    add("--pixels", type=int, help="of a side; 512 on the transformer, 256 on the UNet")
    add("--steps", type=int, help="of unmerged images; 28 on the transformer, 20 on the UNet")
    add("--images", type=int, default=512, help="of the most important rows; others have fewer")
    add("--batch", type=int, default=32, help="images made together")
    add("--rows", default="", help="regular expression that labels must match")
    add("--budget", type=float, default=1e9, help="seconds after which no row begins")
    add("--sprites", type=Path, help="what scenes are composed of, to compare with")
    add("--inception", type=Path, help="weights, if the package is not installed")
    add("--lpips", type=Path, help="weights, if the package is not installed")
    add("--rows-file", type=Path, default=RESULTS / "front.jsonl")
    add("--out", type=Path, default=Path("front_output"), help="folder of features and the sheet")
    add("--dtype", help="float32 on a CPU, bfloat16 on the transformer, float16 on the UNet")
    args = parser.read(arguments)
    if args.device == "cpu":
        args.dtype = args.dtype or "float32"
    for name in ("pixels", "steps", "dtype"):
        setattr(args, name, getattr(args, name) or USUAL[args.model][name])
    if problems := run(args):
        raise SystemExit("left out:\n" + "\n".join(problems))


if __name__ == "__main__":
    main()
