"""Options on diffusion transformers: which blocks, tokens and steps merge, and what is refused."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from merging_dit import (
    SUPPORTED,
    assert_differs,
    assert_rounding,
    at_noise,
    at_steps_left,
    block_calls,
    patched_model,
    tokens_seen,
)
from zoo_diffusers import HOSTS, module_state
from zoo_dit import Dit, alone

import tomesd
from tomesd import kept
from tomesd.hosts.transformers import _within
from tomesd.patch import patch_of
from tomesd.settings import Settings

FLUX, SD3, WAN, ZIMAGE = (SUPPORTED[name] for name in ("flux", "sd3", "wan", "zimage"))
KONTEXT, QWEN_EDIT = SUPPORTED["flux_kontext"], SUPPORTED["qwen_edit"]


def seen_by_blocks(model: Any, dit: Dit, inputs: dict[str, Any] | None = None) -> dict[str, int]:
    """Tokens that each block gets."""
    with block_calls(model) as calls:
        dit.run(model, dit.inputs() if inputs is None else inputs)
    seen = tokens_seen(model, calls)
    assert all(len(tokens) == 1 for tokens in seen.values())
    return {name: min(tokens) for name, tokens in seen.items()}


def merges(model: Any, dit: Dit, inputs: dict[str, Any]) -> bool:
    """Whether a call works on fewer tokens than it would without the patch."""
    return seen_by_blocks(model, dit, inputs) != _seen_unpatched(dit.name)


@functools.cache
def _seen_unpatched(name: str) -> dict[str, int]:
    return seen_by_blocks(SUPPORTED[name].build(), SUPPORTED[name])


# What means nothing on a transformer


@pytest.mark.parametrize("name", ["flux", "wan"])
@pytest.mark.parametrize(
    "option",
    [
        {"max_downsample": 1},
        {"merge_attn": False},
        {"merge_crossattn": True},
        {"merge_mlp": True},
        {"level_ratios": {1: 0.5}},
        {"kind_ratios": {"attn": 0.5}},
        {"proportional": True},
        {"metric": "keys"},
        {"target": "kv"},
        {"protect": "guidance"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_of_unets_are_refused(name: str, option: dict[str, Any]) -> None:
    dit = SUPPORTED[name]
    (word,) = option
    fresh, patched = dit.build(), patched_model(dit)
    inputs = dit.inputs()
    before, merged = module_state(fresh), dit.run(patched, inputs)
    for model in (fresh, patched):
        with pytest.raises(ValueError, match=f"{word}.*{dit.kind}"):
            tomesd.apply_patch(model, 0.25, **option)
    assert module_state(fresh) == before
    assert torch.equal(dit.run(patched, inputs), merged)


def test_attention_alone_is_refused_where_it_takes_the_text_too() -> None:
    with pytest.raises(ValueError, match=r"target='attn'.*FluxTransformer2DModel.*'stack'"):
        tomesd.apply_patch(FLUX.build(), target="attn")


@pytest.mark.parametrize("host", ["sd1", "pixart"])
@pytest.mark.parametrize("option", [{"depth": (0.0, 0.5)}, {"st": 2}, {"reference_ratio": 0.5}])
def test_options_of_transformers_are_refused_on_unets(host: str, option: dict[str, Any]) -> None:
    model = HOSTS[host].build()
    (word,), kind = option, type(model).__name__
    before = module_state(model)
    with pytest.raises(ValueError, match=f"{word}.*{kind}"):
        tomesd.apply_patch(model, 0.5, **option)
    assert module_state(model) == before


# Which blocks


@pytest.mark.parametrize(
    ("depth", "merged"),
    [
        (None, range(1, 6)),
        ((0.0, 1.0), range(7)),
        ((0.0, 0.5), range(3)),
        ((3 / 7, 1.0), range(3, 7)),
        ((0.3, 0.6), range(3, 4)),
        ((2 / 7, 4 / 7), range(2, 4)),  # the last of one list, and the first of the next
    ],
)
@pytest.mark.parametrize("target", ["stack", "block"])
def test_depth(depth: Any, merged: range, target: str) -> None:
    model = patched_model(FLUX, depth=depth, target=target)
    seen = list(seen_by_blocks(model, FLUX).values())
    assert seen == [12 if block in merged else 24 for block in range(7)]


@pytest.mark.parametrize("count", [20, 49, 57, 60])
def test_a_depth_counts_blocks_whatever_the_rounding(count: int) -> None:
    for number in range(1, count):
        share = number / count
        assert _within((0.0, share), count) == range(number)
        assert _within((share, 1.0), count) == range(number, count)
    assert _within((0.55, 1.0), 20) == range(11, 20)


def test_a_depth_without_blocks_is_refused() -> None:
    model = SD3.build()
    before = module_state(model)
    with pytest.raises(ValueError, match=r"depth=\(0.3, 0.4\).*4 blocks"):
        tomesd.apply_patch(model, depth=(0.3, 0.4))
    assert module_state(model) == before


def test_a_depth_without_blocks_leaves_the_patch_before() -> None:
    """As any other option that is refused."""
    model, inputs = patched_model(SD3), SD3.inputs()
    merged = SD3.run(model, inputs)
    with pytest.raises(ValueError, match="depth"):
        tomesd.apply_patch(model, depth=(0.3, 0.4))
    assert torch.equal(SD3.run(model, inputs), merged)


# Which tokens


def test_frames_merge_with_each_other() -> None:
    inputs = WAN.inputs(frames=4)
    apart, together = (patched_model(WAN, st=st) for st in (None, 2))
    assert set(seen_by_blocks(apart, WAN, inputs).values()) == {96, 48}
    assert set(seen_by_blocks(together, WAN, inputs).values()) == {96, 48}
    assert_differs(WAN.run(together, inputs), WAN.run(apart, inputs))
    assert torch.equal(WAN.run(patched_model(WAN, st=1), inputs), WAN.run(apart, inputs))


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
def test_cells_of_several_frames_allow_more() -> None:
    most = patched_model(WAN, 0.875, st=2)
    assert set(seen_by_blocks(most, WAN, WAN.inputs(frames=4)).values()) == {96, 12}
    with pytest.warns(tomesd.MergeWarning, match=r"0.9 .*2x2x2 cells .* 0.875"):
        patched_model(WAN, 0.9, st=2)


def test_a_still_video_merges_each_token_with_its_like_in_the_next_frame() -> None:
    inputs = WAN.inputs(frames=4)
    latent = inputs["hidden_states"]
    inputs |= {"hidden_states": latent[:, :, :1].expand_as(latent)}
    model, plans = patched_model(WAN, sx=1, sy=1, st=2, depth=(0, 1)), []
    patch_of(model).observer = lambda scope, block, plan: plans.append(plan)
    WAN.run(model, inputs)
    slot = plans[0].slot.view(2, 2, 2, 24)  # pairs of frames
    assert torch.equal(slot[:, :, 0], slot[:, :, 1])


@pytest.mark.parametrize("dit", [KONTEXT, QWEN_EDIT], ids=lambda dit: dit.name)
@pytest.mark.parametrize(("ratio", "left"), [(None, 15), (0.0, 18), (0.5, 15), (0.7, 14)])
def test_reference_ratio(dit: Dit, ratio: float | None, left: int) -> None:
    model = patched_model(dit, reference_ratio=ratio)
    assert set(seen_by_blocks(model, dit).values()) == {30, left}
    inputs = dit.inputs()
    output = dit.run(model, inputs)
    assert_differs(output, dit.run(dit.build(), inputs))
    assert_rounding(dit.run(model, alone(inputs, 1))[0], output[1])


@pytest.mark.parametrize(("noise", "left"), [(0.9, 27), (0.1, 30)])
@pytest.mark.parametrize("end", [None, 0.5])
def test_references_merge_where_the_picture_does_not(
    noise: float, left: int, end: float | None
) -> None:
    """At the steps at which the picture would."""
    model = patched_model(QWEN_EDIT, ratio=0.0, reference_ratio=0.5, end=end)
    inputs = at_noise(QWEN_EDIT, QWEN_EDIT.inputs(), noise)
    assert set(seen_by_blocks(model, QWEN_EDIT, inputs).values()) == {30, left}


def test_nothing_in_a_reference_merges_into_the_picture() -> None:
    """A reference that is the picture itself, token for token."""
    inputs = QWEN_EDIT.inputs(batch=1)
    hidden, shapes = inputs["hidden_states"], inputs["img_shapes"]
    twice = torch.cat([hidden[:, :24], hidden[:, :24]], dim=1)
    inputs |= {"hidden_states": twice, "img_shapes": [[*shapes[0][:1], (1, 6, 4)]]}
    model, plans = patched_model(QWEN_EDIT), []
    patch_of(model).observer = lambda scope, block, plan: plans.append(plan)
    QWEN_EDIT.run(model, inputs)
    slots = plans[0].slot[0]
    assert not set(slots[:24].tolist()) & set(slots[24:].tolist())


@pytest.mark.parametrize(("ratio", "window", "own"), [(0.75, None, True), (0.75, 8, False)])
def test_where_most_tokens_go_they_merge_within_their_cell(
    ratio: float, window: int | None, own: bool
) -> None:
    model, plans = patched_model(SUPPORTED["flux"], ratio, window=window), []
    patch_of(model).observer = lambda scope, block, plan: plans.append(plan)
    SUPPORTED["flux"].run(model, SUPPORTED["flux"].inputs())
    row, column = torch.arange(24) // 4, torch.arange(24) % 4
    cell = 2 * (row // 2) + column // 2
    slots = plans[0].slot
    assert slots.shape[1] == 24 and slots.max() == 5
    cells_of_slots = [len(cell[slots[0] == slot].unique()) for slot in range(6)]
    assert (max(cells_of_slots) == 1) == own


@pytest.mark.parametrize(
    ("name", "before", "frames", "after"),
    [
        ("flux", 0, 1, 0),
        ("wan", 0, 3, 0),
        ("flux_kontext", 0, 1, 6),
        ("hunyuan_video_i2v", 24, 2, 0),
    ],
)
def test_protected_tokens_are_merged_last(name: str, before: int, frames: int, after: int) -> None:
    """In every frame that is made; tokens that are given, and references, have no mask."""
    dit = SUPPORTED[name]
    mask = torch.zeros(6, 4)
    mask[:3] = 1
    model, plans = patched_model(dit, 0.25, protect=mask), []
    patch_of(model).observer = lambda scope, block, plan: plans.append(plan)
    dit.run(model, dit.inputs())
    slots, sizes = plans[0].slot, plans[0].size
    alone_in_slot = sizes.gather(1, slots) == 1
    other = torch.zeros(before), torch.zeros(after)
    protected = torch.cat([other[0], mask.flatten().repeat(frames), other[1]]).bool()
    picture = torch.cat([other[0], torch.ones(24 * frames), other[1]]).bool()
    # Of the upper half, only tokens that others merge into are not on their own.
    kept = torch.zeros_like(alone_in_slot).scatter(1, plans[0].kept, True)
    assert (alone_in_slot | kept)[:, protected].all()
    assert not (alone_in_slot | kept)[:, picture & ~protected].all()


# Which steps

CONVENTIONS = ["flux", "sd3", "wan", "zimage", "lumina2", "mochi", "hidream", "wan_ti2v", "ltx_i2v"]
CONVENTIONS += ["ideogram4", "anyflow"]


@pytest.mark.parametrize("name", CONVENTIONS)
def test_the_late_steps_are_left_alone(name: str) -> None:
    """0..1, 0..1000, reversed, and a time for each token: early steps merge, late ones do not."""
    dit = SUPPORTED[name]
    inputs = dit.inputs()
    model = tomesd.apply_patch(dit.build(), 0.5, when="always")
    for left, early in ((0.98, True), (0.6, True), (0.4, False), (0.05, False)):
        now = at_steps_left(dit, inputs, left)
        assert merges(model, dit, now) == early, left
        if not early:
            assert torch.equal(dit.run(model, now), dit.run(dit.build(), now))


@pytest.mark.parametrize("name", CONVENTIONS)
def test_start_and_end(name: str) -> None:
    dit = SUPPORTED[name]
    inputs = dit.inputs()
    model = tomesd.apply_patch(dit.build(), 0.5, when="always", start=0.3, end=0.6)
    for left in (0.9, 0.65, 0.45, 0.1):
        assert merges(model, dit, at_steps_left(dit, inputs, left)) == (0.4 <= left <= 0.7), left
    # Who says where it starts says nothing of an end.
    model = tomesd.apply_patch(dit.build(), 0.5, when="always", start=0.3)
    assert merges(model, dit, at_noise(dit, inputs, 0.1))


def test_cosmos_goes_by_its_configuration() -> None:
    """The first one is given a quarter of the logarithm of sigma, the next ones 0 ... 1."""
    first = SUPPORTED["cosmos"]
    second = replace(first, config=first.config | {"extra_pos_embed_type": None})
    logarithms = (math.log(60) / 4, math.log(0.01) / 4)
    for dit, (early, late) in ((first, logarithms), (second, (0.8, 0.3))):
        model, inputs = tomesd.apply_patch(dit.build(), 0.5, when="always"), dit.inputs()
        for time, merged in ((early, True), (late, False)):
            now = inputs | {"timestep": torch.full((2,), float(time))}
            assert merges(model, dit, now) == merged


@pytest.mark.parametrize("name", ["flux", "sd3", "zimage"])
def test_tau_on_flow_models(name: str) -> None:
    """The latent is s * noise + (1 - s) * image: noise has s^2 / (s^2 + (1-s)^2) of its variance,
    which is 0.8 at s = 2/3."""
    dit = SUPPORTED[name]
    model = tomesd.apply_patch(dit.build(), 0.5, when="always", tau=0.8)
    for noise in (0.9, 0.68, 0.65, 0.1):
        assert merges(model, dit, at_noise(dit, dit.inputs(), noise)) == (noise < 2 / 3), noise


@pytest.mark.parametrize(
    ("schedule", "tokens"),
    [
        ({"schedule": [0.5, 0.25, 0.0]}, [12, 18, 24]),
        ({"schedule": "linear", "ratio_end": 0.0}, [12, 18, 23]),
        ({"schedule": lambda progress: 0.5 if progress < 0.7 else 0.25}, [12, 12, 18]),
    ],
)
@pytest.mark.parametrize("dit", [FLUX, SD3], ids=lambda dit: dit.name)
def test_schedules(dit: Dit, schedule: dict[str, Any], tokens: list[int]) -> None:
    model = tomesd.apply_patch(dit.build(), 0.5, when="always", **schedule)
    inputs = dit.inputs()
    steps = [at_steps_left(dit, inputs, left) for left in (0.98, 0.5, 0.1)]
    seen = [seen_by_blocks(model, dit, step) for step in steps]
    assert [min(blocks.values()) for blocks in seen] == tokens


@pytest.mark.parametrize("name", ["flux_kontext", "sd3", "wan", "zimage"])
def test_plans_kept_for_some_steps(name: str) -> None:
    """The second of two steps merges by what the first found, and a new image starts anew."""
    dit = SUPPORTED[name]
    model, plans = patched_model(dit, share="steps", refresh=2), []
    patch_of(model).observer = lambda scope, block, plan: plans.append(plan.slot.clone())
    steps = [at_noise(dit, dit.inputs(seed=k), 0.9 - 0.1 * k) for k in range(4)]
    fresh = [dit.run(patched_model(dit), step) for step in steps]
    outputs, slots = [], []
    for step in [*steps, steps[0]]:
        outputs.append(dit.run(model, step))
        slots.append(plans[-1])
    same = [torch.equal(a, b) for a, b in itertools.pairwise(slots)]
    assert same == [True, False, True, False]
    assert torch.equal(outputs[0], fresh[0]) and torch.equal(outputs[4], fresh[0])
    assert torch.equal(outputs[2], fresh[2])
    assert_differs(outputs[1], fresh[1])


def test_match_on_the_step_before() -> None:
    model = patched_model(FLUX, metric="previous")
    steps = [at_noise(FLUX, FLUX.inputs(seed=k), 0.9 - 0.1 * k) for k in range(2)]
    plain = [FLUX.run(patched_model(FLUX), step) for step in steps]
    outputs = [FLUX.run(model, step) for step in steps]
    assert torch.equal(outputs[0], plain[0])
    assert_differs(outputs[1], plain[1])


# Settings as such


def test_settings_with_tables_and_lists_are_hashable() -> None:
    ones = [
        Settings(level_ratios={1: 0.5, 2: 0.25}),
        Settings(schedule=[0.5, 0.25]),
        Settings(kind_ratios={"attn": 0.5}),
        Settings(protect=torch.zeros(2, 2)),
        Settings(depth=[0.0, 0.5]),  # type: ignore[arg-type]
    ]
    assert len({*ones, *ones}) == len(ones)
    assert hash(Settings(schedule=[0.5, 0.25])) == hash(Settings(schedule=[0.5, 0.25]))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many sizes in turn: what is kept for the steps of the oldest goes."""
    monkeypatch.setattr(kept, "MOST", 12)
    model = patched_model(SD3, share="steps")
    sizes = [(2 * h, 2 * w) for h in range(2, 6) for w in range(2, 6)]
    for size in sizes:
        SD3.run(model, SD3.inputs(size=size))
        assert len(vars(patch_of(model).kept.local)) <= 12
    fresh = patched_model(SD3, share="steps")
    for size in (sizes[0], sizes[-1], sizes[0]):
        assert torch.equal(
            SD3.run(model, at_noise(SD3, SD3.inputs(size=size), 0.9)),
            SD3.run(fresh, at_noise(SD3, SD3.inputs(size=size), 0.9)),
        )


