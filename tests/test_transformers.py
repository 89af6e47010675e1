"""Every supported diffusion transformer: what merges, what does not, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from merging_dit import (
    ALWAYS,
    SUPPORTED,
    assert_differs,
    assert_rounding,
    block_calls,
    block_lists,
    patched_model,
    texts_swapped,
    tokens_of,
    tokens_seen,
)
from zoo_diffusers import module_state
from zoo_dit import Dit, alone

import tomesd
from tomesd.patch import patch_of

# Tokens that go at a ratio of 0.5. A picture has 6 x 4 tokens, and a video three times as many.
REMOVED = {
    "joyimage": 12,
    "flux_kontext": 12 + 3,  # of the reference too
    "flux2_edit": 12 + 3,
    "flux3_edit": 12 + 3,
    "bria_fibo2": 12 + 3,
    "joyimage_plus": 12 + 3,
    "qwen_edit": 12 + 3,
    "qwen_edit_2511": 12 + 3,
    "hunyuan_video_i2v": 24,  # the first frame is given
    "framepack": 24,  # 4 x 4 in each of three frames; the past is left alone
    "helios": 24,
    "cogvideox_15": 24,  # two frames in a token
    "latte": 8,  # each frame by itself
}


@pytest.fixture(params=SUPPORTED.values(), ids=SUPPORTED)
def dit(request: pytest.FixtureRequest) -> Dit:
    return request.param


def removed(dit: Dit) -> int:
    return REMOVED.get(dit.name, 36 if dit.kind.endswith("3DModel") else 12)


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
def test_merges_repeats_and_is_put_back(dit: Dit) -> None:
    model, inputs = dit.build(), dit.inputs()
    before = module_state(model)
    weights = list(model.state_dict())
    plain = dit.run(model, inputs)

    assert tomesd.apply_patch(model, 0.5, **ALWAYS) is model
    torch.manual_seed(1)
    merged = dit.run(model, inputs)
    assert_differs(merged, plain)
    torch.manual_seed(2)
    assert torch.equal(dit.run(model, inputs), merged)
    assert_differs(dit.run(tomesd.apply_patch(model, 0.5, **ALWAYS, seed=1), inputs), merged)

    assert list(model.state_dict()) == weights
    assert torch.equal(dit.run(tomesd.apply_patch(model, 0.0, **ALWAYS), inputs), plain)
    tomesd.remove_patch(tomesd.apply_patch(model, 0.5, **ALWAYS))
    assert module_state(model) == before
    assert torch.equal(dit.run(model, inputs), plain)


def test_inner_blocks_get_fewer_tokens_and_the_whole_text(dit: Dit) -> None:
    model, inputs = dit.build(), dit.inputs()
    with block_calls(model) as plain:
        dit.run(model, inputs)
    tomesd.apply_patch(model, 0.5, **ALWAYS)
    with block_calls(model) as merged:
        dit.run(model, inputs)

    full, seen = tokens_seen(model, plain), tokens_seen(model, merged)
    blocks = [f"{path}.{k}" for path in block_lists(model) for k in range(len(_list(model, path)))]
    assert list(seen) == list(full) and set(seen) == set(blocks)
    for name in blocks:
        less = 0 if name in (blocks[0], blocks[-1]) else removed(dit)
        assert seen[name] == {tokens - less for tokens in full[name]}, name

    def text(calls: Any) -> dict[str, tuple[int, ...]]:
        given = [(n, g["encoder_hidden_states"]) for n, g in calls if "encoder_hidden_states" in g]
        return {n: tuple(x.shape[1:]) for n, x in given if isinstance(x, torch.Tensor)}

    assert text(merged) == text(plain)


def _list(model: Any, path: str) -> Any:
    return getattr(model, path)


def test_each_item_of_a_batch_merges_by_itself(dit: Dit) -> None:
    model, inputs = patched_model(dit), dit.inputs(batch=3)
    output = dit.run(model, inputs)
    for k in (0, 2):
        assert_rounding(dit.run(model, alone(inputs, k))[0], output[k])


def test_blocks_run_once_for_the_whole_batch(dit: Dit) -> None:
    """Also where the host has one table of positions for all items."""
    model, inputs = patched_model(dit), dit.inputs(batch=3)
    with block_calls(model) as calls:
        dit.run(model, inputs)
    names = [name for name, _ in calls]
    assert len(names) == len(set(names))


def test_block_by_block_is_a_run_of_blocks(dit: Dit) -> None:
    """With one plan, tokens that got what their slot gained have that slot's mean again."""
    inputs = dit.inputs()
    together = dit.run(patched_model(dit), inputs)
    model = patched_model(dit, target="block")
    with block_calls(model) as calls:
        assert_rounding(dit.run(model, inputs), together)
    fewest = {min(tokens) for tokens in tokens_seen(model, calls).values()}
    assert len(fewest) > 1


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen_edit", "hunyuan_video", "zimage"])
def test_plans_of_the_blocks_own(name: str) -> None:
    """Each block finds its own plan only where it has all tokens to look at."""
    dit = SUPPORTED[name]
    inputs = dit.inputs()
    shared = dit.run(patched_model(dit, target="block"), inputs)
    assert_differs(dit.run(patched_model(dit, target="block", share="block"), inputs), shared)


