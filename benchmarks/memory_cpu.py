"""Peak memory of the top level of Stable Diffusion 1.5 on the CPU, for docs/performance.md.

    python benchmarks/memory_cpu.py --original FOLDER

Runs the transformer that SD 1.5 has at full resolution (320 channels, 8 heads, fused attention) on
128x128 and 256x256 tokens, each variant in a process of its own, and notes by how much the
process's largest resident memory grows. FOLDER holds tomesd 0.1.3. Rows are added to
results/memory_cpu.jsonl.
"""

import argparse
import multiprocessing
import os
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import diffusers
import torch
from common import RESULTS

from tomesd import Settings
from tomesd.bench import Contender, RowFile

HALF = {
    "attention": Settings(ratio=0.5),
    "everything": Settings(ratio=0.5, merge_crossattn=True, merge_mlp=True),
}
LIBRARIES = {"tomesd": "tomesd", "original": "tomesd 0.1.3"}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@torch.inference_mode()
def growth_mib(variant: Contender, side: int) -> int:
    """MiB that one call adds to the peak of this process."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        **{"block_out_channels": (320,), "layers_per_block": 1, "mid_block_type": None},
        **{"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("UpBlock2D",)},
        **{"cross_attention_dim": 768, "attention_head_dim": 8},
    ).eval()
    text = torch.randn(1, 77, 768)
    variant.apply(unet)
    unet(torch.randn(1, 4, 16, 16), torch.tensor(500), text)  # loads the code it needs
    latent, before = torch.randn(1, 4, side, side), peak_mib()
    unet(latent, torch.tensor(500), text)
    return round(peak_mib() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", required=True, help="folder with tomesd 0.1.3")
    parser.add_argument("--sides", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--out", type=Path, default=RESULTS / "memory_cpu.jsonl")
    args = parser.parse_args()
    # Tensors get pages of their own, which go back when they are freed, and the matrix library
    # keeps no buffers: the resident memory is then what is in use, and not what is kept for later.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MKL_DISABLE_FAST_MM": "1"}
    variants = {("unpatched", "none"): Contender("unpatched")}
    for merged, settings in HALF.items():
        for kind, library in LIBRARIES.items():
            variants[merged, library] = Contender(kind, settings, folder=args.original)
    file = RowFile(args.out, torch.device("cpu"))
    for side in args.sides:
        for (merged, library), variant in variants.items():
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                mib = process.submit(growth_mib, variant, side).result()
            row = {"benchmark": "memory_cpu", "grid": f"{side}x{side}", "merged": merged}
            print(file.add({**row, "library": library, "forward_mib": mib}), flush=True)


if __name__ == "__main__":
    main()