# What is told


# A model for each way to read where the tokens are, and each kind of blocks.
DESCRIBED = [
    "flux", "sd3", "qwen", "zimage", "lumina2", "auraflow", "hidream", "hunyuan_dit", "wan",
    "hunyuan_video", "framepack", "hunyuan_video15", "cogvideox_15", "ltx", "mochi", "latte",
    "krea2", "nucleus", "ernie", "ideogram4", "bria_fibo2_uneven", "kandinsky5", "anyflow",
    "helios",
]  # fmt: skip
READ_WHAT_THEY_COMPUTE = (
    "hidream",
    "hunyuan_video15",
    "nucleus",
)  # experts; a picture that is not there


@pytest.mark.parametrize("name", DESCRIBED)
def test_described_as_it_is(name: str) -> None:
    """Tokens and blocks that are told are those that merge."""
    dit = SUPPORTED[name]
    height, width = (8 * side for side in dit.size)
    model, inputs = patched_model(dit), dit.inputs()
    (part,) = tomesd.describe(model, height, width, 4 * dit.frames - 3).parts
    (level,) = part.levels
    full, seen = _seen_unpatched(dit.name), seen_by_blocks(model, dit, inputs)
    gone = {full[name] - seen[name] for name in full} - {0}
    assert gone == {level.tokens - level.merged_tokens}
    assert level.blocks == sum(full[name] > seen[name] for name in full)
    assert part.blocks == len(full) and part.latent == dit.size
    if dit.name in READ_WHAT_THEY_COMPUTE:
        assert part.saved == 0 and "operations unknown" in str(part)
    else:
        assert 0.01 < part.saved < 0.6 and f"{part.saved:.1%}" in str(part)


@pytest.mark.parametrize("name", ["zimage", "anyflow"])
def test_description_leaves_nothing_behind(name: str) -> None:
    """Both keep their positions from call to call; those of a description have no data."""
    dit = SUPPORTED[name]
    described, inputs = patched_model(dit), dit.inputs()
    tomesd.describe(described, 96, 64, 9)
    assert torch.equal(dit.run(described, inputs), dit.run(patched_model(dit), inputs))


def test_sequences_split_over_devices_are_refused() -> None:
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    model, inputs = patched_model(FLUX), FLUX.inputs()
    split = ContextParallelConfig(ulysses_degree=2)
    model._parallel_config = ParallelConfig(context_parallel_config=split)
    with pytest.raises(RuntimeError, match="FluxTransformer2DModel with context parallelism"):
        FLUX.run(model, inputs)
    model._parallel_config = None
    assert FLUX.run(model, inputs).isfinite().all()
