"""The tables of README.md and docs/options.md."""

import ast
import dataclasses
import inspect
import itertools

from tomesd import Settings
from tomesd.presets import PRESETS

from .quality import speeds
from .rows import ORIGINAL, Results, Table, estimate, times


def options(_: Results) -> Table:
    """The fields of `Settings`; what they mean is in the docstring below each."""
    body = ast.parse(inspect.getsource(Settings)).body[0].body
    meanings = {
        declared.target.id: " ".join(doc.value.value.split())
        for declared, doc in itertools.pairwise(body)
        if isinstance(declared, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
    lines = [
        [f"`{one.name}`", f"`{one.default}`", meanings[one.name]]
        for one in dataclasses.fields(Settings)
    ]
    return Table(["option", "default", "meaning"], lines)


def quality(results: Results) -> Table:
    """The unmerged model, the original and this library at half the tokens, and the presets."""
    front = {row["label"]: row for row in results.quality("front")}
    paper = {row["label"]: row for row in results.quality("paper")}
    [larger] = [one for one in results.settings("presets") if one.first["width"] == 1024]
    rows = {
        "unmerged": (front["unmerged"], "unpatched"),
        f"{ORIGINAL}, `ratio=0.5`": (front["0.1.3 0.5"], "original"),
        "`ratio=0.5`": (paper["this library 0.5"], "default"),
        **{f'`preset="{name}"`': (front[f"preset {name}"], name) for name in PRESETS},
    }
    lines = []
    for name, (row, label) in rows.items():
        scores = [estimate(row, "fid", 1), estimate(row, "lpips", 3), estimate(row, "psnr", 1)]
        found = larger.find(label)
        gain = "1" if label == "unpatched" else times(found and larger.speedup(found))
        lines.append([name, *scores, *speeds(row), gain])
    speed = ["speed-up", "with unfused attention", "of SD 1.5, 1024 px"]
    return Table(["", "FID", "LPIPS", "PSNR", *speed], lines)
