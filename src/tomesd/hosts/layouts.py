"""Where transformers have their image tokens: read from the arguments of the model.

Each reader takes the model and its arguments, and gives a `Layout`. `LATENTS` says what its models
get.
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

__all__ = [
    "LATENTS", "from_bria_fibo2", "from_channels_last", "from_flux2", "from_flux3", "from_frames",
    "from_frames_first", "from_hidream", "from_hunyuan_video", "from_ideogram4", "from_ids",
    "from_image", "from_joy_image_plus", "from_krea2", "from_ltx", "from_lumina2", "from_nucleus",
    "from_qwen", "from_qwen21", "from_video", "from_z_image", "layout_on",
    "reads",
]  # fmt: skip

Reader = Callable[[Any, Given], Layout]


@dataclass(frozen=True)
class Latent:
    """What models with one kind of layout get."""

    axes: str
    """Of the latent or its tokens, after the batch: names of sizes in `Example`."""
    frames: bool = False
    """Whether it may be a video."""
    references: bool = False
    """Whether reference images may come with it."""


LATENTS: dict[Reader, Latent] = {}


def reads(axes: str, **more: bool) -> Callable[[Reader], Reader]:
    """Notes what models get whose layout a function reads; see `Latent`."""

    def note(reader: Reader) -> Reader:
        LATENTS[reader] = Latent(axes, **more)
        return reader

    return note


_IMAGE = "in_channels height width"
_VIDEO = "in_channels frames height width"
_PACKED = "tokens in_channels"


def layout_on(size: tuple[int, int], grid: Grid, *more: LayoutPart) -> Layout:
    """The layout of an image or a video, and of what comes after it, if that has tokens."""
    return Layout(size, grid, (LayoutPart.on(grid), *[part for part in more if part.tokens]))


def _patches(module: Any, frames: int, h: int, w: int) -> Layout:
    """A token for each patch of a latent."""
    config = module.config
    patch = config.get("patch_size") or 1
    sides = (patch,) if isinstance(patch, int) else patch
    long = config.get("patch_size_t") or config.get("temporal_patch_size")
    long, side = long or (sides[0] if len(sides) == 3 else 1), sides[-1]
    return layout_on((h, w), (frames // long, h // side, w // side))


@reads(_IMAGE)
def from_image(module: Any, given: Given) -> Layout:
    """The model gets a latent `[B, C, H, W]`, and makes a token of each patch."""
    return _patches(module, 1, *given[given.names[0]].shape[-2:])


@reads(_VIDEO, frames=True)
def from_video(module: Any, given: Given) -> Layout:
    """The model gets a latent `[B, C, F, H, W]`, and makes a token of each patch."""
    return _patches(module, *given[given.names[0]].shape[-3:])


@reads("whole_frames in_channels height width", frames=True)
def from_frames_first(module: Any, given: Given) -> Layout:
    """Frames come before channels: `[B, F, C, H, W]`."""
    frames, _, h, w = given["hidden_states"].shape[1:]
    return replace(_patches(module, frames, h, w), axes=(0, 2, 1, 3, 4))


@reads("frames height width visual_channels", frames=True)
def from_channels_last(module: Any, given: Given) -> Layout:
    """`[B, F, H, W, C]`."""
    return replace(_patches(module, *given["hidden_states"].shape[1:4]), axes=(0, 4, 1, 2, 3))


@reads("in_channels video_length height width")
def from_frames(module: Any, given: Given) -> Layout:
    """Blocks work on each frame by itself, folded into the batch."""
    layout = from_video(module, given)
    return layout_on(layout.size, (1, *layout.grid[1:]))


@reads(_VIDEO, frames=True)
def from_hunyuan_video(module: Any, given: Given) -> Layout:
    """As `from_video`; a first frame that is given has a modulation of its own: left alone."""
    layout = from_video(module, given)
    if module.config.get("image_condition_type") != "token_replace":
        return layout
    t, h, w = layout.grid
    rest = (t - 1, h, w)
    return Layout(layout.size, rest, (LayoutPart(h * w), LayoutPart.on(rest)))


@reads("video_tokens in_channels", frames=True)
def from_ltx(module: Any, given: Given) -> Layout:
    """Tokens are packed; the grid is given. Tokens of conditions come before the video's."""
    t, h, w = (int(given[name]) for name in ("num_frames", "height", "width"))
    layout = layout_on((h, w), (t, h, w))
    before = given["hidden_states"].shape[1] - layout.tokens
    return replace(layout, parts=(LayoutPart(before), *layout.parts)) if before > 0 else layout


