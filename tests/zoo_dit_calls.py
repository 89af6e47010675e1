"""What is special about some calls of the tiny transformers of `zoo_dit`.

Each function takes the inputs of a plain call and its height, width and frames, all of the latent,
and gives the inputs that are different, or that there are besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models import embeddings
from torch import Tensor
from zoo_diffusers import TEXT

Inputs = dict[str, Any]
Change = Callable[[Inputs, int, int, int], Inputs]


# Texts of different lengths.
def uneven(name: str, end: int | None = None) -> Change:
    """Item k hides its last k tokens, those before `end`, in a mask `[B, tokens]`. The mask is made
    for the text if a model may go without."""

    def change(inputs: Inputs, *_: int) -> Inputs:
        mask = inputs.get(name)
        if mask is None:
            mask = torch.ones(inputs["encoder_hidden_states"].shape[:2], dtype=torch.bool)
        return {name: _shorter(mask, end)}

    return change


def _shorter(mask: Tensor, end: int | None = None) -> Tensor:
    mask = mask.clone()
    stop = end or mask.shape[1]
    for k in range(len(mask)):
        mask[k, stop - k : stop] = False
    return mask


def second_text(inputs: Inputs, *_: int) -> Inputs:
    """A text of letters in the picture, shorter in the second item."""
    batch = len(inputs["hidden_states"])
    return {
        "encoder_attention_mask_2": _shorter(torch.ones(batch, 5, dtype=torch.bool)),
        "encoder_hidden_states_2": torch.zeros(batch, 5, 24),
    }


def fibo_texts(inputs: Inputs, *_: int) -> Inputs:
    """Texts so different in length that the model makes more of one than of the other."""
    batch, _, tokens, _ = inputs["encoder_hidden_states"].shape
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[1:2, 4:] = False
    return {"encoder_attention_mask": mask}


def long_caption(inputs: Inputs, *_: int) -> Inputs:
    """The second item has more caption than is filled up to 32 tokens."""
    captions = inputs["cap_feats"]
    more = [captions[0].new_zeros(40, captions[0].shape[1])] if len(captions) > 1 else []
    return {"cap_feats": [captions[0], *more, *captions[2:]]}


def text_lengths(inputs: Inputs, *_: int) -> Inputs:
    return {"text_lens": TEXT - torch.arange(len(inputs["text_lens"]))}


# References of 2 x 3 tokens.
def _zeros(hidden: Tensor) -> Tensor:
    """The tokens of a reference for a picture `[B, N, ...]`."""
    return hidden.new_zeros(len(hidden), 6, *hidden.shape[2:])


def _behind(hidden: Tensor) -> Tensor:
    """A picture and a reference `[B, N + 6, ...]`."""
    return torch.cat([hidden, _zeros(hidden)], dim=1)


def _places(image: int, like: Tensor) -> Tensor:
    """Ids `[6, axes]` of a reference."""
    ids = torch.cartesian_prod(*map(torch.arange, (1, 2, 3, 1)))[:, : like.shape[1]].to(like)
    ids[:, 0] = image
    return ids


def reference_flux(inputs: Inputs, *_: int) -> Inputs:
    """Behind the picture, as Kontext and Flux 2 have it."""
    ids = inputs["img_ids"]
    more = _places(1 if ids.shape[1] == 3 else 10, ids)
    return {"hidden_states": _behind(inputs["hidden_states"]), "img_ids": torch.cat([ids, more])}


def reference_flux3(inputs: Inputs, *_: int) -> Inputs:
    """In an argument of its own."""
    return {
        "image_cond_hidden_states": _zeros(inputs["hidden_states"]),
        "image_cond_ids": _places(10, inputs["img_ids"]),
    }


def reference_qwen(inputs: Inputs, *_: int) -> Inputs:
    """Behind the picture."""
    return {
        "hidden_states": _behind(inputs["hidden_states"]),
        "img_shapes": [[*shapes, (1, 2, 3)] for shapes in inputs["img_shapes"]],
    }


def reference_joy(inputs: Inputs, *_: int) -> Inputs:
    """Behind the picture, with texts of different lengths."""
    return {
        "hidden_states": _behind(inputs["hidden_states"]),
        "shape_list": [[*shapes, (1, 2, 3)] for shapes in inputs["shape_list"]],
        **uneven("encoder_hidden_states_mask")(inputs, *_),
    }


def keyframe_ltx2(inputs: Inputs, *_: int) -> Inputs:
    """Tokens of a keyframe behind the video, and where all of them are: `[B, 3, tokens, 2]`."""
    tokens = _behind(inputs["hidden_states"])
    places = torch.arange(tokens.shape[1], dtype=torch.float32)[:, None].expand(-1, 2)
    return {"hidden_states": tokens, "video_coords": places.repeat(len(tokens), 3, 1, 1)}


def reference_fibo(inputs: Inputs, *_: int) -> Inputs:
    """A latent in an argument of its own."""
    hidden = inputs["hidden_states"]
    return {"context_latents": [hidden.new_zeros(len(hidden), hidden.shape[1], 4, 6)]}


# Times of frames; the first frame is given, without noise.
def _times(time: Tensor, per_frame: int, frames: int) -> Tensor:
    """`[B, frames * per_frame]`."""
    times = time[:, None].repeat(1, frames * per_frame)
    times[:, :per_frame] = -1
    return times


def diffusion_forcing(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """A time per frame: `[B, frames]`."""
    times = _times(inputs["timestep"], 1, frames)
    return {"timestep": times, "enable_diffusion_forcing": True}


def any_times(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """As AnyFlow has it: two times per frame, `[B, frames]`."""
    times = _times(inputs["timestep"][:, 0], 1, frames)
    return {"timestep": times, "r_timestep": times}


def time_per_frame(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """As Cosmos has it for video to world: `[B, 1, frames, 1, 1]`."""
    return {"timestep": _times(inputs["timestep"], 1, frames)[:, None, :, None, None]}


def time_per_token(patch: int) -> Change:
    """As Wan 2.2 5B and LTX have it: `[B, tokens]`."""

    def change(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
        time = inputs["timestep"]
        times = _times(time, (height // patch) * (width // patch), frames)
        audio = {"audio_timestep": time} if "audio_hidden_states" in inputs else {}
        return {"timestep": times, **audio}

    return change


# Rotary positions that pipelines make: (cos, sin), each `[tokens, head width]`.
def cogvideox_rope(frames_per_token: int = 1) -> Change:
    def change(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
        grid = (height // 2, width // 2)
        rope = embeddings.get_3d_rotary_pos_embed(
            embed_dim=16,
            crops_coords=None,
            grid_size=grid,
            temporal_size=-(-frames // frames_per_token),
            grid_type="slice",
            max_size=grid,
        )
        return {"image_rotary_emb": rope}

    return change


def hunyuan_dit_rope(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    grid = (height // 2, width // 2)
    rope = embeddings.get_2d_rotary_pos_embed(16, ((0, 0), grid), grid, output_type="pt")
    return {"image_rotary_emb": rope}


def lumina_rope(inputs: Inputs, *_: int) -> Inputs:
    """`[384, 384, head width]`, complex."""
    return {"image_rotary_emb": embeddings.get_2d_rotary_pos_embed_lumina(16, 384, 384)}


def allegro_rope(inputs: Inputs, height: int, width: int, frames: int) -> Inputs:
    """Tables for frames, rows and columns, and the positions in them as they are."""
    grid = (height // 2, width // 2)
    *tables, _, _, _ = embeddings.get_3d_rotary_pos_embed_allegro(
        24, ((0, 0), grid), grid, frames, (2.2, 2.0, 2.0)
    )
    return {"image_rotary_emb": (tuple(tables), inputs["image_rotary_emb"][1])}
