"""The tables of docs/performance.md."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

from tomesd.bench.tables import duration, percent, times

from .rows import ORIGINAL, OURS, TITLES, Columns, Comparison, Results, Row, Table, has, latest

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
STARTERS = {"eager": "PyTorch", "compile": "compiled code", "compile-blocks": "compiled code"}
"""What starts kernels, by mode; in all others it is a CUDA graph."""
COMPILED = {"compile": "default", "compile-autotune": "autotune"}
MATCHING = {
    "triton": "Triton",
    "triton, one window": "Triton, one window",
    "reference": "PyTorch",
    "original": "0.1.3",
}
SHARES = {KEPT: "recovered: kept", EVERY_STEP: "every step", EVERY_BLOCK: "every block"}
SHARES["original"] = "0.1.3"
WAYS = ("kv 0.5, proportional", "kv 0.75, window 8", "stack 0.5, end 0.7")
SETTING = {"setting": "{setting}"}
SIZE = {"size": "{width} px", "images": "{images}", "mode": "{mode}"}

# What a cell says of a row in a comparison, or of there being none.


def time(_: Comparison, row: Row | None) -> str:
    """Milliseconds, or in a word why there are none."""
    return "-" if row is None else duration(row)


def memory(found: Comparison, row: Row | None) -> str:
    failed = row is None or row["seconds"] is None
    return time(found, row) if failed else f"{row['peak_mib']:,.0f}"


def gain(found: Comparison, row: Row | None, *, spread: bool = False) -> str:
    """Milliseconds, with their spread if asked for, and how many times as fast as unpatched."""
    if row is None or row["seconds"] is None:
        return time(found, row)
    spread = spread and row["spread"] > 0  # none is known of a single call
    cell = duration(row) + (f" ± {1000 * row['spread']:.1f}" if spread else "")
    alone = ", left alone" if row.get("left_alone") else ""
    is_base = row["variant"] == "unpatched"
    return cell if is_base else f"{cell} ({times(found.speedup(row))}{alone})"


steady_gain = partial(gain, spread=True)


def share(found: Comparison, row: Row | None) -> str:
    """How much of what can be gained is gained."""
    return percent(None if row is None else found.recovered(row))


def columns(
    labels: Sequence[str] | Mapping[str, str],
    cell: Callable[..., str],
    of: Callable[[Comparison], Comparison] = lambda one: one,
) -> Columns:
    """A column for the rows with each label, from the comparison of a line or another one."""
    titles = labels if isinstance(labels, Mapping) else {k: TITLES.get(k, k) for k in labels}
    return {
        title: lambda one, label=label: cell(of(one), of(one).find(label))
        for label, title in titles.items()
    }


def section(name: str, *parts: Columns, mode: str = "") -> Callable[[Results], Table]:
    """A table with a line for each setting of a section."""
    return lambda results: Table.of(results.settings(name, mode), *parts)


CALL = {"one call of the model, ms": lambda one: one.first["setting"] + MODES[one.first["mode"]]}


def transformers(results: Results, name: str = "transformers") -> Table:
    """One call of diffusion transformers, with their bounds."""
    found = results.settings(name)
    found.sort(key=lambda one: ([*MODES].index(one.first["mode"]), one.first["setting"]))
    parts = [CALL, columns(["unpatched"], steady_gain)]
    for ratio, title in RATIOS.items():
        parts.append(columns({f"ratio {ratio}": title}, steady_gain))
        parts.append(columns({f"bound {ratio}": "bound"}, time))
        parts.append(columns({f"ratio {ratio}": "recovered"}, share))
    return Table.of(found, *parts, {"memory with half": more_memory})


def transformers_in_short(results: Results) -> Table:
    """The same in few words."""
    found = results.settings("transformers", "eager")
    found.sort(key=lambda one: str(one.first["setting"]))
    merged = columns({f"ratio {ratio}": title for ratio, title in RATIOS.items()}, gain)
    return Table.of(found, CALL, columns(["unpatched"], time), merged)


def more_memory(found: Comparison) -> str:
    """What a call needs besides the weights, unpatched and with half of the tokens."""
    before, after = (found.find(label) or {} for label in ("unpatched", "ratio 0.5"))
    if not (has(before, "peak_mib") and has(after, "peak_mib")):
        return "-"
    return f"{after['peak_mib']:,.0f} MiB ({times(after['peak_mib'] / before['peak_mib'])})"


def hires(results: Results) -> Table:
    """The second pass of a large image."""
    last = {(row["model"], row["ratio"]): row for row in results.file("hires_cpu")}
    lines = []
    for model in dict.fromkeys(name for name, _ in last):
        plain, merged = last[model, 0.0], last[model, 0.5]
        cells = [f"{row['seconds']:.1f} ± {row['spread']:.1f} s" for row in (plain, merged)]
        faster = times(plain["seconds"] / merged["seconds"])
        lines.append([f"embedded {model}", cells[0], f"{cells[1]} ({faster})"])
    return Table(["second pass", "unmerged", "half of the tokens"], lines, list(last.values()))


def speed(results: Results) -> Table:
    """A step replayed as a CUDA graph, as it is and compiled; defaults but for what rows say."""
    found, compiled = results.settings("graph"), results.settings("compile", "compile-autotune")
    tuned = {one.first["setting"]: one for one in compiled}
    labels = {"unpatched": "compiled", EVERY_BLOCK: f"compiled, {OURS}"}
    return Table.of(
        found,
        {"one step of, ms": "{setting}"},
        columns({"unpatched": "unpatched", "original": ORIGINAL, EVERY_BLOCK: OURS}, gain),
        columns(labels, gain, lambda one: tuned[one.first["setting"]]),
        rows=[*found, *compiled],
    )


def compiled(results: Results) -> Table:
    order = [(mode, one.first["setting"]) for mode in COMPILED for one in results.settings("graph")]
    found = results.settings("compile")
    found.sort(key=lambda one: order.index((one.first["mode"], one.first["setting"])))
    mode = {"mode": lambda one: COMPILED[one.first["mode"]]}
    labels = {label: f"with {label}" for label in (EVERY_BLOCK, IF_FASTER, STACKS)}
    return Table.of(found, SETTING, mode, columns({"unpatched": "compiled", **labels}, steady_gain))


def by_ratio(found: Comparison, cells: Callable[..., list[str]]) -> dict[float, list[str]]:
    """For each ratio, what is said of the original and of this library."""
    merged = {(row["settings"]["ratio"], row["variant"]): row for row in found if row["settings"]}
    lines: dict[float, list[str]] = {}
    for ratio, kind in product(sorted({ratio for ratio, _ in merged}), ("original", "tomesd")):
        lines.setdefault(ratio, []).extend(cells(found, merged.get((ratio, kind))))
    return lines


def paper_speed(results: Results) -> Table:
    """Time and memory per image of the paper's set-up, at its ratios."""
    [found] = results.settings("paper")
    lines = [["unpatched", *per_image(found, found.find("unpatched")), "-", "-"]]
    lines += [[f"{100 * ratio:.0f}", *cells] for ratio, cells in by_ratio(found, per_image).items()]
    header = ["r %", f"{ORIGINAL}: s / image", "GiB / image", f"{OURS}: s / image", "GiB / image"]
    return Table(header, lines, list(found))


