"""The real images of the embedded model's world: scenes composed from held-out captions."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tomesd_demo_model
import torch
from torch import Tensor
from torch.multiprocessing import get_context

from tomesd.evaluation.networks import Inception

TRAINING = Path(__file__).parent.parent / "demo_model" / "training"
AT_ONCE = 20
SEED = 11


def make_reference(args: argparse.Namespace) -> None:
    """Writes the Inception features of `args.reference` scenes, `[n, 2048]` of float16.

    Their captions are held out as those of the images are, but others: scenes of the same captions
    would be closer than independent ones.
    """
    device = "cuda" if args.device == "auto" and torch.cuda.is_available() else "cpu"
    device = device if args.device == "auto" else args.device
    shares = range(0, args.reference, AT_ONCE)
    jobs = [(args, first, min(AT_ONCE, args.reference - first), device) for first in shares]
    processes = 1 if device != "cpu" else max(1, torch.get_num_threads())
    found = []
    with get_context("spawn").Pool(processes) as pool:
        for number, part in enumerate(pool.imap(_features, jobs), start=1):
            found.append(part)
            if number % 10 == 0:
                print(f"{number * AT_ONCE} of {args.reference} scenes", flush=True)
    args.make_reference.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.make_reference, features=np.concatenate(found), size=args.size)
    print(f"{args.make_reference}: {args.make_reference.stat().st_size / 1e6:.1f} MB")


_loaded: dict[str, Any] = {}


def _features(job: tuple[argparse.Namespace, int, int, str]) -> Any:
    """Features of `count` scenes from the `first` on; the same however they are shared out."""
    args, first, count, device = job
    if not _loaded:
        torch.set_num_threads(1)
        sys.path.insert(0, str(TRAINING))
        from scenes import Composer
        from tokenizer import WordTokenizer
        from tomesd_demo_model.captions import sample_scenes

        shipped = len(tomesd_demo_model.held_out_captions())
        _loaded.update(
            scenes=sample_scenes(shipped + args.reference)[shipped:],
            composer=Composer(args.sprites, device),
            tokenizer=WordTokenizer(tomesd_demo_model.path() / "tokenizer"),
            inception=Inception(args.inception).to(device),
        )
    from data import describe

    described = describe(
        _loaded["scenes"][first : first + count], _loaded["tokenizer"], SEED + first
    )
    _loaded["composer"].generator.manual_seed(SEED + first)
    pictures = _loaded["composer"](described, args.size, chunk=AT_ONCE)
    pixels = ((pictures + 1) * 127.5).round().clamp(0, 255)
    return _loaded["inception"](pixels).cpu().numpy().astype(np.float16)


def load_reference(path: Path, count: int, device: torch.device) -> Tensor:
    """The first `count` of the features in a file, `[count, 2048]`."""
    try:
        found = torch.from_numpy(np.load(path)["features"].astype(np.float32))
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"reference_file={str(path)!r}: not what --make-reference writes"
        ) from error
    if len(found) < count:
        raise ValueError(f"reference={count}: there are only {len(found)} scenes in {path}")
    return found[:count].to(device)
