"""Patched transformers against merging done by hand around the blocks of an unpatched copy.

Item by item: what enters the first block of the run is noted, tokens are merged in loops, rows of
positions, masks and modulation are those of each slot's representative, the blocks run, and each
token gets what its slot gained.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from merging_dit import ALWAYS, SUPPORTED, assert_rounding, block_calls, input_name, patched_model
from torch import Tensor
from zoo_dit import Dit, alone

import tomesd
from tomesd import kernels, selectors
from tomesd.kernels import Cells

Given = dict[str, Any]
PICTURE = [(1, 6, 4)]
VIDEO = [(3, 6, 4)]


@dataclass(frozen=True)
class Hand:
    """How one model is merged by hand."""

    runs: list[tuple[str, range]]
    """Lists of blocks, and which of their blocks merge, in their order."""
    parts: list[tuple[int, int, int] | int]
    """What the sequence is made of: grids of t x h x w tokens, or a number of tokens left alone;
    what comes after is left alone too."""
    cut: Callable[[Given, Tensor], Given]
    """The arguments of a block with the rows of these tokens only."""
    time: Callable[[Tensor], Tensor] = lambda time: time.max()
    image: int | None = None
    """Where the picture is in what the block gives; None: it gives nothing else."""
    text: int | None = None
    pixels: int = 2
    """Side of the patch that becomes a token."""
    tokens_first: bool = False
    """Whether blocks take and give [tokens, batch, channels]."""

    def turned(self, x: Any) -> Any:
        return x.transpose(0, 1) if self.tokens_first else x


def rope_after_text(given: Given, rows: Tensor) -> Given:
    """(cos, sin), [text + image, width] each."""
    texts = given["encoder_hidden_states"].shape[1]
    every = torch.cat([torch.arange(texts), texts + rows])
    cos, sin = given["image_rotary_emb"]
    return given | {"image_rotary_emb": (cos[every], sin[every])}


def rope_of_wan(given: Given, rows: Tensor) -> Given:
    """(cos, sin), [1, tokens, 1, width] each; modulation [1, tokens, 6, C] or for all tokens."""
    cos, sin = given["rotary_emb"]
    temb = given["temb"]
    return given | {
        "rotary_emb": (cos[:, rows], sin[:, rows]),
        "temb": temb[:, rows] if temb.ndim == 4 else temb,
    }


def rope_of_qwen(given: Given, rows: Tensor) -> Given:
    """Positions of picture and text apart; which of two modulations a token has, [1, tokens]."""
    picture, text = given["image_rotary_emb"]
    index = given.get("modulate_index")
    return given | {
        "image_rotary_emb": (picture[rows], text),
        "modulate_index": None if index is None else index[:, rows],
    }


def rope_of_z_image(given: Given, rows: Tensor) -> Given:
    """Positions of the whole sequence, [1, tokens, width], and a mask of it, if there is one."""
    mask = given["attn_mask"]
    return given | {
        "freqs_cis": given["freqs_cis"][:, rows],
        "attn_mask": None if mask is None else mask[:, rows],
    }


def rope_of_hunyuan(given: Given, rows: Tensor) -> Given:
    """Positions of the video, and a mask of video and text, [1, 1, 1, tokens]."""
    name = "freqs_cis" if "freqs_cis" in given else "image_rotary_emb"
    cos, sin = given[name]
    mask = given["attention_mask"]
    texts = torch.arange(len(cos), mask.shape[-1])
    every = torch.cat([rows, texts])
    return given | {name: (cos[rows], sin[rows]), "attention_mask": mask[..., every]}


def rows_of(count: str = "", **axes: int) -> Callable[[Given, Tensor], Given]:
    """Arguments with a row for each token of the sequence on an axis; those of a text may follow.
    In `count`, the number of tokens that are made."""

    def cut(given: Given, rows: Tensor) -> Given:
        tokens = next(given[n].shape[1] for n in ("hidden_states", "x", "vis") if n in given)
        if "temb" in axes and axes["temb"] == 0:  # [tokens, batch, channels]
            tokens = given["x"].shape[0]

        def cut_one(value: Any, axis: int) -> Any:
            if isinstance(value, dict):
                return {name: cut_one(part, axis) for name, part in value.items()}
            if isinstance(value, tuple | list):
                return type(value)(cut_one(part, axis) for part in value)
            if value is None or value.shape[axis] == 1:
                return value
            after = torch.arange(tokens, value.shape[axis])
            return value.index_select(axis, torch.cat([rows, after]))

        made = {count: given[count] - tokens + len(rows)} if count else {}
        return given | made | {name: cut_one(given[name], axes[name]) for name in axes}

    return cut


def rows_of_flux3(given: Given, rows: Tensor) -> Given:
    return rope_after_text(given, rows) | {"temb_mod": given["temb_mod"][:, rows]}


def rows_of_nucleus(given: Given, rows: Tensor) -> Given:
    """Positions of picture and text apart, and a mask of both in a dictionary."""
    every = torch.cat([rows, torch.arange(24, 24 + 7)])
    masks = {name: mask[:, every] for name, mask in given["attention_kwargs"].items()}
    picture, text = given["image_rotary_emb"]
    return given | {"image_rotary_emb": (picture[rows], text), "attention_kwargs": masks}


def rows_of_ideogram(given: Given, rows: Tensor) -> Given:
    cos, sin = given["image_rotary_emb"]
    mask = given["attention_mask"][:, :, rows][..., rows]
    return given | {"image_rotary_emb": (cos[:, rows], sin[:, rows]), "attention_mask": mask}


DUAL, SINGLE = "transformer_blocks", "single_transformer_blocks"
FLUX_RUNS = [(DUAL, range(1, 3)), (SINGLE, range(3))]
HANDS: dict[str, Hand] = {
    "flux": Hand(FLUX_RUNS, PICTURE, rope_after_text, image=1, text=0),
    "flux_kontext": Hand(FLUX_RUNS, [(1, 6, 4), (1, 2, 3)], rope_after_text, image=1, text=0),
    "sd3": Hand([(DUAL, range(1, 3))], PICTURE, lambda given, rows: given, image=1, text=0),
    "sd35": Hand([(DUAL, range(1, 3))], PICTURE, lambda given, rows: given, image=1, text=0),
    "wan": Hand([("blocks", range(1, 3))], VIDEO, rope_of_wan),
    "wan_ti2v": Hand([("blocks", range(1, 3))], VIDEO, rope_of_wan),
    "qwen_edit": Hand([(DUAL, range(1, 3))], [(1, 6, 4), (1, 2, 3)], rope_of_qwen, image=1, text=0),
    "qwen_edit_2511": Hand(
        [(DUAL, range(1, 3))], [(1, 6, 4), (1, 2, 3)], rope_of_qwen, image=1, text=0
    ),
    "zimage_uneven": Hand(
        [("layers", range(1, 3))], PICTURE, rope_of_z_image, time=lambda time: 1 - time
    ),
    "hunyuan_video": Hand(
        [(DUAL, range(1, 3)), (SINGLE, range(2))], VIDEO, rope_of_hunyuan, image=0, text=1
    ),
    "hunyuan_video_uneven": Hand(
        [(DUAL, range(1, 3)), (SINGLE, range(2))], VIDEO, rope_of_hunyuan, image=0, text=1
    ),
    "hunyuan_video_i2v": Hand(
        [(DUAL, range(1, 3)), (SINGLE, range(2))],
        [24, (2, 6, 4)],
        rope_of_hunyuan,
        image=0,
        text=1,
    ),
    "flux3_edit": Hand(
        [(SINGLE, range(1, 3))], [(1, 6, 4), (1, 2, 3)], rows_of_flux3, image=1, text=0
    ),
    "krea2": Hand(
        [(DUAL, range(1, 3))],
        [7, (1, 6, 4)],
        rows_of(image_rotary_emb=0, attention_mask=3),
    ),
    "qwen21": Hand(
        [(DUAL, range(1, 3))],
        [7, (1, 6, 4)],
        rows_of(rotary_emb=0, target_token_mask=0, key_valid=1),
    ),
    "nucleus": Hand([(DUAL, range(1, 3))], PICTURE, rows_of_nucleus),
    "ernie": Hand(
        [("layers", range(1, 3))],
        PICTURE,
        rows_of(rotary_pos_emb=1, temb=0, attention_mask=3),
        pixels=1,
        tokens_first=True,
    ),
    "ideogram4": Hand(
        [("layers", range(1, 3))], [7, (1, 6, 4)], rows_of_ideogram, time=lambda time: 1 - time
    ),
    "bria_fibo2": Hand(
        [("layers", range(1, 3))],
        [8, (1, 6, 4), (1, 2, 3)],
        rows_of(freqs_cis=1, noise_mask=1),
    ),
    "joyimage_plus": Hand(
        [("double_blocks", range(1, 3))],
        [(1, 6, 4), (1, 2, 3)],
        rows_of(image_rotary_emb=1, attention_mask=3),
        image=0,
        text=1,
    ),
    "helios": Hand(
        [("blocks", range(1, 3))],
        [40, (3, 4, 4)],
        rows_of("original_context_length", rotary_emb=1, temb=1),
    ),
    "anyflow": Hand([("blocks", range(1, 3))], VIDEO, rows_of(rotary_emb=2, temb=1)),
    "cosmos_v2w": Hand(
        [(DUAL, range(1, 3))],
        VIDEO,
        rows_of(image_rotary_emb=0, extra_pos_emb=1, temb=1, embedded_timestep=1),
    ),
}


def slots_of(x: Tensor, hand: Hand, time: Tensor) -> list[list[int]]:
    """The tokens of each slot, its representative first."""
    slots, start = [], 0
    for part in [*hand.parts, x.shape[1]]:
        if isinstance(part, int):
            stop = min(start + part, x.shape[1])
            slots += [[token] for token in range(start, stop)]
            start = stop
            continue
        frames, h, w = part
        cells = Cells.of(h, w, 2, 2, 8)
        for frame in range(frames):
            first = start + frame * h * w
            plan = selectors.bipartite(
                x[:, first : first + h * w],
                cells,
                h * w // 2,
                backend="reference",
                timestep=time,
                key=kernels.draw_key(0, hand.pixels),
            )
            for slot, kept in enumerate(plan.kept[0].tolist()):
                others = [n for n in range(h * w) if plan.slot[0, n] == slot and n != kept]
                slots.append([first + token for token in (kept, *others)])
        start += frames * h * w
    return slots


def merged_by_hand(x: Tensor, slots: list[list[int]]) -> Tensor:
    return torch.stack([x[0, tokens].mean(dim=0) for tokens in slots])[None]


def restored_by_hand(x: Tensor, gain: Tensor, slots: list[list[int]]) -> Tensor:
    restored = x.clone()
    for slot, tokens in enumerate(slots):
        for token in tokens:
            restored[0, token] += gain[0, slot]
    return restored


def run_by_hand(model: Any, dit: Dit, inputs: Given, hand: Hand, extra: Any = None) -> Tensor:
    """The output of an unpatched model that is handed what merged blocks would have given.

    Args:
        inputs: of one item.
        extra: what is added to all tokens after a block, by its place in its list.
    """
    name = input_name(model)
    time = hand.time(next(inputs[n] for n in ("timestep", "t") if n in inputs))
    slots: list[list[int]] = []
    with torch.no_grad(), block_calls(model) as calls:
        dit.run(model, inputs)
        x = text = None
        for path, blocks in hand.runs:
            given_to = {block: args for block, args in reversed(calls)}
            given = given_to[f"{path}.{blocks[0]}"]
            if x is None:
                x, text = hand.turned(given[name]), given.get("encoder_hidden_states")
                slots = slots_of(x, hand, time)
                rows = torch.tensor([tokens[0] for tokens in slots])
            merged = now = merged_by_hand(x, slots)
            for number in blocks:
                cut = hand.cut(given_to[f"{path}.{number}"], rows)
                cut[name] = hand.turned(now)
                if hand.text is not None:
                    cut["encoder_hidden_states"] = text
                output = getattr(model, path)[number](**cut)
                now = hand.turned(output if hand.image is None else output[hand.image])
                text = text if hand.text is None else output[hand.text]
                if extra is not None:  # all tokens again, so that it can be added
                    x = restored_by_hand(x, now - merged, slots) + extra[number]
                    merged = now = merged_by_hand(x, slots)
            x = restored_by_hand(x, now - merged, slots)
    path, blocks = hand.runs[-1]
    last = getattr(model, path)[blocks[-1] + 1]
    changes = {name: hand.turned(x)} | (
        {} if hand.text is None else {"encoder_hidden_states": text}
    )
    with last.register_forward_pre_hook(_giving(last, changes), with_kwargs=True):
        return dit.run(model, inputs)


def _giving(block: Any, changes: Given) -> Callable[..., Any]:
    """A hook that gives a block other arguments."""
    signature = inspect.signature(block.forward)

    def change(module: Any, args: tuple, kwargs: Given) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(changes)
        return bound.args, bound.kwargs

    return change


@pytest.mark.parametrize("name", HANDS)
def test_as_by_hand(name: str) -> None:
    dit, hand = SUPPORTED[name], HANDS[name]
    inputs = dit.inputs(batch=2)
    merged = dit.run(patched_model(dit), inputs)
    for k in range(2):
        one = alone(inputs, k)
        expected = run_by_hand(dit.build(), dit, one, hand)
        plain = dit.run(dit.build(), one)
        assert (expected - plain).std() > 0.02 * plain.std()
        assert_rounding(merged[k], expected[0])


@pytest.mark.parametrize("name", ["sd3", "qwen_edit"])
def test_controlnet_residuals_between_blocks_as_by_hand(name: str) -> None:
    """What is added between blocks is added to all tokens, not to merged ones."""
    dit, hand = SUPPORTED[name], HANDS[name]
    model, inputs = dit.build(), alone(dit.inputs(), 0)
    with block_calls(model) as calls:
        dit.run(model, inputs)
    shape = calls[0][1]["hidden_states"].shape
    generator = torch.Generator().manual_seed(3)
    residuals = [torch.randn(shape, generator=generator) for _ in range(4)]
    argument = "block_controlnet_hidden_states" if name == "sd3" else "controlnet_block_samples"
    # The first block adds one too, before the run, and SD3 adds none after its last block.
    inputs = inputs | {argument: residuals}
    plain = dit.run(model, inputs)
    expected = run_by_hand(dit.build(), dit, inputs, hand, residuals)
    assert (expected - plain).std() > 0.02 * plain.std()
    assert_rounding(dit.run(tomesd.apply_patch(model, 0.5, **ALWAYS), inputs), expected)


def test_the_hand_would_notice_rows_of_other_tokens() -> None:
    """Positions matter so much that those of another token of the slot would show."""
    dit, hand = SUPPORTED["flux"], HANDS["flux"]
    inputs = alone(dit.inputs(), 0)
    right = run_by_hand(dit.build(), dit, inputs, hand)

    def rolled(given: Given, rows: Tensor) -> Given:
        return rope_after_text(given, (rows + 1) % 24)

    wrong = Hand(hand.runs, hand.parts, rolled, image=1, text=0)
    other = run_by_hand(dit.build(), dit, inputs, wrong)
    assert (other - right).abs().max() > 1e-3 * right.std()