def per_image(found: Comparison, row: Row | None) -> list[str]:
    """Seconds and GiB, and how they compare with the unpatched model's."""
    if row is None or row["seconds"] is None:
        return [time(found, row), "-"]
    seconds, gib = row["seconds"] * STEPS / row["images"], row["peak_mib"] / row["images"] / 1024
    base = found.find("unpatched")
    if base is None or base is row:
        return [f"{seconds:.2f}", f"{gib:.2f}"]
    more = row["peak_mib"] / base["peak_mib"]
    return [f"{seconds:.2f} ({times(found.speedup(row))})", f"{gib:.2f} ({times(more)})"]


def cpu(results: Results) -> Table:
    [found] = results.settings("cpu")
    unpatched = time(found, found.find("unpatched"))
    merged = by_ratio(found, lambda found, row: [gain(found, row)]).items()
    lines = [["0", unpatched, unpatched], *([f"{ratio:g}", *cells] for ratio, cells in merged)]
    return Table(["ratio", ORIGINAL, OURS], lines, list(found))


def sharing(results: Results) -> Table:
    """Ways to save matching, and what they do to images."""
    rows = [row for row in results.file("sharing") if "psnr" in row]
    merged = {"all": "everything, levels 1-4"}
    for row in rows:
        row["merged"] = merged.get(row["layers"], "self-attention, level 1")
        row["matching"] = ORIGINAL if row["variant"] == "original" else row["variant"]
        if row["settings"].get("use_rand") is False:
            row["matching"] += ", not random"
    first = {"ratio": "{ratio:g}", "merged": "{merged}", "matching": "{matching}"}
    gain = {"PSNR to 0.1.3's, image by image": "{psnr_gain:+.2f} ± {psnr_gain_ci95:.2f}"}
    return Table.of(rows, {**first, "PSNR": "{psnr:.2f}", "SSIM": "{ssim:.3f}", **gain})


