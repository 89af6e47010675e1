"""Where merging is left out because it does not pay: decisions on machines that tests make up."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
import zoo_ldm
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from merging_dit import SUPPORTED
from torch.utils.flop_counter import FlopCounterMode
from zoo_diffusers import HOSTS

import tomesd
from tomesd import kernels, outline, policy, rule
from tomesd.bench.models import ARCHITECTURES
from tomesd.machine import Launcher, Machine, find_launcher
from tomesd.outline import count_layers, outline_blocks
from tomesd.patch import patch_of
from tomesd.regions.model import fullness
from tomesd.rule import Verdict, Work, compare
from tomesd.state import Call

SD1 = HOSTS["sd1"]
FAST_GPU = Machine(600e12, 380e12, 4.3e12, 40e-6, 2.5e-6)
"""And a slow host."""
SLOW_GPU = Machine(13e12, 8e12, 360e9, 5e-6, 2.5e-6)
"""And a fast host."""
CPU = Machine(2e11, 1e11, 2e10, 1e-5, apart=False)


def build(name: str) -> Any:
    with torch.device("meta"):
        return diffusers.UNet2DConditionModel(**ARCHITECTURES[name])


@pytest.fixture(scope="module")
def unets() -> dict[str, Any]:
    """The architectures as published, without weights."""
    return {name: build(name) for name in ("sd15", "sdxl")}


@pytest.fixture
def ask(unets: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What the rule says about a UNet on a machine: for each level, and what it expects."""

    def told(
        machine: Machine,
        side: int,
        images: int = 1,
        *,
        model: str = "sd15",
        launcher: Launcher = "eager",
        triton: bool = True,
        dtype: torch.dtype = torch.float16,
        score_heads: int = 0,
        batch: int | None = None,
        **options: Any,
    ) -> tuple[dict[int, str], Verdict]:
        monkeypatch.setattr(rule, "machine_of", lambda *_: machine)
        monkeypatch.setattr(rule, "find_launcher", lambda _: launcher)
        monkeypatch.setattr(rule.kernels, "use_triton", lambda *_: triton)
        unet = tomesd.apply_patch(unets[model], **{"ratio": 0.5} | options)
        patch, size = patch_of(unet), (side // 8, side // 8)
        x = torch.empty(batch or 2 * images, 1, *size, dtype=dtype, device="meta")
        call = Call(patch, patch.settings, size, fullness=fullness(x.shape[0], {}))
        left_alone = policy._judge_unet(call, x, score_heads)
        assert call.verdict is not None
        return left_alone, call.verdict

    return told


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_what_a_unet_does_is_counted(
    name: str, unets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against PyTorch's own counter, which runs the model."""
    monkeypatch.setattr(outline, "_CONVOLUTION", 1.0)
    monkeypatch.setattr(outline, "_SOFTMAX", 0)
    unet, side = unets[name], unets[name].config.sample_size
    found = patch_of(tomesd.apply_patch(build(name), 0.5)).outline
    counted = [(level.scale, layers) for level in found.levels for layers in level.kinds.values()]
    total = 0.0
    for scale, layers in (*counted, *found.around):
        tokens = (side // scale) ** 2
        total += layers.operations * tokens + layers.pairs * tokens**2
    made = {"text_embeds": torch.empty(1, 1280), "time_ids": torch.empty(1, 6)}
    made = {name: value.to("meta") for name, value in made.items()}
    text = torch.empty(1, 77, unet.config.cross_attention_dim, device="meta")
    x, time = torch.empty(1, 4, side, side, device="meta"), torch.tensor(1, device="meta")
    tomesd.remove_patch(unet)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        unet(x, time, text, added_cond_kwargs=made)
    assert total == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_what_a_transformer_does_to_image_tokens_is_counted() -> None:
    """Flux: in each block four projections and a feed-forward layer of eight; shifts, scales and
    the text's own layers are not for image tokens."""
    heads, width = 2, 128
    config = {"attention_head_dim": 64, "num_attention_heads": heads, "joint_attention_dim": 32}
    config |= {"num_layers": 1, "num_single_layers": 2, "pooled_projection_dim": 32}
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(**config)
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    (level,) = outline_blocks(blocks).levels
    operations = sum(layers.operations for layers in level.kinds.values())
    assert operations == 3 * 2 * 12 * width**2
    assert level.kinds["attn"].pairs == pytest.approx(3 * 4 * width)
    assert level.channels == width and level.blocks == 3


def test_quantized_weights_count_as_what_they_stand_for() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(64, 32))
    before = count_layers(block)
    block[0].weight = torch.nn.Parameter(torch.empty(1, 1024))
    assert count_layers(block) == before


def test_changes_pay_where_the_model_as_a_whole_gets_faster() -> None:
    machine = Machine(1.0, 1.0, 1.0, launch=1.0)
    model = Work(device=10.0, launches=8.0)
    less = (Work(device=4.0), Work(device=1.0, launches=1.0))
    assert compare(machine, model, [less]) == Verdict((True,), 10.0, 9.0, 9.0)
    # The second takes operations too, but the host is already what takes longest.
    assert compare(machine, model, [less, less]) == Verdict((True, False), 10.0, 9.0, 10.0)
    # A CPU launches and computes in turn.
    cpu = replace(machine, apart=False)
    assert compare(cpu, model, [less, less]) == Verdict((True, True), 18.0, 14.0, 14.0)


class TestDecisions:
    def test_a_slow_gpu_merges_what_a_slow_host_leaves_alone(self, ask: Any) -> None:
        assert ask(SLOW_GPU, 512)[0][1] == ""
        left_alone, verdict = ask(FAST_GPU, 512)
        assert left_alone[1] == "pays in CUDA graphs only" and verdict.gain == 1
        assert verdict.everywhere > verdict.before
        assert ask(FAST_GPU, 512, launcher="graph")[0][1] == ""
        assert ask(replace(FAST_GPU, launch=2e-6), 512)[0][1] == ""
        assert ask(CPU, 512, dtype=torch.float32, triton=False)[0][1] == ""

    @pytest.mark.parametrize(("side", "images"), [(512, 8), (1024, 1), (2048, 1)])
    def test_what_was_measured_to_be_faster_merges(self, ask: Any, side: int, images: int) -> None:
        left_alone, verdict = ask(FAST_GPU, side, images)
        assert left_alone[1] == "" and verdict.gain > 1

    def test_a_deep_model_waits_for_the_host(self, ask: Any) -> None:
        everything = {"max_downsample": 4, "merge_crossattn": True, "merge_mlp": True}
        left_alone, _ = ask(FAST_GPU, 1024, model="sdxl", **everything)
        assert set(left_alone.values()) == {"pays in CUDA graphs only"}
        assert set(ask(FAST_GPU, 2048, model="sdxl", **everything)[0].values()) == {""}

    def test_more_of_everything_that_is_saved_pays_sooner(self, ask: Any) -> None:
        def gain(**more: Any) -> float:
            return ask(SLOW_GPU, 512, **more)[1].gain

        assert gain(ratio=0.25) < gain() < gain(ratio=0.75)
        assert gain(target="kv") < gain() < gain(max_downsample=2) < gain(target="stack")
        assert gain() < gain(score_heads=8)

    def test_selector_backend_and_dtype_are_known(self, ask: Any) -> None:
        assert ask(FAST_GPU, 1024)[0][1] == ""
        assert ask(FAST_GPU, 1024, selector="kmeans")[0][1] != ""
        assert ask(FAST_GPU, 1024, triton=False)[0][1] != ""
        one, half = (ask(SLOW_GPU, 512, dtype=d)[1] for d in (torch.float32, torch.float16))
        assert one.before > half.before

    def test_a_plan_for_some_blocks_or_steps_costs_less(self, ask: Any) -> None:
        after = [ask(SLOW_GPU, 512, share=share)[1].after for share in ("block", "level", "steps")]
        assert after[0] > after[1] > after[2]

    @pytest.mark.parametrize("side", [512, 768])
    def test_both_halves_of_guidance_in_one_call_or_in_two(self, ask: Any, side: int) -> None:
        """One image: the same decision on every machine, and another for many images on some."""
        differ = 0
        for microseconds in (2, 5, 10, 20, 40, 80):
            machine = replace(FAST_GPU, launch=microseconds * 1e-6)
            one, both, many = (ask(machine, side, batch=n)[0] for n in (1, 2, 16))
            assert one == both
            differ += one != many
        assert differ > 0

    def test_what_is_told_is_of_the_call_as_it_is(self, ask: Any) -> None:
        one, both = (ask(SLOW_GPU, 512, batch=n)[1] for n in (1, 2))
        assert one.pays == both.pays
        assert one.before < 0.6 * both.before and one.after < 0.6 * both.after

    @pytest.mark.parametrize("images", [1, 3, 8])
    def test_comfyui_says_which_halves_are_in_a_call(self, images: int) -> None:
        def judged(batch: int, halves: list[int]) -> float:
            return batch * fullness(batch, {"transformer_options": {"cond_or_uncond": halves}})

        both = judged(2 * images, [1, 0])
        assert both == judged(images, [1]) == judged(images, [0]) == 2 * images


def run(model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return SD1.run(model, **options)


def use(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(rule, "machine_of", lambda *_: machine)


SLOW_LAUNCH = Machine(1e15, 1e15, 1e13, launch=1e-4, apart=False)
"""On which no small model gets faster."""
SLOW_HOST = Machine(1e6, 1e6, 1e12, launch=1e6)
"""On which all would get faster, were it not for the host."""


def test_layers_are_left_alone_and_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SLOW_LAUNCH)
    model = SD1.build()
    plain = run(model)
    tomesd.apply_patch(model, 0.5)
    told = r'longer than merging saves \(expected to take .* ms a call.*\); when="always"'
    with pytest.warns(tomesd.MergeWarning, match=told):
        assert torch.equal(run(model), plain)
    text = str(tomesd.describe(model, 128, 128))
    assert "left alone: not faster" in text and "ms a call merged, and" in text
    tomesd.apply_patch(model, 0.5, when="always")
    with warnings.catch_warnings():
        warnings.simplefilter("error", tomesd.MergeWarning)
        assert not torch.equal(run(model), plain)
    assert "left alone" not in str(tomesd.describe(model, 128, 128))


def test_describe_tells_what_is_expected() -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5)
    (part,) = tomesd.describe(model, 128, 128).parts
    assert part.verdict is not None and part.verdict.gain > 1
    assert f"expected to be {part.verdict.gain:.2f}x as fast" in str(part)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_where_the_host_is_in_the_way_the_user_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    use(monkeypatch, SLOW_HOST)
    model = SD1.build()
    plain = run(model)
    tomesd.apply_patch(model, 0.5)
    assert "left alone: pays in CUDA graphs only" in str(tomesd.describe(model, 128, 128))
    runs = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    with pytest.warns(tomesd.MergeWarning, match=r'the host, .*"reduce-overhead".*pays'):
        torch.testing.assert_close(run(runs), plain)


def test_kernels_are_loaded_before_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager mode leaves alone what a graph would merge, and no kernel loads in a capture."""
    use(monkeypatch, SLOW_HOST)
    made: list[Any] = []
    original = kernels.reference.match_tokens
    record = lambda metric, *rest: made.append(metric.shape) or original(metric, *rest)  # noqa: E731
    monkeypatch.setattr(kernels.reference, "match_tokens", record)
    model = SD1.build()
    plain = run(model)
    tomesd.apply_patch(model, 0.5)
    with pytest.warns(tomesd.MergeWarning, match="pays"):
        assert torch.equal(run(model), plain)
    assert {shape[1] for shape in made} == {16 * 16}
    loaded = len(made)
    assert torch.equal(run(model), plain)
    assert len(made) == loaded  # once for each shape


def test_a_model_is_judged_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    judge = policy._judge_unet
    monkeypatch.setattr(policy, "_judge_unet", lambda *a: asked.append(a[0].size) or judge(*a))
    model = tomesd.apply_patch(SD1.build(), 0.5, max_downsample=2)
    for height in (16, 16, 24, 16):
        run(model, height=height)
    assert asked == [(16, 16), (24, 16)]


@pytest.mark.parametrize("name", ["flux", "zimage"])
def test_a_transformer_is_judged_by_the_items_of_a_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that takes a list of them."""
    told: list[int] = []
    judge = policy.judge
    monkeypatch.setattr(policy, "judge", lambda *a: told.append(len(a[2])) or judge(*a))
    dit = SUPPORTED[name]
    model = tomesd.apply_patch(dit.build(), 0.5, end=1.0)
    for batch in (2, 3):
        dit.run(model, dit.inputs(batch=batch))
    assert told == [2, 3]


class Unknown(AttnProcessor):
    """A processor that we cannot know."""


@pytest.fixture
def score_heads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the rule was told about attention."""
    told: list[int] = []
    judge = policy._judge_unet
    monkeypatch.setattr(policy, "_judge_unet", lambda *a: told.append(a[2]) or judge(*a))
    return told


@pytest.mark.parametrize("fused", [AttnProcessor2_0, Unknown])
def test_the_rule_follows_the_processor(fused: type, score_heads: list[int]) -> None:
    model = tomesd.apply_patch(SD1.build(), 0.5)
    # What has been found out about a shape is not asked again.
    for processor, told in ((fused(), {0}), (AttnProcessor(), {4}), (fused(), set())):
        score_heads.clear()
        model.set_attn_processor(processor)
        run(model)
        assert set(score_heads) == told


@pytest.mark.parametrize(
    ("name", "heads"), [("ldm-sd1", 2), ("compvis", 2), ("sgm", 0), ("comfy-unet", 0)]
)
def test_the_rule_knows_the_attention_of_ldm(name: str, heads: int, score_heads: list[int]) -> None:
    host = zoo_ldm.HOSTS[name]
    host.run(tomesd.apply_patch(host.build(), 0.5))
    assert set(score_heads) == {heads}


@pytest.mark.parametrize(
    ("options", "launcher"),
    [
        ({}, "compiled"),
        ({"mode": "reduce-overhead"}, "graph"),
        ({"mode": "max-autotune"}, "graph"),
        ({"options": {"triton.cudagraphs": True}}, "graph"),
        ({"backend": "eager"}, "compiled"),
    ],
    ids=str,
)
def test_the_mode_of_the_compiler_is_known(options: dict[str, Any], launcher: str) -> None:
    torch._dynamo.reset()
    words = {"eager": 1, "compiled": 2, "graph": 3}

    def told(x: torch.Tensor) -> torch.Tensor:
        return x + words[find_launcher(x.device)]

    assert find_launcher(torch.device("cpu")) == "eager"
    compiled = torch.compile(told, fullgraph=True, **options)
    assert compiled(torch.zeros(1)).item() == words[launcher]
    torch._dynamo.reset()
