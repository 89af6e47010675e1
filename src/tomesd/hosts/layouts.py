"""Where transformers have their image tokens: read from the arguments of the model.

Each function takes the model and its arguments, and gives a `Layout`.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..policy import Layout, LayoutPart
from ..regions import Given
from ..state import Grid

__all__ = [
    "from_cogvideox",
    "from_flux2",
    "from_frames",
    "from_hidream",
    "from_hunyuan_video",
    "from_ids",
    "from_image",
    "from_ltx",
    "from_lumina2",
    "from_qwen",
    "from_video",
    "from_z_image",
]


def _one(size: tuple[int, int], grid: Grid, padding: int = 0) -> Layout:
    """The layout of an image or a video, and tokens after it that are on no grid."""
    tokens = grid[0] * grid[1] * grid[2]
    parts = (LayoutPart(tokens, grid), *([LayoutPart(padding)] if padding else []))
    return Layout(size, grid, parts)


def from_image(module: Any, given: Given) -> Layout:
    """The model gets a latent `[B, C, H, W]`, and makes a token of each patch."""
    latent = given[given.names[0]]
    h, w = latent.shape[-2:]
    side = module.config.get("patch_size") or 1
    side = side if isinstance(side, int) else side[-1]
    return _one((h, w), (1, h // side, w // side))


def from_video(module: Any, given: Given) -> Layout:
    """The model gets a latent `[B, C, F, H, W]`, and makes a token of each patch."""
    latent = given[given.names[0]]
    frames, h, w = latent.shape[-3:]
    side, config = module.config.get("patch_size") or 1, module.config
    long, side = (side[0], side[-1]) if not isinstance(side, int) else (1, side)
    long = config.get("patch_size_t") or config.get("temporal_patch_size") or long
    return _one((h, w), (frames // long, h // side, w // side))


def from_hunyuan_video(module: Any, given: Given) -> Layout:
    """As `from_video`; a first frame that is given has a modulation of its own: left alone."""
    layout = from_video(module, given)
    if module.config.get("image_condition_type") != "token_replace":
        return layout
    t, h, w = layout.grid
    rest = LayoutPart((t - 1) * h * w, (t - 1, h, w))
    return Layout(layout.size, (t - 1, h, w), (LayoutPart(h * w), rest))


def from_cogvideox(module: Any, given: Given) -> Layout:
    """Frames come before channels: `[B, F, C, H, W]`."""
    frames, _, h, w = given["hidden_states"].shape[1:]
    side, long = module.config["patch_size"], module.config.get("patch_size_t") or 1
    return _one((h, w), (frames // long, h // side, w // side))


def from_frames(module: Any, given: Given) -> Layout:
    """Blocks work on each frame by itself, folded into the batch."""
    layout = from_video(module, given)
    return _one(layout.size, (1, *layout.grid[1:]))


def from_ltx(module: Any, given: Given) -> Layout:
    """Tokens are packed; the grid is given. Tokens of conditions come before the video's."""
    grid = tuple(int(given[name]) for name in ("num_frames", "height", "width"))
    before = given["hidden_states"].shape[1] - grid[0] * grid[1] * grid[2]
    layout = _one((grid[1], grid[2]), (grid[0], grid[1], grid[2]))
    if before > 0:
        return Layout(layout.size, layout.grid, (LayoutPart(before), *layout.parts))
    return layout


def from_lumina2(module: Any, given: Given) -> Layout:
    """Text comes first, and each prompt has its own length."""
    layout = from_image(module, given)
    start = given["encoder_attention_mask"].sum(dim=1)
    return Layout(layout.size, layout.grid, layout.parts, start)


_SEQUENCE_MULTIPLE = 32  # Z-Image pads images and captions to it


