"""The settings of the bound, replayed as a CUDA graph, in eager mode and compiled."""

from tomesd.bench.rows import Row
from tomesd.bench.tables import Comparison, markdown, percent, times

from .document import (
    EVERY_BLOCK,
    EVERY_STEP,
    IF_FASTER,
    KEPT,
    ORIGINAL,
    STACKS,
    Document,
    gained,
    measured,
    mib,
    ms,
    spread,
    title_of,
)
from .figures import plot_recovered


def eight_settings(document: Document, section: str, title: str, words: str) -> None:
    found = document.settings(section)
    if not found:
        return
    stacks = measured(found, [STACKS])
    header = ["setting", "unpatched", ORIGINAL, "bound", KEPT, EVERY_STEP, EVERY_BLOCK, *stacks]
    header += ["recovered: kept", "every step", "every block", "0.1.3"]
    lines = []
    for one in found:
        shown = ["unpatched", "original", "free", KEPT, EVERY_STEP, EVERY_BLOCK, *stacks]
        line = [one.first["setting"], *(ms(one.find(label)) for label in shown)]
        for label in (KEPT, EVERY_STEP, EVERY_BLOCK, "original"):
            row = one.find(label)
            line.append("-" if row is None else percent(one.recovered(row)))
        lines.append(line)
    document.add(title, words + stack_words(found), markdown(header, lines), found)
    name = f"{section}.svg"
    plot_recovered(found, document.figures / name)
    document.picture(name, f"Share of the possible gain that is recovered, {section} mode")


def stack_words(found: list[Comparison]) -> str:
    """On the settings in which whole stacks gain, and beat the bound."""
    ahead = []
    for one in found:
        row, others = one.find(STACKS), [one.seconds("free"), one.seconds("unpatched")]
        if row is None or row["seconds"] is None:
            continue
        if all(other is not None and row["seconds"] < other for other in others):
            times_ms = f"{ms(one.find('unpatched'))} to {ms(row)} ms"
            ahead.append(f"{times_ms} ({times(one.speedup(row))}) in {one.first['setting']}")
    if not ahead:
        return ""
    return f" Whole stacks are faster than the bound: {'; '.join(ahead)}."


def compiled(document: Document) -> None:
    last = document.settings("compile")
    if not last:
        return
    found = [one for runs in document.runs("compile").values() for one in not_replaced(runs)]
    order = [one.first["setting"] for one in document.settings("graph")]
    modes = list(dict.fromkeys(one.first["mode"] for one in found))
    found.sort(key=lambda one: (modes.index(one.first["mode"]), place(one, order)))
    labels = measured(found, ["original", KEPT, EVERY_BLOCK, STACKS, IF_FASTER])
    names = ["0.1.3" if label == "original" else label for label in labels]
    header = ["setting", "mode", "compiled", *(f"with {name}" for name in names), "commit"]
    lines = []
    for one in found:
        mode = one.first["mode"].removeprefix("compile").removeprefix("-") or "default"
        shown = [gained(one, one.find(label), spreads=True) for label in ("unpatched", *labels)]
        lines.append([one.first["setting"], mode, *shown, one.first.get("commit") or "-"])
    words = """
Milliseconds per step, everything compiled in one piece; ± is the spread (interquartile range), and
in brackets, how many times as fast as compiled alone. In the default mode, the host launches the
kernels, those of this library too, past PyTorch's dispatcher. *Autotune* is max-autotune without
coordinate descent, which takes too long to compile here, with matrix products of ATen; it replays
CUDA graphs."""
    if IF_FASTER in labels:
        words += """ All variants merge with `when="always"` but *if faster*: a plan every block
with `when` as it is by default, so that layers are left alone where the host is expected to be the
bottleneck."""
    if any(one not in last for one in found):
        words += """ A second line of a setting is from an earlier run: it is there for the variants
that have no newer row."""
    words += longest_compiled(found) + compiled_memory(last)
    words += "".join(slower_compiled(one, last) for one in last)
    document.add("torch.compile", words, markdown(header, lines), found, shows_commits=True)


