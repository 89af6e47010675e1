"""The tables of docs/performance.md."""

from collections.abc import Iterable

from tomesd.presets import PRESETS

from .rows import ORIGINAL, OURS, Comparison, Results, Row, Table, gained, mib, ms, percent, times

KEPT, EVERY_STEP, EVERY_BLOCK = "plan kept", "plan every step", "plan every block"
STACKS, IF_FASTER = "whole stacks", "if faster"
STEPS = 50
"""Of an image in the paper."""


RATIOS = {"0.5": "half of the tokens", "0.75": "a quarter left"}
MODES = {
    "eager": "",
    "graph": ", CUDA graph",
    "compile-blocks": ", blocks compiled",
    "compile-blocks-graph": ", blocks compiled, CUDA graph",
}


def transformers(results: Results) -> Table:
    """One call of diffusion transformers; with their bounds, where these were measured."""
    order = [*MODES]
    found = results.settings("transformers")
    found.sort(key=lambda one: order.index(one.first["mode"]))
    bounded = any(one.find("free") for one in found)
    header = ["one call of the model, ms", "unpatched"]
    for name in RATIOS.values():
        header += [name, "bound", "recovered"] if bounded else [name]
    lines = []
    for one in found:
        line = [one.first["setting"] + MODES[one.first["mode"]]]
        line.append(gained(one, one.find("unpatched"), spread=True))
        for ratio in RATIOS:
            row = one.find(f"ratio {ratio}")
            line.append(gained(one, row, spread=True))
            if bounded:
                line.append(ms(one.find(f"bound {ratio}")))
                line.append("-" if row is None else percent(one.recovered(row)))
        lines.append([*line, more_memory(one)] if bounded else line)
    return Table([*header, "memory with half"] if bounded else header, lines, rows_of(found))


def more_memory(found: Comparison) -> str:
    """What a call needs besides the weights, unpatched and with half of the tokens."""
    rows = [found.find(label) for label in ("unpatched", "ratio 0.5")]
    if any(row is None or row.get("peak_mib") is None for row in rows):
        return "-"
    before, after = (row["peak_mib"] for row in rows if row is not None)
    return f"{after:,.0f} MiB ({times(after / before)})"


def hires(results: Results) -> Table:
    """The second pass of a large image."""
    last = {(row["model"], row["ratio"]): row for row in results.file("hires_cpu")}
    lines = []
    for model in dict.fromkeys(name for name, _ in last):
        plain, merged = (last[model, ratio] for ratio in (0.0, 0.5))
        cells = [f"{row['seconds']:.1f} ± {row['spread']:.1f} s" for row in (plain, merged)]
        gain = f"{plain['seconds'] / merged['seconds']:.2f}x"
        lines.append([f"embedded {model}", cells[0], f"{cells[1]} ({gain})"])
    header = ["second pass", "unmerged", "half of the tokens"]
    return Table(header, lines, list(last.values()))


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
    measured = [*results.settings("graph"), *tuned.values()]
    return Table(["one step of, ms", *names], lines, rows_of(measured))


def bound(results: Results, section: str) -> Table:
    """The eight settings in a mode, and how much of the possible gain each variant makes."""
    labels = ("unpatched", "original", "free", KEPT, EVERY_STEP, EVERY_BLOCK, STACKS)
    shares = {KEPT: "recovered: kept", EVERY_STEP: "every step", EVERY_BLOCK: "every block"}
    shares["original"] = "0.1.3"
    found = results.settings(section)
    lines = []
    for one in found:
        measured = [one.find(label) for label in shares]
        recovered = ["-" if row is None else percent(one.recovered(row)) for row in measured]
        lines.append([one.first["setting"], *(ms(one.find(label)) for label in labels), *recovered])
    names = ["unpatched", ORIGINAL, "bound", KEPT, EVERY_STEP, EVERY_BLOCK, STACKS]
    return Table(["setting", *names, *shares.values()], lines, rows_of(found))


def graph(results: Results) -> Table:
    return bound(results, "graph")


def eager(results: Results) -> Table:
    return bound(results, "eager")


def compiled(results: Results) -> Table:
    order = [one.first["setting"] for one in results.settings("graph")]
    modes = {"compile": "default", "compile-autotune": "autotune"}
    labels = ("unpatched", EVERY_BLOCK, IF_FASTER, STACKS)
    found = results.settings("compile")
    found.sort(
        key=lambda one: ([*modes].index(one.first["mode"]), order.index(one.first["setting"]))
    )
    lines = [
        [
            one.first["setting"],
            modes[one.first["mode"]],
            *(gained(one, one.find(label), spread=True) for label in labels),
        ]
        for one in found
    ]
    header = ["setting", "mode", "compiled", *(f"with {label}" for label in labels[1:])]
    return Table(header, lines, rows_of(found))


