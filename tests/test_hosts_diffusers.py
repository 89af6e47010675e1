"""What is special about model families of diffusers, on the real code; see also `test_hosts`."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from zoo_diffusers import (
    HOSTS,
    Host,
    call,
    expected_tokens,
    make_unet,
    module_state,
    noise,
    seeded,
    spatial_tokens,
    tokens_into,
)

import tomesd

EVERYTHING = {"merge_crossattn": True, "merge_mlp": True}
MANY = pytest.mark.parametrize("name", list(HOSTS))
FEW = pytest.mark.parametrize("name", ["sd1", "sdxl"])

# DiT cuts its output back into a square, so it runs square latents only.
SQUARES = [(14, 14), (6, 6)]
ODD = [(13, 15), (17, 11)]
ODD_SIZES = [(n, size) for n in HOSTS for size in (SQUARES if n == "dit" else ODD)]
# One row of tokens (the patch models need two rows of latents for it), one column, four, one.
STRIPS = [(1, 16), (16, 1), (2, 2), (1, 1)]
PATCH_STRIPS = {"dit": [(4, 4), (2, 2)], "pixart": [(2, 12), (12, 2), (4, 4), (2, 2)]}


@functools.cache
def _built(name: str) -> nn.Module:
    return HOSTS[name].build()


def fresh(name: str) -> tuple[Host, Any]:
    """The host and a copy of its model that a test may patch."""
    return HOSTS[name], copy.deepcopy(_built(name))


@pytest.mark.parametrize("name", ["sd1", "upscaler", "dit", "pixart", "animatediff_sdxl"])
def test_describe_tells_what_attention_sees(name: str) -> None:
    host, model = fresh(name)
    with tokens_into(model) as seen:
        host.run(model, batch=1)
    full = spatial_tokens(seen)
    left = expected_tokens(full, 1, 0.5)
    tomesd.apply_patch(model, 0.5)
    (part,) = tomesd.describe(model, height=128, width=128).parts  # latents of 16 x 16
    told = sorted((level.tokens, level.merged_tokens, level.blocks) for level in part.levels)
    pairs = [(full[n], left[n]) for n in full]
    assert told == sorted((*pair, pairs.count(pair)) for pair in set(pairs))
    assert 0 < part.saved < 1


@pytest.mark.parametrize(("name", "size"), ODD_SIZES)
@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
def test_odd_sizes(name: str, size: tuple[int, int]) -> None:
    host, model = fresh(name)
    run = functools.partial(host.run, model, height=size[0], width=size[1])
    with tokens_into(model) as seen:
        plain = run()
    full = spatial_tokens(seen)
    tomesd.apply_patch(model, 0.5)
    with tokens_into(model) as seen:
        merged = run()
    assert spatial_tokens(seen) == expected_tokens(full, 1, 0.5)
    assert merged.shape == plain.shape and merged.isfinite().all()
    assert (merged - plain).abs().max() > 1e-3
    tomesd.apply_patch(model, 0.5, 8, **EVERYTHING)
    everywhere = run(keyword=True)
    assert everywhere.isfinite().all() and not torch.equal(everywhere, merged)


@MANY
@pytest.mark.filterwarnings("ignore::tomesd.MergeWarning")  # a single token is merged with nothing
def test_degenerate_sizes_merge_what_can_be_merged(name: str) -> None:
    host, model = fresh(name)
    for height, width in PATCH_STRIPS.get(name, STRIPS):
        run = functools.partial(host.run, model, height=height, width=width, batch=1)
        tomesd.remove_patch(model)
        with tokens_into(model) as seen:
            plain = run()
        full = spatial_tokens(seen)
        for levels, options in (
            (1, {}),
            (9, {"max_downsample": 8, "sx": 4, "sy": 3, **EVERYTHING}),
        ):
            tomesd.apply_patch(model, 0.5, **options)
            with tokens_into(model) as seen:
                merged = run()
            assert merged.shape == plain.shape and merged.isfinite().all()
            assert spatial_tokens(seen) == expected_tokens(full, levels, 0.5), (height, width)


# An independent, slow account of one block: plain loops over the published description.


def slow_groups(x: torch.Tensor, grid: tuple[int, int], ratio: float, sx: int, sy: int) -> list:
    """Groups of token numbers of one item x: [N, C]; the first of a group is its destination."""
    height, width = grid
    unit = [token / token.norm() for token in x.double()]
    dst = [
        row * width + column
        for row in range(0, height - sy + 1, sy)
        for column in range(0, width - sx + 1, sx)
    ]
    pairs = []
    for s in range(height * width):
        if s not in dst:
            scores = [float(unit[s] @ unit[d]) for d in dst]
            pairs.append((max(scores), s, dst[scores.index(max(scores))]))
    pairs.sort(reverse=True)
    groups = {n: [n] for n in range(height * width)}
    for _, s, d in pairs[: int(height * width * ratio)]:
        groups[d].append(s)
        del groups[s]
    return list(groups.values())


def slow_layer(layer: Callable[..., Any], x: torch.Tensor, groups: list | None) -> torch.Tensor:
    """Run `layer` on the mean of each group of each item; every member gets the group's result."""
    if groups is None:
        return layer(x)
    short = torch.stack(
        [torch.stack([x[b, group].mean(0) for group in groups[b]]) for b in range(len(x))]
    )
    result, full = layer(short), torch.empty_like(x)
    for b in range(len(x)):
        for m, group in enumerate(groups[b]):
            for n in group:
                full[b, n] = result[b, m]
    return full