GUIDED = ["flux", "chroma", "sd3", "qwen_uneven", "zimage_uneven", "lumina2_uneven", "wan", "ltx"]


@pytest.mark.parametrize("name", [*GUIDED, "hunyuan_video_uneven", "cogvideox_5b"])
def test_guidance_may_be_split_or_in_one_batch(name: str) -> None:
    """Both predictions of a picture merge the same way, whether they run together or in turn."""
    dit = SUPPORTED[name]
    model, inputs = patched_model(dit), texts_swapped(dit.inputs())
    batched = dit.run(model, inputs)
    split = torch.cat([dit.run(model, alone(inputs, k)) for k in range(2)])
    assert_rounding(split, batched)
    if dit.name != "omnigen":  # its text is numbers of words, which all items have in common
        assert not torch.equal(batched[0], batched[1])


# Where the picture is in the sequence of all: (length, item) to its tokens. Both items of Lumina
# have a text of 7, of which the uneven ones hide some; Z-Image fills pictures up to 32.
PLACES: dict[str, Any] = {
    "flux2": ((3 / 7, 1.0), lambda n, k: range(n - 24, n)),
    "flux2_edit": ((3 / 7, 1.0), lambda n, k: range(n - 30, n)),
    "chroma": ((3 / 7, 1.0), lambda n, k: range(n - 24, n)),
    "auraflow": ((3 / 7, 1.0), lambda n, k: range(n - 24, n)),
    "hidream": ((0.5, 1.0), lambda n, k: range(24)),
    "zimage": ((0.0, 1.0), lambda n, k: range(24)),
    "zimage_uneven": ((0.0, 1.0), lambda n, k: range(24)),
    "lumina2": ((0.0, 1.0), lambda n, k: range(7, 31)),
    "lumina2_uneven": ((0.0, 1.0), lambda n, k: range(7 - k, 31 - k)),
    "framepack": ((0.0, 1.0), lambda n, k: range(n - 48, n)),
    "helios": ((0.0, 1.0), lambda n, k: range(n - 48, n)),
    "krea2": ((0.0, 1.0), lambda n, k: range(n - 24, n)),
    "qwen21": ((0.0, 1.0), lambda n, k: range(n - 24, n)),
    "ideogram4": ((0.0, 1.0), lambda n, k: range(n - 24, n)),
    "ernie": ((0.0, 1.0), lambda n, k: range(24)),
    "bria_fibo2": ((0.0, 1.0), lambda n, k: range(n - 30, n)),
    "ltx2_keyframe": ((0.0, 1.0), lambda n, k: range(72)),
    "bria_fibo2_uneven": ((0.0, 1.0), lambda n, k: range(24)),
}


