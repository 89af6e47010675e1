"""Wrong options, odd inputs and odd sizes: told clearly, or handled; never a crash or a new NaN."""

import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo_diffusers import HOSTS, SD2_CONFIG, call, make_unet, module_state

import tomesd

SD1, SDXL, PIXART = HOSTS["sd1"], HOSTS["sdxl"], HOSTS["pixart"]


def assert_differs(actual: torch.Tensor, other: torch.Tensor) -> None:
    assert (actual - other).std() > 1e-3 * other.std()


def merge_warnings(action: Callable[[], Any]) -> list[str]:
    """The texts of all `MergeWarning`s that `action` gives, however often."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught if issubclass(w.category, tomesd.MergeWarning)]


# Wrong options

NAN, INF = float("nan"), float("inf")
WRONG: dict[str, list[Any]] = {
    "ratio": [-1, -1e-9, 1.5, NAN, INF, -INF, None, "0.5", True, [0.5], 1j],
    "max_downsample": [0, -1, 3, 5, 16, "1", 1.5, True, NAN],
    "sx": [0, -1, 1.5, "2", None, True, NAN],
    "sy": [0, -2, 2.5, "2", None, False],
    "use_rand": ["yes", 1, 0.0, None],
    "merge_attn": ["no", 1, None],
    "merge_crossattn": [2, "yes", None],
    "merge_mlp": [[], 1, None],
    "seed": ["a", 1.5, None, NAN, True],
}
WRONG_PAIRS = [(name, value) for name, values in WRONG.items() for value in values]
# What the message must say about the values that are allowed.
ALLOWED = {
    "ratio": r"number|between 0 and 1",
    "max_downsample": r"None or (an int|one of 1, 2, 4, 8)",
    "sx": r"int|at least 1",
    "sy": r"int|at least 1",
    "seed": r"int|at least 0",
}


@pytest.fixture(scope="module")
def unets() -> dict[str, Any]:
    """One unpatched, one patched: none of the tests below may change either."""
    return {"clean": SD1.build(), "patched": tomesd.apply_patch(SD1.build(), 0.5, seed=3)}


@pytest.mark.parametrize(("name", "value"), WRONG_PAIRS, ids=lambda x: repr(x)[:20])
@pytest.mark.parametrize("which", ["clean", "patched"])
def test_wrong_options_are_named_and_change_nothing(
    unets: dict[str, Any], which: str, name: str, value: Any
) -> None:
    unet = unets[which]
    before = module_state(unet)
    with pytest.raises((ValueError, TypeError)) as caught:
        tomesd.apply_patch(unet, **{name: value})
    message = str(caught.value)
    assert name in message and repr(value) in message
    assert re.search(ALLOWED.get(name, "bool"), message)
    assert module_state(unet) == before
    with pytest.raises(type(caught.value)), tomesd.patched(unet, **{name: value}):
        pass
    assert module_state(unet) == before


def test_an_earlier_patch_stays_in_force() -> None:
    unet = tomesd.apply_patch(SD1.build(), 0.5, seed=3)
    merged = SD1.run(unet)
    for options in ({"ratio": NAN}, {"sx": 0}, {"use_rand": "yes"}):
        with pytest.raises((ValueError, TypeError)):
            tomesd.apply_patch(unet, **options)
        assert torch.equal(SD1.run(unet), merged)


@pytest.mark.parametrize(
    "model", [torch.nn.Linear(2, 2), torch.nn.Sequential(), object(), None, "x"]
)
def test_unknown_models_are_refused(model: Any) -> None:
    with pytest.raises(tomesd.UnsupportedModelError) as caught:
        tomesd.apply_patch(model)
    for family in ("UNet2DConditionModel", "PixArt", "Stable Diffusion", "ComfyUI"):
        assert family in str(caught.value)


# Asking for more than can be done


@pytest.mark.parametrize(
    ("options", "effective"),
    [
        ({"ratio": 0.9}, "0.75"),
        ({"ratio": 1}, "0.75"),
        ({"ratio": 0.76, "sx": 2, "sy": 2}, "0.75"),
        ({"ratio": 0.8, "sx": 2, "sy": 1}, "0.5"),
        ({"ratio": 0.99, "sx": 4, "sy": 4}, "0.9375"),
    ],
)
def test_ratio_above_the_cap_merges_at_the_cap(options: dict[str, Any], effective: str) -> None:
    unet = SD1.build()
    texts = merge_warnings(lambda: tomesd.apply_patch(unet, **options))
    assert len(texts) == 1
    assert effective in texts[0]
    at_cap = tomesd.apply_patch(SD1.build(), **(options | {"ratio": float(effective)}))
    outputs = []
    assert merge_warnings(lambda: outputs.extend([SD1.run(unet), SD1.run(at_cap)])) == []
    assert torch.equal(*outputs)
    assert_differs(outputs[0], SD1.run(SD1.build()))


@pytest.mark.parametrize("ratio", [0, 0.0, 0.5, 0.75])
def test_no_warning_where_there_is_nothing_to_say(ratio: float) -> None:
    unet = SD1.build()

    def use() -> None:
        tomesd.apply_patch(unet, ratio)
        SD1.run(unet)
        tomesd.remove_patch(unet)

    assert merge_warnings(use) == []


@pytest.mark.parametrize(
    ("host", "options", "size"),
    [
        (SDXL, {"max_downsample": 1}, (16, 16)),
        (PIXART, {"max_downsample": 1}, (16, 16)),
        (SD1, {"ratio": 0.5}, (1, 1)),
        (SD1, {"ratio": 0.001}, (8, 8)),
        (SD1, {"sx": 1, "sy": 1, "ratio": 0.0001}, (8, 8)),
    ],
    ids=["sdxl at level 1", "pixart at level 1", "one token", "too small a ratio", "cells of one"],
)
def test_doing_nothing_is_said_once(
    host: Any, options: dict[str, Any], size: tuple[int, int]
) -> None:
    model = host.build()
    height, width = size
    plain = host.run(model, height=height, width=width)
    outputs = []

    def use() -> None:
        tomesd.apply_patch(model, **options)
        outputs.extend(host.run(model, height=height, width=width) for _ in range(3))

    texts = [text for text in merge_warnings(use) if "cap" not in text]
    assert len(texts) == 1
    assert f"{height}x{width}" in texts[0]
    for output in outputs:
        assert torch.equal(output, plain)


# Odd numbers

HUGE = 2e4


def make_scaled_unet(value: float, dtype: torch.dtype) -> Any:
    """A UNet whose blocks get tokens of about this size."""
    unet = make_unet(SD2_CONFIG)
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if ".proj_in." in name:
                parameter.mul_(value)
            elif ".proj_out." in name and value > 1:
                parameter.div_(value)
    return unet.to(dtype)


def run_as(unet: Any, dtype: torch.dtype, sample: torch.Tensor | None = None) -> torch.Tensor:
    inputs = SD1.inputs(16, 16, 2, 0, 500)
    if sample is not None:
        inputs["sample"] = sample
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        return call(unet, inputs)


ALL: dict[str, Any] = {"ratio": 0.5, "merge_crossattn": True, "merge_mlp": True, "window": 0}


@pytest.mark.parametrize("use_rand", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, 1e-7, HUGE], ids=["zero", "tiny", "huge"])
def test_tokens_without_a_usual_norm(value: float, dtype: torch.dtype, use_rand: bool) -> None:
    """Zero tokens have no direction, and the norms of large ones overflow float16."""
    unet = make_scaled_unet(value, dtype)
    plain = run_as(unet, dtype)
    assert plain.isfinite().all()
    tomesd.apply_patch(unet, **ALL, use_rand=use_rand)
    merged = run_as(unet, dtype)
    assert merged.isfinite().all()
    if value == 0:  # all tokens are the same: merging them changes nothing but rounding
        torch.testing.assert_close(merged, plain, rtol=0.02, atol=0.02)
    elif value > 1:
        assert not torch.equal(merged, plain)


def test_huge_tokens_really_are_huge() -> None:
    """The test above would be idle if float16 could hold the norms of its tokens."""
    unet, norms = make_scaled_unet(HUGE, torch.float16), []
    block = unet.down_blocks[0].attentions[0].transformer_blocks[0]
    block.register_forward_pre_hook(lambda _, args: norms.append(args[0].float().norm(dim=-1)))
    run_as(unet, torch.float16)
    assert norms[0].quantile(0.75) > torch.finfo(torch.float16).max


@pytest.mark.parametrize("power", [4, 13])
def test_matching_in_half_precision_ignores_scale(power: int) -> None:
    """Powers of two change no bits of the direction, so they must not change the matching."""
    metric = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(0)).half()
    x = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(1))
    tokens = []
    for scale in (1.0, 2.0**power):
        assert (metric * scale).isfinite().all()
        merge, _ = tomesd.merge.bipartite_soft_matching_random2d(
            metric * scale, 8, 8, 2, 2, 32, no_rand=True
        )
        tokens.append(merge(x))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_bad_item_stays_alone(bad: float) -> None:
    """A NaN latent gives NaN, but the picture beside it in the batch keeps its bits."""
    unet = tomesd.apply_patch(SD1.build(), **ALL)
    sample = SD1.inputs(16, 16, 2, 0, 500)["sample"].clone()
    clean = run_as(unet, torch.float32, sample)
    sample[1, :, 3, 5] = bad
    output = run_as(unet, torch.float32, sample)
    assert torch.equal(output[0], clean[0])
    plain = run_as(tomesd.remove_patch(unet), torch.float32, sample)
    assert not (output.isnan() & ~plain.isnan()).any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 0.0])
def test_bad_metric_does_not_spoil_good_tokens(bad: float) -> None:
    metric = torch.randn(1, 36, 8, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 36, 4, generator=torch.Generator().manual_seed(1))
    for spoilt in (slice(7, 8), slice(0, 20), slice(0, 36)):
        odd = metric.clone()
        odd[:, spoilt] = bad
        merge, unmerge = tomesd.merge.bipartite_soft_matching_random2d(odd, 6, 6, 2, 2, 18)
        assert merge(x).shape == (1, 18, 4)
        assert unmerge(merge(x)).isfinite().all()
        assert (merge(torch.ones_like(x)) == 1).all()


# Odd sizes


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.sampled_from([1, 2, 4, 8, None]),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.sampled_from([0.1, 0.5, 0.75, 1.0]),
    st.booleans(),
)
def test_every_size_runs(
    grid: tuple[int, int],
    max_downsample: int | None,
    cell: tuple[int, int],
    ratio: float,
    use_rand: bool,
) -> None:
    unet, (height, width) = TINY, grid
    plain = SD1.run(unet, height=height, width=width, batch=1)
    options = {"max_downsample": max_downsample, "sx": cell[0], "sy": cell[1]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tomesd.MergeWarning)
        with tomesd.patched(unet, ratio, **options, use_rand=use_rand, merge_mlp=True):
            merged = SD1.run(unet, height=height, width=width, batch=1)
    assert merged.shape == plain.shape
    assert merged.isfinite().all()
    assert torch.equal(SD1.run(unet, height=height, width=width, batch=1), plain)


TINY = make_unet(
    block_out_channels=(32, 64),
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
)


@pytest.mark.parametrize(
    ("size", "cell"),
    [
        ((1, 16), (2, 2)),
        ((16, 1), (2, 2)),
        ((3, 3), (4, 4)),
        ((2, 9), (5, 3)),
        ((13, 15), (2, 2)),
        ((7, 5), (3, 2)),
    ],
)
@pytest.mark.parametrize("max_downsample", [None, 8])
def test_what_can_be_merged_is_merged(
    size: tuple[int, int], cell: tuple[int, int], max_downsample: int | None
) -> None:
    """Rows, columns, grids smaller than a cell and left-over tokens merge as far as they go."""
    (height, width), (sx, sy) = size, cell
    unet = SD1.build()
    plain = SD1.run(unet, height=height, width=width)
    tomesd.apply_patch(unet, 0.5, max_downsample, sx, sy)
    merged = SD1.run(unet, height=height, width=width)
    assert merged.isfinite().all()
    assert_differs(merged, plain)


# What `import tomesd` costs

HEAVY = ("diffusers", "triton", "torchvision", "transformers", "accelerate", "peft", "einops")


def heavy_imports(statement: str, path: Path | None = None) -> set[str]:
    """The packages of `HEAVY` that `statement` looks for in a fresh interpreter that has torch.

    Looking for one counts: where it is installed, it would be loaded.
    """
    program = textwrap.dedent(f"""
        import sys
        import torch
        class Note:
            def find_spec(self, name, path=None, target=None):
                if name in {HEAVY}:
                    print(name)
        sys.meta_path.insert(0, Note())
        {statement}
    """)
    command = [sys.executable, "-c", program]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=path)
    return set(out.stdout.split())


def test_import_is_light() -> None:
    assert heavy_imports("import tomesd; tomesd.apply_patch, tomesd.describe") == set()


def test_the_import_check_sees_what_is_imported(tmp_path: Path) -> None:
    (tmp_path / "indirect.py").write_text("import direct\n")
    (tmp_path / "direct.py").write_text(
        "import einops.layers\ntry:\n    import triton\nexcept ImportError:\n    pass\n"
    )
    assert heavy_imports("import indirect", tmp_path) == {"einops", "triton"}
    assert heavy_imports("import json, torch.nn", tmp_path) == set()