def slow_block(
    block: Any, x: torch.Tensor, given: dict[str, Any], merging: set[str], **settings: Any
) -> torch.Tensor:
    """What an unpatched block's layers give when the layers in `merging` see merged tokens."""
    groups = [slow_groups(item, **settings) for item in x]
    run = {name: groups if name in merging else None for name in ("attn1", "attn2", "ff")}
    context = given.get("encoder_hidden_states")

    def cross(h: torch.Tensor) -> torch.Tensor:
        return slow_layer(lambda z: block.attn2(z, context), h, run["attn2"])

    def modulated(h: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        return norm(h) * (1 + scale_mlp) + shift_mlp

    if block.norm_type == "layer_norm":
        x = x + slow_layer(block.attn1, block.norm1(x), run["attn1"])
        x = x + cross(block.norm2(x))
        return x + slow_layer(block.ff, block.norm3(x), run["ff"])
    if block.norm_type == "ada_norm_zero":  # DiT
        normed, gate, shift_mlp, scale_mlp, gate_mlp = block.norm1(
            x, given["timestep"], given["class_labels"], hidden_dtype=x.dtype
        )
        gate, shift_mlp, scale_mlp, gate_mlp = (
            v[:, None] for v in (gate, shift_mlp, scale_mlp, gate_mlp)
        )
        x = x + gate * slow_layer(block.attn1, normed, run["attn1"])
        return x + gate_mlp * slow_layer(block.ff, modulated(x, block.norm3), run["ff"])
    # PixArt
    table = block.scale_shift_table[None] + given["timestep"].reshape(len(x), 6, -1)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = table.chunk(6, dim=1)
    normed = block.norm1(x) * (1 + scale) + shift
    x = x + gate * slow_layer(block.attn1, normed, run["attn1"])
    x = x + cross(x)
    return x + gate_mlp * slow_layer(block.ff, modulated(x, block.norm2), run["ff"])


def watch_block(model: nn.Module, path: str, run: Callable[[], Any]) -> tuple[Any, dict, Any]:
    """Input tokens, other arguments by name, and output of the block at `path` during `run`."""
    block, seen = model.get_submodule(path), {}
    names = list(
        inspect.signature(diffusers.models.attention.BasicTransformerBlock.forward).parameters
    )

    def note(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        given = dict(zip(names[1:], args, strict=False)) | kwargs
        seen.update(x=given.pop("hidden_states"), given=given, output=output)

    handle = block.register_forward_hook(note, with_kwargs=True)
    run()
    handle.remove()
    return seen["x"], seen["given"], seen["output"]


# (host, block, latent size, token grid)
BLOCKS = [
    ("sd1", "down_blocks.0.attentions.0.transformer_blocks.0", (8, 10), (8, 10)),
    ("sd1", "up_blocks.2.attentions.1.transformer_blocks.0", (7, 9), (7, 9)),
    ("sdxl", "down_blocks.1.attentions.0.transformer_blocks.1", (13, 15), (7, 8)),
    ("pixart", "transformer_blocks.1", (13, 20), (6, 10)),
    ("dit", "transformer_blocks.1", (14, 14), (7, 7)),
]
LAYERS = [{"attn1"}, {"attn2"}, {"ff"}, {"attn1", "attn2", "ff"}]


@pytest.mark.parametrize(("name", "path", "latent", "grid"), BLOCKS)
@pytest.mark.parametrize(("sx", "sy", "ratio"), [(2, 2, 0.5), (3, 2, 0.6), (2, 3, 0.25)])
def test_block_equals_the_slow_account(
    name: str, path: str, latent: tuple, grid: tuple, sx: int, sy: int, ratio: float
) -> None:
    host, model = fresh(name)
    block = copy.deepcopy(model.get_submodule(path))
    for merging in LAYERS:
        tomesd.apply_patch(
            model,
            ratio,
            None,
            sx,
            sy,
            False,
            "attn1" in merging,
            "attn2" in merging,
            "ff" in merging,
            window=0,
            when="always",
        )
        run = functools.partial(host.run, model, height=latent[0], width=latent[1])
        x, given, output = watch_block(model, path, run)
        settings = {"grid": grid, "ratio": ratio, "sx": sx, "sy": sy}
        slow = slow_block(block, x, given, merging, **settings)
        torch.testing.assert_close(output, slow, rtol=1e-5, atol=1e-5)
        unmerged = slow_block(block, x, given, set(), **settings)
        nothing_to_merge = merging == {"attn2"} and name == "dit"
        assert nothing_to_merge or (output - unmerged).abs().max() > 1e-3


def test_gligen_keeps_its_grounding() -> None:
    host, model = fresh("gligen")
    grounded = host.inputs(16, 16, 2, 0, 500)
    free = {key: value for key, value in grounded.items() if key != "cross_attention_kwargs"}
    plain, plain_free = call(model, grounded), call(model, free)
    assert not torch.allclose(plain, plain_free, atol=1e-3)
    tomesd.apply_patch(model, ratio=0)
    assert torch.equal(call(model, grounded), plain)
    tomesd.apply_patch(model, ratio=0.5, **EVERYTHING)
    with tokens_into(model, "fuser.attn.to_q", "fuser.ff.net.0") as seen:
        merged = call(model, grounded)
    finest = {s[1] for n, s in seen.items() if n.startswith("down_blocks.0")}
    assert finest == {256 + 2, 256}  # all tokens meet the two boxes
    assert not torch.allclose(merged, plain, atol=1e-3)
    # The grounding moves the merged output by as much as the unmerged one, within a factor.
    moved = (merged - call(model, free)).norm() / (plain - plain_free).norm()
    assert 0.5 < moved < 2


@pytest.mark.parametrize(
    ("name", "kind", "channels", "factor"),
    [
        ("sd1", "full_adapter", [32, 64, 64], 8),
        ("sdxl", "full_adapter_xl", [32, 64, 64, 64], 16),
    ],
)
def test_t2i_adapter(name: str, kind: str, channels: list[int], factor: int) -> None:
    host, model = fresh(name)
    adapter = seeded(
        diffusers.T2IAdapter,
        channels=channels,
        num_res_blocks=1,
        downscale_factor=factor,
        adapter_type=kind,
    )
    features = adapter(noise(2, 3, 128, 128, seed=5))
    inputs = host.inputs(16, 16, 2, 0, 500)

    def run(scale: float) -> torch.Tensor:
        residuals = [scale * feature for feature in features]  # the UNet empties the list
        return call(model, inputs | {"down_intrablock_additional_residuals": residuals})

    plain = run(1.0)
    tomesd.apply_patch(model, ratio=0)
    assert torch.equal(run(1.0), plain)
    tomesd.apply_patch(model, ratio=0.5)
    merged = run(1.0)
    assert merged.isfinite().all() and not torch.allclose(merged, plain, atol=1e-3)
    assert not torch.allclose(run(0.0), merged, atol=1e-3)
    tomesd.remove_patch(model)
    assert torch.equal(run(1.0), plain)


LORA = {
    "r": 4,
    "lora_alpha": 16,
    "init_lora_weights": False,  # the usual start, B = 0, would be no LoRA at all
    "target_modules": ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "ff.net.0.proj", "ff.net.2"],
}


def add_adapter(model: Any) -> Any:
    model.add_adapter(LoraConfig(**LORA))
    return model


def wrap_in_peft(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(**LORA))


@pytest.mark.parametrize("adapt", [add_adapter, wrap_in_peft])
def test_lora_before_and_after_the_patch(adapt: Callable[[Any], Any]) -> None:
    name = "sd1"
    host, _ = fresh(name)
    options = {"ratio": 0.5, **EVERYTHING}

    def adapted(model: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            return adapt(model).eval()

    lora = adapted(fresh(name)[1])
    plain = host.run(lora)
    assert not torch.allclose(plain, host.run(fresh(name)[1]), atol=1e-3)
    before = module_state(lora)
    assert tomesd.apply_patch(lora, **options) is lora
    merged = host.run(lora)
    assert not torch.allclose(merged, plain, atol=1e-3)
    tomesd.remove_patch(lora)
    assert module_state(lora) == before and torch.equal(host.run(lora), plain)

    bare = tomesd.apply_patch(fresh(name)[1], **options)
    assert not torch.allclose(host.run(bare), merged, atol=1e-3)
    late = adapted(bare)
    assert torch.equal(host.run(late), merged)
    tomesd.remove_patch(late)
    assert module_state(late) == before and torch.equal(host.run(late), plain)


@FEW
def test_freeu_before_and_after_the_patch(name: str) -> None:
    host, early = fresh(name)
    _, late = fresh(name)
    freeu = {"s1": 0.9, "s2": 0.2, "b1": 1.5, "b2": 1.6}
    tomesd.apply_patch(late, 0.5)
    merged = host.run(late)
    late.enable_freeu(**freeu)
    early.enable_freeu(**freeu)
    plain = host.run(early)
    tomesd.apply_patch(early, ratio=0)
    assert torch.equal(host.run(early), plain)
    tomesd.apply_patch(early, 0.5)
    both = host.run(early)
    assert torch.equal(host.run(late), both)
    assert not torch.allclose(both, plain, atol=1e-3)
    assert not torch.allclose(both, merged, atol=1e-3)
    late.disable_freeu()
    assert torch.equal(host.run(late), merged)
    tomesd.remove_patch(early)
    assert torch.equal(host.run(early), plain)


def _prior() -> nn.Module:
    """Makes an embedding of an image, not an image, of the blocks that a UNet has too."""
    return diffusers.PriorTransformer(2, 8, 1, embedding_dim=8, num_embeddings=7)


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


@pytest.mark.parametrize("make", [_prior, _sequential])
def test_unsupported_models_are_refused_and_left_alone(make: Callable[[], Any]) -> None:
    model = make()
    root = getattr(model, "transformer", model)
    before, attributes = module_state(root), set(vars(model))
    with pytest.raises(tomesd.UnsupportedModelError, match="Supported") as caught:
        tomesd.apply_patch(model, ratio=0.5)
    assert isinstance(caught.value, RuntimeError)
    for family in ("Stable Diffusion", "UNet2DConditionModel", "DiT", "PixArt"):
        assert family in str(caught.value)
    assert module_state(root) == before and set(vars(model)) == attributes


def test_a_wrapper_is_searched_until_a_model_is_found() -> None:
    """Some wrappers have an attribute `model` that is not the network, such as its name."""
    wrapper = SimpleNamespace(model="stable-diffusion", unet=make_unet())
    assert tomesd.apply_patch(wrapper, 0.5) is wrapper
    assert tomesd.describe(wrapper, 32, 32).parts[0].settings is not None
    tomesd.remove_patch(wrapper)


def test_supported_model_under_another_name_is_still_found() -> None:
    """What counts is the block: a plain module around a UNet is patched like the UNet."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_unet()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    host, wrapper = HOSTS["sd1"], Wrapper()
    plain = host.run(wrapper)
    tomesd.apply_patch(wrapper, 0.5)
    merged = host.run(wrapper)
    tomesd.remove_patch(wrapper)
    assert torch.equal(host.run(wrapper), plain)
    direct = tomesd.apply_patch(make_unet(), 0.5)
    assert torch.equal(merged, host.run(direct)) and not torch.equal(merged, plain)