def demo(results: Results) -> Table:
    rows = results.file("demo_cpu")
    for row in rows:
        row["gain"] = times(rows[0]["step_seconds"] / row["step_seconds"])
    step = {"a step on two CPU cores": "{step_seconds:.2f} s ({gain})"}
    columns = {"ratio": "{ratio:g}", "tokens": "{tokens:,}", **step}
    return Table.of(rows, {**columns, "PSNR": "{psnr:.1f} dB", "SSIM": "{ssim:.3f}"}, rows=())


def memory_cpu(results: Results) -> Table:
    rows = results.file("memory_cpu")
    mib = {(r["grid"], r["merged"], r["library"]): r["forward_mib"] for r in rows}
    lines = []
    for grid in dict.fromkeys(grid for grid, *_ in mib):
        base = mib[grid, "unpatched", "none"]
        for merged in ("attention", "everything"):
            found = [mib[grid, merged, library] for library in ("tomesd 0.1.3", "tomesd")]
            cells = [f"{value:,} MiB ({times(value / base)})" for value in found]
            lines.append([grid, merged, f"{base:,} MiB", *cells])
    return Table(["tokens", "merged, r = 0.5", "unpatched", ORIGINAL, OURS], lines)


def rule(results: Results) -> Table:
    """What `when="if_faster"` decides, against what was measured last."""
    known = (row for row in results.file("rule") if "mode" in row)
    known = latest(known, "section", "mode", "setting", "label", "ratio")
    rows = [row for row in known if row["label"] not in (KEPT, EVERY_STEP, IF_FASTER)]
    for row in rows:
        row["setting"] += "" if " r ." in row["setting"] else f", r {row['ratio']:g}"
        row["plan"] = row["label"] if row["label"] in (EVERY_BLOCK, STACKS) else "-"
        row["decision"] = "merges" if row["merges"] else "left alone"
    columns: Columns = {
        **{"setting": "{setting}", "mode": "{mode}", "plan": "{plan}"},
        **{"decision": "{decision}", "expected": "{expected:.2f}x", "measured": "{measured:.2f}x"},
        "a wrong sign costs": lambda row: percent(loss(row) or None),
    }
    return Table.of(rows, columns, rows=())


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
        if has(row, "measured"):
            groups.setdefault(STARTERS.get(row["mode"], "a CUDA graph"), []).append(row)
    columns: Columns = {
        "kernels are started by": lambda group: group[0],
        "decisions": lambda group: str(len(group[1])),
        "wrong signs": lambda group: str(sum(loss(row) > 0 for row in group[1])),
        "by more than the spread": lambda group: str(sum(loss(r) > r["noise"] for r in group[1])),
        "the worst costs": lambda group: percent(max(map(loss, group[1]))),
    }
    return Table.of(groups.items(), columns, rows=())