def from_z_image(module: Any, given: Given) -> Layout:
    """The model gets a list of latents `[C, F, H, W]`, which may differ in size."""
    latents = given["x"]
    shapes = {tuple(latent.shape[1:]) for latent in latents if isinstance(latent, Tensor)}
    side = given["patch_size"] or 2
    if len(shapes) != 1 or given["siglip_feats"] is not None:
        return _nothing(latents[0])
    ((frames, h, w),) = shapes
    grid = (frames, h // side, w // side)
    return _one((h, w), grid, -(grid[0] * grid[1] * grid[2]) % _SEQUENCE_MULTIPLE)


def _nothing(latent: Any) -> Layout:
    """No grid that all items of the batch have in common."""
    while isinstance(latent, list | tuple):
        latent = latent[0]
    h, w = latent.shape[-2:]
    return Layout((h, w), (1, h, w), (LayoutPart(h * w),))


def from_hidream(module: Any, given: Given) -> Layout:
    """Images that are not square are padded to the longest sequence that the model knows."""
    layout = from_image(module, given)
    _, h, w = layout.grid
    return layout if h == w else _one(layout.size, layout.grid, module.max_seq - h * w)


def from_qwen(module: Any, given: Given) -> Layout:
    """Tokens are packed; the grids are given: the image first, then references."""
    shapes = given["img_shapes"]
    while not isinstance(shapes[0][0], int):  # those of each item, or of the first
        shapes = shapes[0]
    grids = [(int(f), int(h), int(w)) for f, h, w in shapes]
    made = len(grids) - 1 if module.config.get("use_layer3d_rope") and len(grids) > 1 else 1
    parts = [LayoutPart(f * h * w, (f, h, w), i >= made) for i, (f, h, w) in enumerate(grids)]
    _, h, w = grids[0]
    return Layout((2 * h, 2 * w), grids[0], tuple(parts))


def from_ids(module: Any, given: Given) -> Layout:
    """Tokens are packed; each has its place in `img_ids` `[N, axes]`: image or frame, row, column.

    Reading them makes the host wait for the device, so what was read is kept while the tensor
    lives; pipelines give the same one at every step.
    """
    return _layout_of(given["img_ids"])


def from_flux2(module: Any, given: Given) -> Layout:
    """As `from_ids`. Where keys of references are kept from step to step, tokens have modulations
    of their own, and none is merged."""
    layout = _layout_of(given["img_ids"])
    if given["kv_cache_mode"] is None:
        return layout
    return Layout(layout.size, layout.grid, (LayoutPart(layout.tokens),))


def _layout_of(ids: Tensor) -> Layout:
    if ids not in _layouts:
        _layouts[ids] = _read_ids(ids if ids.ndim == 2 else ids[0])
    return _layouts[ids]


# This is torch.compiler.disable.
_layout_of._torchdynamo_disable = True  # type: ignore[attr-defined]
_layout_of._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "where tokens are in the image is in img_ids, which no graph can read. Compile in place, "
    "model.compile(fullgraph=True), or call apply_patch after torch.compile"
)

_layouts: Any = WeakTensorKeyDictionary()


def _read_ids(ids: Tensor) -> Layout:
    places = ids[:, :3].cpu()
    picture = places[:, 0]
    changes = (picture[1:] != picture[:-1]).nonzero().flatten() + 1
    bounds = [0, *changes.tolist(), len(places)]
    parts = []
    for first, last in itertools.pairwise(bounds):
        # Which of the rows and columns there are, since steps between them need not be 1.
        (rows, row), (columns, column) = (
            torch.unique(places[first:last, axis], return_inverse=True) for axis in (1, 2)
        )
        h, w = len(rows), len(columns)
        # Row by row, or it is no grid that we know.
        on_grid = h * w == last - first and bool((row * w + column).diff().eq(1).all())
        grid = (1, h, w) if on_grid else None
        parts.append(LayoutPart(last - first, grid, int(picture[first]) != 0))
    target = next((p.grid for p in parts if p.grid is not None and not p.reference), None)
    grid = target or (1, 1, len(places))
    return Layout((2 * grid[1], 2 * grid[2]), grid, tuple(parts))
