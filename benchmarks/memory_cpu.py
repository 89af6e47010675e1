"""Peak memory of the top level of Stable Diffusion 1.5 on the CPU, with and without merging.

Runs the transformer that SD 1.5 has at full resolution (320 channels, 8 heads, fused attention) on
128x128 and 256x256 tokens, each setting in a process of its own, and notes the process's largest
resident memory. One row of JSON per setting goes to benchmarks/results/memory_cpu.jsonl.

    python benchmarks/memory_cpu.py [--original FOLDER] [--sides 128 256]

FOLDER holds tomesd 0.1.3 (`pip install --no-deps --target FOLDER tomesd==0.1.3`).
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "memory_cpu.jsonl"
# Tensors get pages of their own, which go back when they are freed, and the matrix library keeps no
# buffers: the resident memory is then what is in use, and not what is kept for later.
ENV = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MKL_DISABLE_FAST_MM": "1"}
SETTINGS = {
    "unpatched": None,
    "attention": {},
    "everything": {"merge_crossattn": True, "merge_mlp": True},
}


def measure(side: int, setting: str, ratio: float, original: str | None) -> dict:
    """Runs one setting in this process and returns its row."""
    if original:
        sys.path.insert(0, original)
    import diffusers
    import torch

    import tomesd

    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(320,),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("UpBlock2D",),
        mid_block_type=None,
        cross_attention_dim=768,
        attention_head_dim=8,
    ).eval()
    text = torch.randn(1, 77, 768)
    options = SETTINGS[setting]
    if options is not None:
        tomesd.apply_patch(unet, ratio=ratio, **options)
    with torch.inference_mode():
        unet(torch.randn(1, 4, 16, 16), torch.tensor(500), text)  # loads the code it needs
        latent = torch.randn(1, 4, side, side)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unet(latent, torch.tensor(500), text)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    library = "none" if options is None else "tomesd 0.1.3" if original else "tomesd"
    return {
        "benchmark": "memory_cpu",
        "grid": f"{side}x{side}",
        "library": library,
        "merged": setting,
        "ratio": 0.0 if options is None else ratio,
        "peak_mib": round(peak / 1024),
        "forward_mib": round((peak - before) / 1024),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "tomesd": getattr(tomesd, "__version__", "0.1.3"),
        "machine": f"{platform.machine()} CPU",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--original", help="folder with tomesd 0.1.3")
    parser.add_argument("--sides", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--row", nargs=2, metavar=("SIDE", "SETTING"), help="measure one, print it")
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(int(args.row[0]), args.row[1], args.ratio, args.original)))
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    rows = []
    for side in args.sides:
        for setting in SETTINGS:
            libraries = [None]
            if args.original and SETTINGS[setting] is not None:
                libraries.append(args.original)
            for original in libraries:
                command = [sys.executable, __file__, "--row", str(side), setting]
                command += ["--ratio", str(args.ratio)]
                command += ["--original", original] if original else []
                out = subprocess.run(command, env=ENV, capture_output=True, text=True, check=True)
                out = out.stdout
                rows.append({**json.loads(out.splitlines()[-1]), "commit": commit})
                print(json.dumps(rows[-1]), flush=True)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