def paper_speed(results: Results) -> Table:
    """Time and memory per image of the paper's set-up, at its ratios."""
    [found] = results.settings("paper")
    lines = [["unpatched", *per_image(found, found.find("unpatched")), "-", "-"]]
    merged = {(r["settings"]["ratio"], r["variant"]): r for r in found if r["settings"]}
    for ratio in sorted({ratio for ratio, _ in merged}):
        cells = [per_image(found, merged.get((ratio, kind))) for kind in ("original", "tomesd")]
        lines.append([f"{100 * ratio:.0f}", *cells[0], *cells[1]])
    header = ["r %", f"{ORIGINAL}: s / image", "GiB / image", f"{OURS}: s / image", "GiB / image"]
    return Table(header, lines, list(found))


def per_image(found: Comparison, row: Row | None) -> list[str]:
    """Seconds and GiB, and how they compare with the unpatched model's."""
    if row is None or row["seconds"] is None:
        return [ms(row), "-"]
    seconds, gib = row["seconds"] * STEPS / row["images"], row["peak_mib"] / row["images"] / 1024
    base = found.find("unpatched")
    if base is None or base is row:
        return [f"{seconds:.2f}", f"{gib:.2f}"]
    memory = row["peak_mib"] / base["peak_mib"]
    return [f"{seconds:.2f} ({times(found.speedup(row))})", f"{gib:.2f} ({times(memory)})"]


def by_batch(results: Results, section: str) -> Table:
    found = results.settings(section)
    lines = [
        [
            f"{one.first['width']} px",
            str(one.first["images"]),
            one.first["mode"],
            *(gained(one, one.find(kind)) for kind in ("unpatched", "original", "tomesd")),
        ]
        for one in found
    ]
    header = ["size", "images", "mode", "unpatched", ORIGINAL, OURS]
    return Table(header, lines, rows_of(found))


def batches(results: Results) -> Table:
    return by_batch(results, "batches")


def sdxl(results: Results) -> Table:
    return by_batch(results, "sdxl")


def by_setting(found: list[Comparison], names: dict[str, str], *, spread: bool = False) -> Table:
    """Times of each setting; `names` has the label of a variant and the title of its column."""
    lines = [
        [one.first["setting"], *(gained(one, one.find(label), spread=spread) for label in names)]
        for one in found
    ]
    return Table(["setting", *names.values()], lines, rows_of(found))


def pipelines(results: Results) -> Table:
    names = {"unpatched": "unpatched", "original": ORIGINAL, "tomesd": OURS}
    return by_setting(results.settings("pipelines"), names, spread=True)


def presets(results: Results) -> Table:
    names = {name: name for name in ("unpatched", "default", *PRESETS)}
    return by_setting(results.settings("presets"), names)


def memory(results: Results) -> Table:
    names = {"unpatched": "unpatched", "original": ORIGINAL, KEPT: KEPT, EVERY_BLOCK: EVERY_BLOCK}
    found = results.settings("eager")
    lines = [[one.first["setting"], *(mib(one.find(label)) for label in names)] for one in found]
    return Table(["setting", *names.values()], lines, rows_of(found))


MATCHING = {
    "triton": "Triton",
    "triton, one window": "Triton, one window",
    "reference": "PyTorch",
    "original": "0.1.3",
}


def matching(results: Results) -> Table:
    found = [one for one in results.settings("matching") if one.first["mode"] == "graph"]
    lines = [
        [
            f"{one.first['tokens']:,}",
            *(ms(one.find(label)) for label in MATCHING),
            *(mib(one.find(label)) for label in MATCHING),
        ]
        for one in found
    ]
    header = ["tokens", *(f"{n}: ms" for n in MATCHING.values())]
    return Table([*header, *(f"{n}: MiB" for n in MATCHING.values())], lines, rows_of(found))


