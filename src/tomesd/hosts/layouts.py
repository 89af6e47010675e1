"""Readers of layouts: they find a transformer's image tokens from the arguments of a call.

Each reader takes the model and its arguments, and returns a `Layout`. `LATENTS` describes the input
of its models.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..compiler import never_traced
from ..layout import Layout, LayoutPart
from ..regions import Given
from ..state import Grid

Reader = Callable[[Any, Given], Layout]


@dataclass(frozen=True)
class Latent:
    """The input of the models that share a reader."""

    axes: str
    """Axes after the batch, of the latent or its tokens, as names of sizes in `Example`."""
    frames: bool = False
    """Whether it can be a video."""
    references: bool = False
    """Whether reference images can come with it."""


LATENTS: dict[Reader, Latent] = {}


def reads(axes: str, **more: bool) -> Callable[[Reader], Reader]:
    """Registers the input of the models that a reader is for; see `Latent`."""

    def note(reader: Reader) -> Reader:
        LATENTS[reader] = Latent(axes, **more)
        return reader

    return note


_IMAGE = "in_channels height width"
_VIDEO = "in_channels frames height width"
_PACKED = "tokens in_channels"


def layout_on(size: tuple[int, int], grid: Grid, *more: LayoutPart) -> Layout:
    """The layout of an image or a video, followed by those of `more` that have tokens."""
    return Layout(size, grid, (LayoutPart.on(grid), *[part for part in more if part.tokens]))


def _patches(module: Any, frames: int, h: int, w: int) -> Layout:
    """The layout of a latent of which each patch becomes a token."""
    config = module.config
    patch = config.get("patch_size") or 1
    sides = (patch,) if isinstance(patch, int) else patch
    long = config.get("patch_size_t") or config.get("temporal_patch_size")
    long, side = long or (sides[0] if len(sides) == 3 else 1), sides[-1]
    return layout_on((h, w), (frames // long, h // side, w // side))


@reads(_IMAGE)
def from_image(module: Any, given: Given) -> Layout:
    """The model takes a latent `[B, C, H, W]`, and each patch becomes a token."""
    return _patches(module, 1, *given[given.names[0]].shape[-2:])


@reads(_VIDEO, frames=True)
def from_video(module: Any, given: Given) -> Layout:
    """The model takes a latent `[B, C, F, H, W]`, and each patch becomes a token."""
    return _patches(module, *given[given.names[0]].shape[-3:])


@reads("whole_frames in_channels height width", frames=True)
def from_frames_first(module: Any, given: Given) -> Layout:
    """As `from_video`, with frames before channels: `[B, F, C, H, W]`."""
    frames, _, h, w = given["hidden_states"].shape[1:]
    return replace(_patches(module, frames, h, w), axes=(0, 2, 1, 3, 4))


@reads("frames height width visual_channels", frames=True)
def from_channels_last(module: Any, given: Given) -> Layout:
    """As `from_video`, with channels last: `[B, F, H, W, C]`."""
    return replace(_patches(module, *given["hidden_states"].shape[1:4]), axes=(0, 4, 1, 2, 3))


@reads("in_channels video_length height width")
def from_frames(module: Any, given: Given) -> Layout:
    """As `from_video`, but blocks work on single frames, which are folded into the batch."""
    layout = from_video(module, given)
    return layout_on(layout.size, (1, *layout.grid[1:]))


@reads(_VIDEO, frames=True)
def from_hunyuan_video(module: Any, given: Given) -> Layout:
    """As `from_video`. A given first frame is left alone, as it has a modulation of its own."""
    layout = from_video(module, given)
    if module.config.get("image_condition_type") != "token_replace":
        return layout
    t, h, w = layout.grid
    rest = (t - 1, h, w)
    return Layout(layout.size, rest, (LayoutPart(h * w), LayoutPart.on(rest)))


@reads("video_tokens in_channels", frames=True)
def from_ltx(module: Any, given: Given) -> Layout:
    """Tokens are packed; the grid is given. Tokens of conditions precede the video."""
    grid, conditions = _packed_video(given)
    layout = layout_on(grid[1:], grid)
    return replace(layout, parts=(conditions, *layout.parts)) if conditions.tokens else layout


@reads("video_tokens in_channels", frames=True)
def from_ltx2(module: Any, given: Given) -> Layout:
    """As `from_ltx`, but tokens of keyframes and references follow the video."""
    grid, conditions = _packed_video(given)
    return layout_on(grid[1:], grid, conditions)


def _packed_video(given: Given) -> tuple[Grid, LayoutPart]:
    """The grid of the generated video, and the tokens that are not on it, which are left alone."""
    t, h, w = (int(given[name]) for name in ("num_frames", "height", "width"))
    return (t, h, w), LayoutPart(given["hidden_states"].shape[1] - t * h * w)


@reads(_IMAGE)
def from_lumina2(module: Any, given: Given) -> Layout:
    """As `from_image`, after text whose length differs between prompts."""
    layout = from_image(module, given)
    return replace(layout, start=given["encoder_attention_mask"].sum(dim=1))


_SEQUENCE_MULTIPLE = 32  # Z-Image pads images and captions to a multiple of it


@reads(_IMAGE)
def from_z_image(module: Any, given: Given) -> Layout:
    """The model takes a list of latents `[C, F, H, W]`. If their sizes differ, nothing merges."""
    latents = given["x"]
    shapes = {tuple(latent.shape[1:]) for latent in latents if isinstance(latent, Tensor)}
    side = given["patch_size"] or 2
    if len(shapes) != 1 or given["siglip_feats"] is not None:
        return _nothing(latents[0])
    ((frames, h, w),) = shapes
    grid = (frames, h // side, w // side)
    padding = -(grid[0] * grid[1] * grid[2]) % _SEQUENCE_MULTIPLE
    return layout_on((h, w), grid, LayoutPart(padding))


def _nothing(latent: Any) -> Layout:
    """A layout in which nothing merges, for items without a grid in common."""
    while isinstance(latent, list | tuple):
        latent = latent[0]
    h, w = latent.shape[-2:]
    return Layout((h, w), (1, h, w), (LayoutPart(h * w),))


@reads(_IMAGE)
def from_hidream(module: Any, given: Given) -> Layout:
    """As `from_image`, but images that are not square are padded to the longest sequence."""
    layout = from_image(module, given)
    _, h, w = layout.grid
    if h == w:
        return layout
    return layout_on(layout.size, layout.grid, LayoutPart(module.max_seq - h * w))


@reads(_IMAGE, references=True)
def from_bria_fibo2(module: Any, given: Given) -> Layout:
    """As `from_image`, followed by references, which are latents too."""
    layout, side = from_image(module, given), module.config["patch_size"]
    shapes = [latent.shape[-2:] for latent in given["context_latents"] or ()]
    return _images([layout.grid, *((1, h // side, w // side) for h, w in shapes)], side)


def _images(grids: Sequence[Any], side: int = 2, made: int = 1) -> Layout:
    """The layout of images in a row: first `made` generated ones, then references."""
    whole = [(int(f), int(h), int(w)) for f, h, w in grids]
    parts = [LayoutPart.on(grid, reference=i >= made) for i, grid in enumerate(whole)]
    _, h, w = whole[0]
    return Layout((side * h, side * w), whole[0], tuple(parts))


@reads(_PACKED, references=True)
def from_qwen(module: Any, given: Given) -> Layout:
    """Tokens are packed; the grids are given: the generated image first, then references."""
    shapes = given["img_shapes"]
    while not isinstance(shapes[0][0], int):  # a list per item, or of the first item only
        shapes = shapes[0]
    layered = module.config.get("use_layer3d_rope") and len(shapes) > 1
    return _images(shapes, made=len(shapes) - 1 if layered else 1)


@reads(_PACKED)
def from_qwen21(module: Any, given: Given) -> Layout:
    """As `from_qwen`, but the generated image comes last, after the text and the references in
    it."""
    return _images([given["img_shapes"][0][-1]])


@reads(_PACKED)
def from_nucleus(module: Any, given: Given) -> Layout:
    """Tokens are packed; a grid per item is given, and all items have the same."""
    shapes = given["img_shapes"]
    return _images([shapes if isinstance(shapes[0], int) else shapes[0]])


@reads("tokens in_channels 1 2 2", references=True)
def from_joy_image_plus(module: Any, given: Given) -> Layout:
    """Patches are packed; the grids of each item are given: the generated image first, then
    references. If items differ, nothing merges."""
    shapes = given["shape_list"]
    if any(other != shapes[0] for other in shapes):
        return _nothing(given["hidden_states"])
    return _images(shapes[0])


@reads(_PACKED, references=True)
def from_ids(module: Any, given: Given) -> Layout:
    """Tokens are packed; `img_ids` `[N, axes]` has their positions: image or frame, row, column.

    Reading them makes the CPU wait for the GPU, so the layout is cached for the lifetime of the
    tensor; pipelines pass the same one at every step.
    """
    return _layout_of(given["img_ids"])


@reads(_PACKED, references=True)
def from_flux2(module: Any, given: Given) -> Layout:
    """As `from_ids`. If the keys of references are cached between steps, tokens have modulations of
    their own, and nothing merges."""
    layout = _layout_of(given["img_ids"])
    return layout if given["kv_cache_mode"] is None else layout.left_alone()


@reads(_PACKED, references=True)
def from_flux3(module: Any, given: Given) -> Layout:
    """As `from_ids`, followed by references, whose ids are a separate argument."""
    layout, ids = _layout_of(given["img_ids"]), given["image_cond_ids"]
    more = () if ids is None else _layout_of(ids).parts
    references = [replace(part, reference=True) for part in more]
    return replace(layout, parts=(*layout.parts, *references))


@reads(_PACKED)
def from_krea2(module: Any, given: Given) -> Layout:
    """As `from_ids`, with ids of the whole sequence, `[T + N, 3]`."""
    return _layout_of(given["position_ids"], given["hidden_states"].shape[1])


@reads("sequence in_channels")
def from_ideogram4(module: Any, given: Given) -> Layout:
    """As `from_ids`, with ids of the whole sequence, `[B, T + N, 3]`, and the role of each token,
    `[B, T + N]`."""
    return _layout_of(given["position_ids"], roles=given["indicator"])


@never_traced("the positions of tokens are in img_ids")
def _layout_of(ids: Tensor, tokens: int | None = None, roles: Tensor | None = None) -> Layout:
    """The layout of tokens with positions `[..., N, axes]`.

    Args:
        tokens: how many of the last tokens are the image's; None: all of them.
        roles: of each token, `[B, N]`; the image's are the last ones that share a role.
    """
    if ids not in _layouts:
        places = (ids if ids.ndim == 2 else ids[0]).cpu()
        if roles is not None:
            others = (roles[0] != roles[0, -1]).nonzero()
            places = places[int(others[-1]) + 1 if len(others) else 0 :]
        _layouts[ids] = _read_ids(places if tokens is None else places[-tokens:])
    return _layouts[ids]


_layouts: Any = WeakTensorKeyDictionary()


def _read_ids(places: Tensor) -> Layout:
    """The layout of tokens with positions `[N, axes]`: the second and third axis are row and
    column, and the others tell images apart, the first of which is the generated one."""
    image = places[:, [axis for axis in range(places.shape[1]) if axis not in (1, 2)]]
    changes = (image[1:] != image[:-1]).any(dim=1).nonzero().flatten() + 1
    parts = []
    for first, last in itertools.pairwise([0, *changes.tolist(), len(places)]):
        rows, columns = (_ranks(places[first:last, axis]) for axis in (1, 2))
        h, w = int(rows.max()) + 1, int(columns.max()) + 1
        # Tokens that are not in row-major order are not on a known grid.
        on_grid = h * w == last - first and bool((rows * w + columns).diff().eq(1).all())
        grid = (1, h, w) if on_grid else None
        parts.append(LayoutPart(last - first, grid, bool((image[first] != image[0]).any())))
    target = next((p.grid for p in parts if p.grid is not None and not p.reference), None)
    grid = target or (1, 1, len(places))
    return Layout((2 * grid[1], 2 * grid[2]), grid, tuple(parts))


def _ranks(values: Tensor) -> Tensor:
    """The rank of each value among the distinct ones, `[N]`: positions may be fractional."""
    return values.unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