def place(found: Comparison, order: list[str]) -> int:
    """Of a setting in a table; behind the last, if the order does not have it."""
    setting = found.first["setting"]
    return order.index(setting) if setting in order else len(order)


def not_replaced(runs: list[Comparison]) -> list[Comparison]:
    """Of the runs of a setting, the last, and earlier ones that have variants it lacks."""
    shown: list[Comparison] = []
    seen: set[str] = set()
    for one in runs:
        labels = {row["label"] for row in one if row["seconds"] is not None}
        if labels - seen:
            shown.append(one)
        seen |= labels
    return shown


def longest_compiled(found: list[Comparison]) -> str:
    """What merging added at most to the time that compiling takes, within one run."""
    pairs = []
    for one in found:
        base = (one.find("unpatched") or {}).get("prepare_seconds")
        merged = [row for row in one if row["variant"] == "tomesd" and row.get("prepare_seconds")]
        pairs += [(row["prepare_seconds"] / base, one, row) for row in merged if base]
    if not pairs:
        return ""
    _, one, row = max(pairs, key=lambda pair: pair[0])
    alone = one.find("unpatched")["prepare_seconds"]
    return f""" With merging, compiling takes longer: at most, {row["prepare_seconds"]:.0f} s
instead of {alone:.0f} ({title_of(one)}, {row["label"]}, many processes at a time).
`compile_repeated_blocks` of Diffusers compiles a block of each kind once."""


def compiled_memory(found: list[Comparison]) -> str:
    """Peak memory with merging, as a share of the compiled model's alone."""
    shares = []
    for one in found:
        base = one.find("unpatched")
        if one.first["mode"] != "compile" or base is None or not base.get("peak_mib"):
            continue  # of a mode that replays graphs, the memory is in the graph's pool
        merged = [one.find(label) for label in (EVERY_BLOCK, STACKS)]
        shares += [
            (row["peak_mib"] / base["peak_mib"], one, row, base)
            for row in merged
            if row is not None and row["seconds"] is not None
        ]
    if not shares:
        return ""
    least = min(share for share, *_ in shares)
    most, one, row, base = max(shares, key=lambda share: share[0])
    return f""" With merging, a step in the default mode takes {least:.2f} to {most:.2f} times the
memory of the compiled model alone; the most in {title_of(one)}, {row["label"]}:
{mib(row)} MiB instead of {mib(base)}."""


def slower_compiled(found: Comparison, others: list[Comparison]) -> str:
    """A paragraph where no merged variant is clearly faster than the compiled model alone."""
    base = found.find("unpatched")
    merged = [found.find(label) for label in (KEPT, EVERY_BLOCK, STACKS)]
    ready = [row for row in merged if row is not None and row["seconds"] is not None]
    if base is None or not ready or base["seconds"] is None:
        return ""
    best = min(ready, key=lambda row: row["seconds"])
    if base["seconds"] - best["seconds"] > max(base["spread"], best["spread"]):
        return ""
    words = f"""

In {title_of(found)}, no merged variant was faster than the compiled model alone by more than the
spread. {host_words(base)}"""
    same = (one.find("unpatched") for one in others if one.first["setting"] == base["setting"])
    faster = (row for row in same if row and row["seconds"] and row["seconds"] < base["seconds"])
    replayed = next(faster, None)
    if replayed is None:
        return words
    return f"""{words} Where graphs are replayed, it took {ms(replayed)} ± {spread(replayed)} ms."""


def host_words(row: Row) -> str:
    host = row.get("host_seconds")
    launched = "" if host is None else f", and the host {1000 * host:.1f} ms to launch it"
    return f"That one took {ms(row)} ± {spread(row)} ms{launched}."
