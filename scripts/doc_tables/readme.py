"""The tables of README.md."""

import ast
import dataclasses
import inspect
import itertools

from tomesd import Settings
from tomesd.presets import PRESETS

from .performance import EVERY_BLOCK
from .quality import speeds
from .rows import ORIGINAL, OURS, Results, Table, estimate, gained


def demo(results: Results) -> Table:
    rows = results.file("demo_cpu")
    lines = []
    for row in rows:
        quality = ["-", "-"]
        if row["psnr"] is not None:
            quality = [f"{row['psnr']:.1f} dB", f"{row['ssim']:.3f}"]
        seconds = row["step_seconds"]
        step = f"{seconds:.2f} s ({rows[0]['step_seconds'] / seconds:.2f}x)"
        lines.append([f"{row['ratio']:g}", f"{row['tokens']:,}", step, *quality])
    return Table(["ratio", "tokens", "a step on two CPU cores", "PSNR", "SSIM"], lines)


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


def speed(results: Results) -> Table:
    """A step replayed as a CUDA graph, as it is and compiled; defaults but for what rows say."""
    tuned = {
        one.first["setting"]: one
        for one in results.settings("compile")
        if one.first["mode"] == "compile-autotune"
    }
    lines = []
    for graph in results.settings("graph"):
        setting = graph.first["setting"]
        cells = [
            gained(graph, graph.find(label)) for label in ("unpatched", "original", EVERY_BLOCK)
        ]
        compiled = tuned[setting]
        cells += [gained(compiled, compiled.find(label)) for label in ("unpatched", EVERY_BLOCK)]
        lines.append([setting, *cells])
    names = ["unpatched", ORIGINAL, OURS, "compiled", f"compiled, {OURS}"]
    return Table(["one step of, ms", *names], lines)


def quality(results: Results) -> Table:
    """The unmerged model, the original and this library at half the tokens, and the presets."""
    front = {row["label"]: row for row in results.quality("front")}
    paper = {row["label"]: row for row in results.quality("paper")}
    rows = {
        "unmerged": front["unmerged"],
        f"{ORIGINAL}, `ratio=0.5`": front["0.1.3 0.5"],
        "`ratio=0.5`": paper["this library 0.5"],
        **{f'`preset="{name}"`': front[f"preset {name}"] for name in PRESETS},
    }
    lines = []
    for name, row in rows.items():
        scores = [estimate(row, "fid", 1), estimate(row, "lpips", 3), estimate(row, "psnr", 1)]
        lines.append([name, *scores, *speeds(row)])
    return Table(["", "FID", "LPIPS", "PSNR", "speed-up", "with unfused attention"], lines)


def memory_cpu(results: Results) -> Table:
    mib = {
        (r["grid"], r["merged"], r["library"]): r["forward_mib"] for r in results.file("memory_cpu")
    }
    lines = []
    for grid in dict.fromkeys(grid for grid, *_ in mib):
        base = mib[grid, "unpatched", "none"]
        for merged in ("attention", "everything"):
            found = [mib[grid, merged, library] for library in ("tomesd 0.1.3", "tomesd")]
            cells = [f"{value:,} MiB ({value / base:.2f}x)" for value in found]
            lines.append([grid, merged, f"{base:,} MiB", *cells])
    return Table(["tokens", "merged, r = 0.5", "unpatched", ORIGINAL, OURS], lines)
