"""What the page says about a result, in words and tables."""

import html
from typing import Literal

from ..generation.lines import arguments
from ..presets import changed
from .job import Result


def note(words: str, kind: Literal["info", "good", "warning", "error"] = "info") -> str:
    """A line on the page. An empty one takes no space."""
    role = "alert" if kind == "error" else "status"
    return f'<div class="note {kind}" role="{role}">{html.escape(words)}</div>' if words else ""


def summary(result: Result) -> str:
    """The line that says what came out of a job."""
    did = {
        "merged tokens": sum(bool(step.maps) for step in result.steps),
        "ran on a coarser image": sum(bool(s.map and s.map.coarse) for s in result.steps),
        "left out a part of the model": sum(step.reused for step in result.steps),
    }
    *most, last = [f"{n} {words}" for words, n in did.items() if n] or ["none merged tokens"]
    words = f"Of {len(result.steps)} steps, {', '.join(most)}{' and ' if most else ''}{last}"
    if result.alike:
        words += ": both images are the same."
    else:
        words += f": {result.speedup:.2f} times as fast as unmerged, in one run."
    if result.reused:
        words += " The unmerged image and its numbers are those of the image before."
    lines = [note(words, "info" if result.alike or result.speedup < 1 else "good")]
    return "".join(lines + [note(f"{words}.", "warning") for words in result.warnings])


def numbers(result: Result) -> str:
    """Time, memory and tokens of both images, as a table in Markdown."""
    unmerged, merged = result.unmerged, result.merged
    rows = [
        ("", "unmerged", "merged"),
        ("---", "---:", "---:"),
        ("Image", f"{unmerged.seconds:.2f} s", f"{merged.seconds:.2f} s"),
        ("Step, on average", f"{unmerged.step_seconds:.3f} s", f"{merged.step_seconds:.3f} s"),
        ("Peak memory", *(_memory(one.peak_mib) for one in (unmerged, merged))),
        ("Tokens on the finest merged grid", *_tokens(result)),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _memory(mib: float | None) -> str:
    return "not measured" if mib is None else f"{mib:.0f} MiB"


def caption(result: Result) -> str:
    """Below a picture in the gallery."""
    options = {k: v for k, v in changed(result.request.settings).items() if k != "seed"}
    return f"{result.number}. {arguments(options) or 'default settings'}"


def _tokens(result: Result) -> tuple[str, str]:
    merged = [step.map for step in result.steps if step.maps and step.map is not None]
    if not merged:
        return "all", "all"
    left = sorted({map.slots for map in merged})
    words = f"{left[0]:,}" if len(left) == 1 else f"{left[0]:,} to {left[-1]:,}"
    if len(merged) < len(result.steps):
        words += f" at {len(merged)} of {len(result.steps)} steps"
    return f"{merged[0].slot.size:,}", words