@pytest.mark.parametrize("name", PLACES)
def test_text_in_one_sequence_with_the_picture_is_left_alone(name: str) -> None:
    dit, (depth, place) = SUPPORTED[name], PLACES[name]
    model, inputs = dit.build(), dit.inputs()
    first = block_lists(model)[-1 if depth[0] else 0] + ".0"
    with block_calls(model) as calls:
        dit.run(model, inputs)
    plain = _tokens_into(model, calls, first)
    tomesd.apply_patch(model, 0.5, depth=depth, **ALWAYS)
    with block_calls(model) as calls:
        dit.run(model, inputs)
    merged = _tokens_into(model, calls, first)
    for k in range(2):
        picture = place(plain.shape[1], k)
        before, after = plain[k, : picture.start], plain[k, picture.stop :]
        count = len(picture) - removed(dit)
        assert torch.equal(merged[k, : len(before)], before)
        assert torch.equal(merged[k, len(before) + count :], after)
        # What is in between are means of several tokens of the picture, or single ones.
        inside = merged[k, len(before) : len(before) + count]
        single = (inside[:, None] == plain[k, picture][None]).all(dim=2).any(dim=1)
        assert 0 < (~single).sum() <= count


def _tokens_into(model: Any, calls: Any, block: str) -> torch.Tensor:
    """The tokens that a block got, [B, S, C]."""
    (tokens,) = [tokens_of(model, given) for name, given in calls if name == block]
    return tokens


@pytest.mark.parametrize("name", ["flux", "wan", "hunyuan_video_uneven", "zimage"])
@pytest.mark.parametrize("size", [(10, 14), (6, 10)])
def test_odd_grids(name: str, size: tuple[int, int]) -> None:
    dit = SUPPORTED[name]
    inputs = dit.inputs(size=size)
    plain = dit.run(dit.build(), inputs)
    model = patched_model(dit)
    merged = dit.run(model, inputs)
    assert_differs(merged, plain)
    for k in range(2):
        assert_rounding(dit.run(model, alone(inputs, k))[0], merged[k])


@pytest.mark.parametrize("selector", ["bipartite", "kmeans", "grid"])
@pytest.mark.parametrize("name", ["flux", "qwen_edit", "wan", "lumina2_uneven"])
def test_every_selector(name: str, selector: str) -> None:
    dit = SUPPORTED[name]
    model, inputs = patched_model(dit, selector=selector, sx=2, sy=2), dit.inputs()
    merged = dit.run(model, inputs)
    assert_differs(merged, dit.run(dit.build(), inputs))
    for k in range(2):
        assert_rounding(dit.run(model, alone(inputs, k))[0], merged[k])


@pytest.mark.parametrize("name", ["wan", "wan_ti2v", "ltx", "ltx_i2v", "anyflow"])
def test_self_attention_on_its_own(name: str) -> None:
    """Where attention takes nothing but the video, it can merge and the rest keep all tokens."""
    dit = SUPPORTED[name]
    model, inputs, seen = patched_model(dit, target="attn"), dit.inputs(), []
    block = model.get_submodule(f"{block_lists(model)[0]}.1")
    block.attn1.to_q.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[1]))
    block.attn2.to_q.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[1]))
    merged = dit.run(model, inputs)
    assert seen == [36, 72]
    assert_differs(merged, dit.run(dit.build(), inputs))
    for k in range(2):
        assert_rounding(dit.run(model, alone(inputs, k))[0], merged[k])