@reads(_IMAGE)
def from_lumina2(module: Any, given: Given) -> Layout:
    """Text comes first, and each prompt has its own length."""
    layout = from_image(module, given)
    return replace(layout, start=given["encoder_attention_mask"].sum(dim=1))


_SEQUENCE_MULTIPLE = 32  # Z-Image pads images and captions to it


@reads(_IMAGE)
def from_z_image(module: Any, given: Given) -> Layout:
    """The model gets a list of latents `[C, F, H, W]`, which may differ in size."""
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
    """No grid that all items of the batch have in common."""
    while isinstance(latent, list | tuple):
        latent = latent[0]
    h, w = latent.shape[-2:]
    return Layout((h, w), (1, h, w), (LayoutPart(h * w),))


@reads(_IMAGE)
def from_hidream(module: Any, given: Given) -> Layout:
    """Images that are not square are padded to the longest sequence that the model knows."""
    layout = from_image(module, given)
    _, h, w = layout.grid
    if h == w:
        return layout
    return layout_on(layout.size, layout.grid, LayoutPart(module.max_seq - h * w))


@reads(_IMAGE, references=True)
def from_bria_fibo2(module: Any, given: Given) -> Layout:
    """References are latents too, and come after the image."""
    layout, side = from_image(module, given), module.config["patch_size"]
    shapes = [latent.shape[-2:] for latent in given["context_latents"] or ()]
    return _images([layout.grid, *((1, h // side, w // side) for h, w in shapes)], side)


def _images(grids: Sequence[Any], side: int = 2, made: int = 1) -> Layout:
    """Images one after the other: those that are made, then references."""
    whole = [(int(f), int(h), int(w)) for f, h, w in grids]
    parts = [LayoutPart.on(grid, reference=i >= made) for i, grid in enumerate(whole)]
    _, h, w = whole[0]
    return Layout((side * h, side * w), whole[0], tuple(parts))


@reads(_PACKED, references=True)
def from_qwen(module: Any, given: Given) -> Layout:
    """Tokens are packed; the grids are given: the image first, then references."""
    shapes = given["img_shapes"]
    while not isinstance(shapes[0][0], int):  # those of each item, or of the first
        shapes = shapes[0]
    layered = module.config.get("use_layer3d_rope") and len(shapes) > 1
    return _images(shapes, made=len(shapes) - 1 if layered else 1)


@reads(_PACKED)
def from_qwen21(module: Any, given: Given) -> Layout:
    """As `from_qwen`, but the image comes last, after the text and the references that are in it.
    Where keys of several items are kept together, these cannot run one by one, and none merges."""
    layout = _images([given["img_shapes"][0][-1]])
    apart = given["kv_cache"] is None or given["hidden_states"].shape[0] == 1
    return layout if apart else layout.left_alone()


@reads(_PACKED)
def from_nucleus(module: Any, given: Given) -> Layout:
    """Tokens are packed; the grid of each item is given, and they all have the first one's."""
    shapes = given["img_shapes"]
    return _images([shapes if isinstance(shapes[0], int) else shapes[0]])


@reads("tokens in_channels 1 2 2", references=True)
def from_joy_image_plus(module: Any, given: Given) -> Layout:
    """Patches are packed; the grids of each item are given: its image first, then references."""
    shapes = given["shape_list"]
    if any(other != shapes[0] for other in shapes):
        return _nothing(given["hidden_states"])
    return _images(shapes[0])


@reads(_PACKED, references=True)
def from_ids(module: Any, given: Given) -> Layout:
    """Tokens are packed; each has its place in `img_ids` `[N, axes]`: image or frame, row, column.

    Reading them makes the host wait for the device, so what was read is kept while the tensor
    lives; pipelines give the same one at every step.
    """
    return _layout_of(given["img_ids"])


@reads(_PACKED, references=True)
def from_flux2(module: Any, given: Given) -> Layout:
    """As `from_ids`. Where keys of references are kept from step to step, tokens have modulations
    of their own, and none is merged."""
    layout = _layout_of(given["img_ids"])
    return layout if given["kv_cache_mode"] is None else layout.left_alone()


@reads(_PACKED, references=True)
def from_flux3(module: Any, given: Given) -> Layout:
    """As `from_ids`; references have ids of their own, and come after the image."""
    layout, ids = _layout_of(given["img_ids"]), given["image_cond_ids"]
    more = () if ids is None else _layout_of(ids).parts
    references = [replace(part, reference=True) for part in more]
    return replace(layout, parts=(*layout.parts, *references))


@reads(_PACKED)
def from_krea2(module: Any, given: Given) -> Layout:
    """As `from_ids`, in ids of the whole sequence, `[T + N, 3]`."""
    return _layout_of(given["position_ids"], given["hidden_states"].shape[1])


@reads("sequence in_channels")
def from_ideogram4(module: Any, given: Given) -> Layout:
    """As `from_ids`, in ids of the whole sequence, `[B, T + N, 3]`; what each token is, is given
    too, `[B, T + N]`."""
    return _layout_of(given["position_ids"], roles=given["indicator"])


@never_traced(
    "where tokens are in the image is in img_ids, which no graph can read. Compile in place, "
    "model.compile(fullgraph=True), or call apply_patch after torch.compile"
)
def _layout_of(ids: Tensor, tokens: int | None = None, roles: Tensor | None = None) -> Layout:
    """From places `[.., N, axes]`: those of the last tokens, as many as are said, or as have the
    role of the last one; all, if nothing is said."""
    if ids not in _layouts:
        places = (ids if ids.ndim == 2 else ids[0]).cpu()
        if roles is not None:
            others = (roles[0] != roles[0, -1]).nonzero()
            places = places[int(others[-1]) + 1 if len(others) else 0 :]
        _layouts[ids] = _read_ids(places if tokens is None else places[-tokens:])
    return _layouts[ids]


_layouts: Any = WeakTensorKeyDictionary()


def _read_ids(places: Tensor) -> Layout:
    """From `[N, axes]`: row and column are the second and the third; the others say which image.
    The first image is the one that is made."""
    image = places[:, [axis for axis in range(places.shape[1]) if axis not in (1, 2)]]
    changes = (image[1:] != image[:-1]).any(dim=1).nonzero().flatten() + 1
    parts = []
    for first, last in itertools.pairwise([0, *changes.tolist(), len(places)]):
        rows, columns = (_ranks(places[first:last, axis]) for axis in (1, 2))
        h, w = int(rows.max()) + 1, int(columns.max()) + 1
        # Row by row, or it is no grid that we know.
        on_grid = h * w == last - first and bool((rows * w + columns).diff().eq(1).all())
        grid = (1, h, w) if on_grid else None
        parts.append(LayoutPart(last - first, grid, bool((image[first] != image[0]).any())))
    target = next((p.grid for p in parts if p.grid is not None and not p.reference), None)
    grid = target or (1, 1, len(places))
    return Layout((2 * grid[1], 2 * grid[2]), grid, tuple(parts))


def _ranks(values: Tensor) -> Tensor:
    """Which of the values that occur each one is, `[N]`: places need not be whole numbers."""
    return values.unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