def sharing(results: Results) -> Table:
    """Ways to save matching, and what they do to images."""
    rows = [row for row in results.file("sharing") if "psnr" in row]
    lines = []
    for row in rows:
        name = ORIGINAL if row["variant"] == "original" else row["variant"]
        name += ", not random" if row["settings"].get("use_rand") is False else ""
        layers = "everything, levels 1-4" if row["layers"] == "all" else "self-attention, level 1"
        gain = (
            f"{row['psnr_gain']:+.2f} ± {row['psnr_gain_ci95']:.2f}" if "psnr_gain" in row else "-"
        )
        scores = [f"{row['psnr']:.2f}", f"{row['ssim']:.3f}", gain]
        lines.append([f"{row['ratio']:g}", layers, name, *scores])
    header = ["ratio", "merged", "matching", "PSNR", "SSIM", "PSNR to 0.1.3's, image by image"]
    return Table(header, lines, rows)


def cpu(results: Results) -> Table:
    [found] = results.settings("cpu")
    merged = {(r["settings"]["ratio"], r["variant"]): r for r in found if r["settings"]}
    lines = [["0", *2 * [ms(found.find("unpatched"))]]]
    for ratio in sorted({ratio for ratio, _ in merged}):
        rows = [merged.get((ratio, kind)) for kind in ("original", "tomesd")]
        lines.append([f"{ratio:g}", *(gained(found, row) for row in rows)])
    return Table(["ratio", ORIGINAL, OURS], lines, list(found))


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


def rule(results: Results) -> Table:
    """What `when="if_faster"` decides, against what was measured last."""
    last = {}
    for row in results.file("rule"):
        if "mode" in row and (row["launch_measured"] or row["launch"] != QUICK):
            names = ("section", "mode", "setting", "label", "ratio")
            last[tuple(str(row[name]) for name in names)] = row
    lines = [
        [
            row["setting"] + ("" if " r ." in row["setting"] else f", r {row['ratio']:g}"),
            row["mode"],
            row["label"] if row["label"] in (EVERY_BLOCK, STACKS) else "-",
            "-" if row["launch"] == 0 else f"{1e6 * row['launch']:.0f}" + unknown_host(row),
            "merges" if row["merges"] else "left alone",
            times(row["expected"]),
            times(row["measured"]),
            f"{percent(loss(row))}" if loss(row) else "-",
        ]
        for row in last.values()
        if row["label"] not in (KEPT, EVERY_STEP, IF_FASTER)
    ]
    header = ["setting", "mode", "plan", "host, us", "decision", "expected", "measured"]
    return Table([*header, "a wrong sign costs"], lines)


QUICK = 5e-6
"""Seconds that a quick host takes to start a kernel."""


def unknown_host(row: Row) -> str:
    return "" if row["launch_measured"] else " (assumed)"


def loss(row: Row) -> float:
    """What the wrong decision costs, as a share of the time of the right one; 0 if it is right."""
    gain = row["measured"]
    if gain is None or row["merges"] == (gain > 1):
        return 0.0
    return float(max(gain, 1 / gain) - 1)


def wrong_signs(results: Results) -> Table:
    """How often the rule is wrong, over all rows that tell how long merging takes."""
    groups: dict[str, list[Row]] = {}
    for row in results.file("rule"):
        if row.get("measured") is not None:
            host = "starts one graph" if row["launch"] == 0 else f"{1e6 * row['launch']:.0f} us"
            known = "measured in the same run" if row["launch_measured"] else f"{host}, assumed"
            groups.setdefault(host if row["launch"] == 0 else known, []).append(row)
    lines = []
    for host, rows in groups.items():
        wrong = [row for row in rows if loss(row)]
        clear = [row for row in wrong if loss(row) > row["noise"]]
        most = percent(max((loss(row) for row in wrong), default=0.0))
        lines.append([host, str(len(rows)), str(len(wrong)), str(len(clear)), most])
    header = ["host", "decisions", "wrong signs", "by more than the spread", "the worst costs"]
    return Table(header, lines)


def rule_elsewhere(results: Results) -> Table:
    """What the rule would decide on GPUs that nothing was measured on."""
    found: dict[str, dict[tuple[str, float], Row]] = {}
    for row in results.file("rule"):
        if row.get("simulated"):
            found.setdefault(row["setting"], {})[(row["machine"], row["launch"])] = row
    columns = list(dict.fromkeys(key for rows in found.values() for key in rows))
    lines = [
        [name, *(times(rows[c]["expected"]) if rows[c]["merges"] else "-" for c in columns)]
        for name, rows in found.items()
    ]
    titles = [f"{name}, {1e6 * launch:.0f} us" for name, launch in columns]
    return Table(["simulated", *titles], lines)


def rows_of(found: Iterable[Comparison]) -> list[Row]:
    return [row for one in found for row in one]