@pytest.mark.parametrize("name", ["latte", "anyflow"])
def test_keys_and_values_on_their_own(name: str) -> None:
    """Where attention takes as many keys as it is given, only they merge."""
    dit, seen = SUPPORTED[name], []
    model, inputs = patched_model(dit, target="kv"), dit.inputs()
    attention = model.get_submodule(f"{block_lists(model)[0]}.1.attn1")
    for layer in (attention.to_q, attention.to_k, attention.to_v):
        layer.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[1]))
    merged = dit.run(model, inputs)
    full = 16 if name == "latte" else 72
    assert seen == [full, full // 2, full // 2]
    assert_differs(merged, dit.run(dit.build(), inputs))
    assert_differs(merged, dit.run(patched_model(dit, target="attn"), inputs))
    for k in range(2):
        assert_rounding(dit.run(model, alone(inputs, k))[0], merged[k])


def test_keys_by_hand() -> None:
    """Attention of AnyFlow with merged keys is that of an unpatched layer which is given the means
    of the slots, and the positions of their representatives."""
    dit, plans, calls = SUPPORTED["anyflow"], [], []
    inputs = alone(dit.inputs(), 0)
    model = patched_model(dit, target="kv")
    patch_of(model).observer = lambda scope, block, plan: plans.append(plan)
    layer = model.blocks[1].attn1
    hook = lambda m, args, kwargs, output: calls.append((kwargs, output))  # noqa: E731
    layer.register_forward_hook(hook, with_kwargs=True)
    dit.run(model, inputs)
    (given, output), plan = calls[0], plans[0]
    x, kept = given["hidden_states"], plan.kept[0]
    means = torch.stack([x[0, plan.slot[0] == slot].mean(dim=0) for slot in range(len(kept))])
    rope = {"query": given["rotary_emb"]["query"], "key": given["rotary_emb"]["key"][:, :, kept]}
    with torch.no_grad():
        plain = (
            dit.build()
            .blocks[1]
            .attn1(x, encoder_hidden_states=means[None], rotary_emb=rope, attention_mask=None)
        )
    assert_rounding(output, plain)


def test_pictures_are_told_apart_by_what_differs_from_the_first() -> None:
    """LongCat numbers text 0, the picture that is made 1 and the one that is given 2."""
    from diffusers.pipelines.longcat_image.pipeline_longcat_image import prepare_pos_ids

    made = prepare_pos_ids(1, "image", (512, 512), height=6, width=4)
    given = prepare_pos_ids(2, "image", (512, 512), height=2, width=3)
    dit = SUPPORTED["longcat"]
    inputs = dit.inputs()
    more = torch.zeros(2, 6, inputs["hidden_states"].shape[2])
    inputs["hidden_states"] = torch.cat([inputs["hidden_states"], more], dim=1)
    inputs["img_ids"] = torch.cat([made, given])
    model = patched_model(dit, reference_ratio=0.0)
    dit.run(model, inputs)
    (decision,) = patch_of(model).decisions
    assert decision.grid == (1, 6, 4) and decision.remove == 12


def test_places_need_not_be_whole_numbers() -> None:
    """As Flux 3 is given them: in steps of a half, and a number of its own for a reference."""
    dit = SUPPORTED["flux3_edit"]
    inputs = dit.inputs()
    for name, number in (("img_ids", 0), ("image_cond_ids", -1)):
        ids = inputs[name] * torch.tensor([0, 0.5, 0.5, 0])
        inputs[name] = ids + torch.tensor([0, 0, 0, number])
    model = patched_model(dit, reference_ratio=0.0)
    dit.run(model, inputs)
    (decision,) = patch_of(model).decisions
    assert decision.grid == (1, 6, 4) and (decision.tokens, decision.remove) == (30, 12)


@pytest.mark.parametrize("batch", [1, 2])
def test_keys_of_the_text_are_kept_from_step_to_step(batch: int) -> None:
    """Qwen-Image 2.1: merged with what the first step kept, the picture is as without."""
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    dit = SUPPORTED["qwen21"]
    model, inputs = patched_model(dit), dit.inputs(batch=batch)
    del inputs["encoder_hidden_states_mask"]  # a pipeline gives one only if it hides something
    merged = dit.run(model, inputs)[:, -24:]
    cache = {"kv_cache": QwenImage21KVCache(4)}
    first = dit.run(model, inputs | cache | {"kv_cache_mode": "extract"})
    assert_rounding(first[:, -24:], merged)
    with block_calls(model) as calls:
        later = dit.run(model, inputs | cache | {"kv_cache_mode": "cached"})
    assert_rounding(later, merged)
    assert [tokens for (tokens,) in tokens_seen(model, calls).values()] == [24, 12, 12, 24]
