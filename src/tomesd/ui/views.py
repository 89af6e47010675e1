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
    steps, left_out = len(result.maps), sum(result.left_out)
    merged = sum(map is not None for map in result.maps)
    words = f"Merged at {merged} of {steps} steps"
    words += f", and a part of the model left out at {left_out}" if left_out else ""
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
        ("Fastest step", f"{unmerged.step_seconds:.3f} s", f"{merged.step_seconds:.3f} s"),
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
    merged = [map for map in result.maps if map is not None]
    if not merged:
        return "all", "all"
    left = sorted({int(map.slot.max()) + 1 for map in merged})
    words = f"{left[0]:,}" if len(left) == 1 else f"{left[0]:,} to {left[-1]:,}"
    if len(merged) < len(result.maps):
        words += f" at {len(merged)} of {len(result.maps)} steps"
    return f"{merged[0].slot.size:,}", words
