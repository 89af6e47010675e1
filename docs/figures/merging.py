"""Draws merging.svg: a small picture's tokens, merged by the library itself.

python docs/figures/merging.py
"""

from pathlib import Path

import torch

from tomesd.kernels import Cells, draw_key, draw_offsets
from tomesd.plan import MergePlan
from tomesd.selectors import bipartite

SIDE, CELL, RATIO = 16, 2, 0.5
PIXEL, GAP, TOP = 13, 92, 64
COLUMNS = 8  # of the list of merged tokens
INK, DIM = "#1f2933", "#7b8794"


def picture() -> torch.Tensor:
    """A sun over a hill, `[SIDE * SIDE, 3]` in 0 to 1."""
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    image = torch.empty(SIDE, SIDE, 3)
    image[:] = torch.tensor([0.62, 0.80, 0.95])
    image += 0.035 * (y / SIDE)[..., None]
    sun = (x - 4.5) ** 2 + (y - 4.5) ** 2 < 9
    image[sun] = torch.tensor([0.98, 0.78, 0.25])
    hill = y > 11.4 - 2.6 * torch.cos((x - 11.0) / 3.2)
    image[hill] = torch.tensor([0.38, 0.62, 0.36])
    image[hill] += 0.05 * torch.sin(3.0 * x[hill] + 5.0 * y[hill])[:, None]
    return image.clamp(0, 1).reshape(-1, 3)


def color(rgb: torch.Tensor) -> str:
    return "#" + "".join(f"{round(255 * v):02x}" for v in rgb.tolist())


def tokens(left: float, colors: torch.Tensor) -> list[str]:
    out = []
    for i, rgb in enumerate(colors):
        y, x = divmod(i, SIDE)
        out.append(
            f'<rect x="{left + x * PIXEL}" y="{TOP + y * PIXEL}" width="{PIXEL}" '
            f'height="{PIXEL}" fill="{color(rgb)}" stroke="white" stroke-width="0.6"/>'
        )
    return out


def cells_and_destinations(left: float, dst: list[int]) -> list[str]:
    size, step = SIDE * PIXEL, CELL * PIXEL
    out = []
    for k in range(0, SIDE // CELL + 1):
        a, b = left + k * step, TOP + k * step
        out.append(f'<path d="M{a} {TOP}v{size}M{left} {b}h{size}" stroke="{INK}"/>')
    for token in dst:
        y, x = divmod(token, SIDE)
        cx, cy = left + (x + 0.5) * PIXEL, TOP + (y + 0.5) * PIXEL
        out.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{INK}" stroke="white"/>')
    return out


def borders(left: float, slot: list[int]) -> list[str]:
    """Lines between neighbours in different slots."""
    path = ""
    for i, own in enumerate(slot):
        y, x = divmod(i, SIDE)
        if x + 1 < SIDE and slot[i + 1] != own:
            path += f"M{left + (x + 1) * PIXEL} {TOP + y * PIXEL}v{PIXEL}"
        if y + 1 < SIDE and slot[i + SIDE] != own:
            path += f"M{left + x * PIXEL} {TOP + (y + 1) * PIXEL}h{PIXEL}"
    return [f'<path d="{path}" stroke="{INK}" stroke-width="1"/>']


def text(
    x: float, y: float, words: str, size: int = 14, fill: str = INK, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}"{weight}>{words}</text>'


def arrow(x: float, words: str) -> list[str]:
    y = TOP + SIDE * PIXEL / 2
    return [
        f'<path d="M{x + 14} {y}h{GAP - 34}" stroke="{DIM}" stroke-width="2"/>',
        f'<path d="M{x + GAP - 22} {y - 5}l9 5l-9 5z" fill="{DIM}"/>',
        text(x + GAP / 2 - 4, y - 10, words, 12, DIM),
    ]


def merged_list(left: float, plan: MergePlan, colors: torch.Tensor) -> list[str]:
    """The M merged tokens as a list, wrapped into columns."""
    out = []
    for i, rgb in enumerate(plan.merge(colors[None])[0]):
        y, x = divmod(i, COLUMNS)
        out.append(
            f'<rect x="{left + x * PIXEL}" y="{TOP + y * PIXEL}" width="{PIXEL - 3}" '
            f'height="{PIXEL - 3}" rx="3" fill="{color(rgb)}"/>'
        )
    return out


def main() -> None:
    colors = picture()
    cells = Cells.of(SIDE, SIDE, CELL, CELL)
    offsets = draw_offsets(cells.count, cells.choices, draw_key(0, 1), torch.tensor([500]))
    plan = bipartite(colors[None] - 0.5, cells, cells.removable(RATIO), offsets=offsets)
    dst = cells.split(offsets)[1][0].tolist()
    width = SIDE * PIXEL
    second, third = width + GAP, 2 * (width + GAP)
    fourth = third + COLUMNS * PIXEL + GAP
    slot = plan.slot[0].tolist()
    mean = plan.unmerge(plan.merge(colors[None]))[0]
    count = plan.size.shape[1]
    parts = [
        *tokens(0, colors),
        *cells_and_destinations(0, dst),
        *arrow(width, "match"),
        *tokens(second, mean),
        *borders(second, slot),
        *arrow(second + width, "merge"),
        *merged_list(third, plan, colors),
        *arrow(third + COLUMNS * PIXEL, "layer"),
        *tokens(fourth, mean),
    ]
    titles = [
        (0, "1. Partition", f"{SIDE * SIDE} tokens; one of each 2x2 cell"),
        (second, "2. Match", "half of the tokens join the most"),
        (third, "3. Merge", f"{count} means"),
        (fourth, "4. Run, then unmerge", "each token gets the output"),
    ]
    second_lines = ["is a destination (dot)", "similar destination", "go on", "of its slot"]
    for (x, title, line), more in zip(titles, second_lines, strict=True):
        parts.append(text(x, 18, title, 15, bold=True))
        parts += [text(x, 36, line, 12, DIM), text(x, 51, more, 12, DIM)]
    total = fourth + width
    height = TOP + SIDE * PIXEL + 4
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -4 {total + 16} {height + 8}" '
        f'width="{total + 16}" font-family="Helvetica, Arial, sans-serif" fill="none">'
        f'<rect x="-8" y="-4" width="{total + 16}" height="{height + 8}" fill="white"/>'
        + "\n".join(parts)
        + "</svg>\n"
    )
    Path(__file__).with_suffix(".svg").write_text(svg.replace("<text", '<text text-anchor="start"'))


if __name__ == "__main__":
    main()
