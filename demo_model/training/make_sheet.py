"""Lay sampled pictures out under their captions: `python make_sheet.py samples/main sheet.png`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.nn.functional as F

import tomesd_demo_model
from evaluate import load_folder
from sampling import save_sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", type=int, default=6)
    parser.add_argument("--count", type=int, help="only the first so many")
    parser.add_argument("--side", type=int, help="shrink pictures to so many pixels")
    args = parser.parse_args()
    pictures = load_folder(args.folder, args.count)
    if args.side:
        pictures = F.interpolate(pictures, size=(args.side, args.side), mode="area")
    save_sheet(pictures, args.out, args.columns, tomesd_demo_model.held_out_captions())


if __name__ == "__main__":
    main()