def rule_elsewhere(results: Results) -> Table:
    """What the rule would decide on GPUs that nothing was measured on."""
    found: dict[str, dict[str, str]] = {}
    for row in results.file("rule"):
        if row.get("simulated"):
            title = f"{row['machine']}, {1e6 * row['launch']:.0f} us"
            line = found.setdefault(row["setting"], {"simulated": row["setting"]})
            line[title] = times(row["expected"] if row["merges"] else None)
    titles = dict.fromkeys(title for line in found.values() for title in line)
    return Table([*titles], [[line[t] for t in titles] for line in found.values()])


def operations(results: Results) -> Table:
    """What is left of the operations of a step, and of an image with each preset."""
    found: dict[str, dict[str, Row]] = {}
    for row in results.file("operations"):
        found.setdefault(row["setting"], {})[row["label"]] = row
    cells = {"half of the tokens": ("half", "merged"), "a quarter left": ("quarter", "merged")}
    cells |= {"left out": ("fast", "left_out"), "attention too": ("attention", "left_out")}
    cells["coarse"] = ("fast", "coarse")
    cells |= {name: (name, "image") for name in ("quality", "balanced", "fast")}
    lines = [
        [name, f"{rows['fast']['flops'] / 1e12:.1f}"]
        + [
            percent(rows[label][field] or None) if label in rows else "-"
            for label, field in cells.values()
        ]
        for name, rows in found.items()
    ]
    sources = [row for rows in found.values() for row in rows.values()]
    return Table(["", "Tflop a step", *cells], lines, sources)


BOUND = columns(["unpatched", "original", "free", KEPT, EVERY_STEP, EVERY_BLOCK, STACKS], time)
IN_MEMORY = columns(["unpatched", "original", KEPT, EVERY_BLOCK], memory)
BY_LIBRARY = ["unpatched", "original", "tomesd"]
UNMERGED = {"unpatched": "unpatched"}
WITH_PRESETS = {f"preset {name}": f"`{name}`" for name in ("quality", "balanced", "fast")}
BESIDE = UNMERGED | {"tomesd": "`ratio=0.5`"} | WITH_PRESETS

TABLES: dict[str, Callable[[Results], Table]] = {
    "demo": demo,
    "speed": speed,
    "large images": hires,
    "memory on a CPU": memory_cpu,
    "transformers": transformers,
    "attention of transformers": partial(transformers, name="transformers-attention"),
    "transformers in short": transformers_in_short,
    **{name: section(name, SETTING, BOUND, columns(SHARES, share)) for name in ("graph", "eager")},
    "compiled": compiled,
    "the paper's set-up": paper_speed,
    **{name: section(name, SIZE, columns(BY_LIBRARY, gain)) for name in ("batches", "sdxl")},
    "whole images": section("pipelines", SETTING, columns(BESIDE, steady_gain)),
    "whole images of transformers": section(
        "transformers-images", SETTING, columns(UNMERGED | WITH_PRESETS, gain)
    ),
    "ways to merge": section("presets", SETTING, columns(["unpatched", "default", *WAYS], gain)),
    "memory": section("eager", SETTING, IN_MEMORY),
    "matching": section(
        "matching",
        {"tokens": "{tokens:,}"},
        columns({label: f"{title}: ms" for label, title in MATCHING.items()}, time),
        columns({label: f"{title}: MiB" for label, title in MATCHING.items()}, memory),
        mode="graph",
    ),
    "rule": rule,
    "wrong signs": wrong_signs,
    "rule elsewhere": rule_elsewhere,
    "operations": operations,
    "cheaper matching": sharing,
    "cpu": cpu,
}
