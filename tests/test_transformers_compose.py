"""Patched diffusion transformers keep working with what else is done to them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import diffusers.hooks
import pytest
import torch
from accelerate.hooks import AlignDevicesHook
from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.hooks import MagCacheConfig, TaylorSeerCacheConfig
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from merging_dit import (
    ALWAYS,
    SUPPORTED,
    assert_differs,
    assert_rounding,
    at_noise,
    block_calls,
    block_lists,
    patched_model,
    tokens_seen,
)
from torch import Tensor
from zoo_diffusers import module_state, noise
from zoo_dit import Dit, alone

import tomesd

FLUX, SD3, QWEN, WAN = (SUPPORTED[name] for name in ("flux", "sd35", "qwen_edit", "wan"))
SOME = pytest.mark.parametrize(
    "dit",
    [SUPPORTED[name] for name in ("flux", "qwen_edit", "wan", "zimage")],
    ids=lambda dit: dit.name,
)
ORDER = pytest.mark.parametrize("patch_first", [True, False], ids=["patch first", "patch last"])


def in_order(patch_first: bool, model: Any, other: Callable[[Any], Any], **options: Any) -> Any:
    """Patches a model before or after something else is done to it."""
    if not patch_first:
        other(model)
    tomesd.apply_patch(model, 0.5, **{**ALWAYS, **options})
    if patch_first:
        other(model)
    return model


# Gradients and precision


def gradients(model: Any, dit: Dit, inputs: Any) -> Tensor:
    model.requires_grad_(True).train()
    loss = dit.output(model(**inputs, return_dict=False)).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None])


@SOME
@ORDER
def test_gradient_checkpointing_gives_the_same_gradients(dit: Dit, patch_first: bool) -> None:
    inputs = dit.inputs()
    expected = gradients(patched_model(dit), dit, inputs)
    assert_differs(expected, gradients(dit.build(), dit, inputs))
    model = in_order(patch_first, dit.build(), lambda m: m.enable_gradient_checkpointing())
    assert_rounding(gradients(model, dit, inputs), expected)


def test_gradients_are_of_the_output_that_is_made_without_them() -> None:
    inputs = FLUX.inputs()
    model = patched_model(FLUX).requires_grad_(True)
    output = FLUX.output(model(**inputs, return_dict=False))
    assert output.requires_grad
    assert_rounding(output.detach(), FLUX.run(patched_model(FLUX), inputs))


@pytest.mark.parametrize("name", ["flux", "sd35", "wan", "hunyuan_video", "zimage"])
def test_bfloat16(name: str) -> None:
    """Runs in that precision, really merges, and about as far from float32 as without merging."""
    dit = SUPPORTED[name]
    inputs = dit.inputs(batch=1)

    def low(model: Any) -> Tensor:
        kind = torch.bfloat16

        def cast(value: Any) -> Any:
            if isinstance(value, list):
                return [cast(part) for part in value]
            floats = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(kind) if floats else value

        times = ("timestep", "t", "img_ids", "txt_ids")
        given = {n: v if n in times else cast(v) for n, v in inputs.items()}
        output = dit.run(model.to(kind), given)
        assert output.dtype == kind and output.isfinite().all()
        return output.float()

    plain, merged = dit.run(dit.build(), inputs), dit.run(patched_model(dit), inputs)
    error = (low(dit.build()) - plain).std()
    change = (merged - plain).std()
    assert error < 0.5 * change  # else the next line would say nothing
    # Other tokens may be alike after rounding, so that some merge with others.
    assert (low(patched_model(dit)) - plain).std() > 0.5 * change
    grid = {"selector": "grid", "use_rand": False}
    rounded = low(patched_model(dit, **grid)) - dit.run(patched_model(dit, **grid), inputs)
    assert rounded.std() < 3 * error


# Weights


def low_rank(model: Any) -> None:
    from peft import LoraConfig

    kinds = ["to_q", "to_v", "add_q_proj"] if hasattr(model, "transformer_blocks") else ["to_q"]
    config = LoraConfig(r=2, lora_alpha=4, target_modules=kinds, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model.add_adapter(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.mul_(5)


@SOME
@ORDER
def test_low_rank_adapters(dit: Dit, patch_first: bool) -> None:
    inputs = dit.inputs()
    merged = dit.run(patched_model(dit), inputs)
    other = dit.build()
    low_rank(other)
    plain = dit.run(other, inputs)
    model = in_order(patch_first, dit.build(), low_rank)
    adapted = dit.run(model, inputs)
    assert_differs(adapted, merged)
    assert_differs(adapted, plain)
    assert torch.equal(adapted, dit.run(tomesd.apply_patch(other, 0.5, **ALWAYS), inputs))
    model.disable_adapters()
    assert_rounding(dit.run(model, inputs), merged)
    model.enable_adapters()
    tomesd.remove_patch(model)
    assert torch.equal(dit.run(model, inputs), plain)


@ORDER
@pytest.mark.parametrize("dit", [FLUX, WAN], ids=lambda dit: dit.name)
def test_quantised_linear_layers(dit: Dit, patch_first: bool) -> None:
    from torchao import quantization  # slow to import

    def quantise(model: Any) -> None:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())

    inputs = dit.inputs()
    merged, plain = dit.run(patched_model(dit), inputs), dit.run(dit.build(), inputs)
    model = in_order(patch_first, dit.build(), quantise)
    output = dit.run(model, inputs)
    assert not torch.equal(output, merged)
    assert (output - merged).std() < 0.5 * (merged - plain).std()
    tomesd.remove_patch(model)
    reference = dit.build()
    quantise(reference)
    assert torch.equal(dit.run(model, inputs), dit.run(reference, inputs))


# Attention


@SOME
@ORDER
def test_attention_backends(dit: Dit, patch_first: bool) -> None:
    inputs = dit.inputs()
    merged = dit.run(patched_model(dit), inputs)
    for backend in ("native", "_native_math"):
        model = in_order(patch_first, dit.build(), lambda m, b=backend: m.set_attention_backend(b))
        assert_rounding(dit.run(model, inputs), merged)


@ORDER
def test_ip_adapter(patch_first: bool) -> None:
    """Attention to a picture's tokens is added to what the merged tokens get."""

    def adapt(model: Any) -> None:
        generator = torch.Generator().manual_seed(7)
        for block in model.transformer_blocks:
            processor = FluxIPAdapterAttnProcessor(32, 32, num_tokens=(4,), scale=[1.0])
            for parameter in processor.parameters():
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
            block.attn.set_processor(processor)

    inputs = FLUX.inputs()
    picture = {"ip_hidden_states": [noise(2, 4, 32, seed=8)]}
    model = in_order(patch_first, FLUX.build(), adapt)
    output = FLUX.run(model, inputs | {"joint_attention_kwargs": picture})
    assert_differs(output, FLUX.run(patched_model(FLUX), inputs))
    for k in range(2):
        own = {"ip_hidden_states": [picture["ip_hidden_states"][0][k : k + 1]]}
        one = FLUX.run(model, alone(inputs, k) | {"joint_attention_kwargs": own})
        assert_rounding(one[0], output[k])
    tomesd.apply_patch(model, 0.5, target="block", **ALWAYS)
    assert_rounding(FLUX.run(model, inputs | {"joint_attention_kwargs": picture}), output)


# ControlNets


@pytest.mark.parametrize(
    ("dit", "arguments"),
    [
        (FLUX, ("controlnet_block_samples", "controlnet_single_block_samples")),
        (SUPPORTED["chroma"], ("controlnet_block_samples", "controlnet_single_block_samples")),
        (SD3, ("block_controlnet_hidden_states",)),
        (QWEN, ("controlnet_block_samples",)),
        (SUPPORTED["cosmos"], ("block_controlnet_hidden_states",)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_controlnet_residuals(dit: Dit, arguments: tuple[str, ...]) -> None:
    """They are added to all tokens between blocks, so that each block has to give all back."""
    plain = dit.build()
    inputs = dit.inputs()
    with block_calls(plain) as calls:
        dit.run(plain, inputs)
    batch, tokens, width = calls[0][1]["hidden_states"].shape
    residuals = [noise(batch, tokens, width, seed=20 + k) for k in range(2)]
    inputs |= {argument: residuals for argument in arguments}
    outputs = []
    for target in ("stack", "block"):
        model = patched_model(dit, target=target)
        with block_calls(model) as calls:
            outputs.append(dit.run(model, inputs))
        seen = [min(counts) for counts in tokens_seen(model, calls).values()]
        assert seen[1] == seen[0] - tokens // 2
    assert torch.equal(*outputs)
    assert_differs(outputs[0], dit.run(plain, inputs))
    assert_differs(outputs[0], dit.run(patched_model(dit), dit.inputs()))
    # Item by item, and given as zeros, they change nothing.
    zeros = {argument: [0 * r for r in residuals] for argument in arguments}
    assert_rounding(dit.run(model, inputs | zeros), dit.run(model, dit.inputs()))


def test_skipped_layers() -> None:
    """Skip-layer guidance of SD3 passes blocks by: none of them may be one that closes a run."""
    inputs = SD3.inputs() | {"skip_layers": [2]}
    plain = SD3.run(SD3.build(), inputs)
    together, apart = (SD3.run(patched_model(SD3, target=t), inputs) for t in ("stack", "block"))
    assert together.shape == plain.shape
    assert_differs(together, plain)
    assert_rounding(together, apart)


# Where weights are


class Offload:
    """Ways to keep weights elsewhere; each is switched on for a model."""

    @staticmethod
    def sequential(model: Any) -> None:
        accelerate.cpu_offload(model, execution_device="cpu")
        assert all(p.device.type == "meta" for p in model.parameters())

    @staticmethod
    def leaves(model: Any) -> None:
        cpu = torch.device("cpu")
        model.enable_group_offload(cpu, cpu, "leaf_level")

    @staticmethod
    def groups(model: Any) -> None:
        cpu = torch.device("cpu")
        model.enable_group_offload(cpu, cpu, "block_level", num_blocks_per_group=2)


@SOME
@ORDER
@pytest.mark.parametrize("way", [Offload.sequential, Offload.leaves, Offload.groups])
def test_offload(dit: Dit, patch_first: bool, way: Callable[[Any], None]) -> None:
    inputs = dit.inputs()
    expected = dit.run(patched_model(dit), inputs)
    model = in_order(patch_first, dit.build(), way)
    assert torch.equal(dit.run(model, inputs), expected)
    tomesd.remove_patch(model)
    assert torch.equal(dit.run(model, inputs), dit.run(dit.build(), inputs))


def split(model: Any) -> None:
    """Gives the later blocks to another device. Of that one, which has shapes alone, operations
    take no tensors of a real one."""
    blocks = [block for path in block_lists(model) for block in getattr(model, path)]
    outside = [getattr(model, name) for name in ("norm_out", "proj_out") if hasattr(model, name)]
    for part in (*blocks[len(blocks) // 2 :], *outside):
        hook = AlignDevicesHook(execution_device="meta")
        accelerate.hooks.add_hook_to_module(part.to("meta"), hook)


@pytest.mark.parametrize("name", ["flux", "chroma", "qwen", "wan", "hunyuan_video", "lumina2"])
@ORDER
@pytest.mark.parametrize("target", ["stack", "block"])
@pytest.mark.parametrize("reuse", [None, 2])
def test_blocks_on_several_devices(
    name: str, patch_first: bool, target: str, reuse: int | None
) -> None:
    """As `device_map` lays them out."""
    dit = SUPPORTED[name]
    options: dict[str, Any] = {"depth": (0.0, 1.0), "target": target, "metric": None}
    if reuse is not None:
        options |= {"reuse": reuse, "reuse_start": 0.0, "extrapolate": True}
    model, inputs = in_order(patch_first, dit.build(), split, **options), dit.inputs()
    for level in (0.9, 0.8, 0.7):
        with block_calls(model) as calls:
            output = dit.run(model, at_noise(dit, inputs, level))
        assert output.device.type == "meta"
        assert bool(calls) == (reuse is None or level != 0.8)


@ORDER
@pytest.mark.parametrize("dit", [FLUX, WAN], ids=lambda dit: dit.name)
def test_layerwise_casting(dit: Dit, patch_first: bool) -> None:
    """Weights are stored in bfloat16 and used in float32: the same as rounding them once."""

    def cast(model: Any) -> None:
        model.enable_layerwise_casting(torch.bfloat16, torch.float32)

    inputs = dit.inputs()
    model = in_order(patch_first, dit.build(), cast)
    rounded = {n for n, p in model.named_parameters() if p.dtype == torch.bfloat16}
    reference = dit.build()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in rounded:
                parameter.copy_(parameter.bfloat16().float())
    tomesd.apply_patch(reference, 0.5, **ALWAYS)
    assert torch.equal(dit.run(model, inputs), dit.run(reference, inputs))
    assert {n for n, p in model.named_parameters() if p.dtype == torch.bfloat16} == rounded != set()


# Caches of diffusers: those of whole blocks


def first_block(model: Any) -> None:
    model.enable_cache(FirstBlockCacheConfig(threshold=1e6))


def magnitudes(model: Any) -> None:
    config = MagCacheConfig(
        threshold=1e6, max_skip_steps=2, retention_ratio=0.0, num_inference_steps=4,
        mag_ratios=[1.0] * 4,
    )  # fmt: skip
    diffusers.hooks.apply_mag_cache(model, config)


def in_context(dit: Dit, model: Any, inputs: Any) -> Tensor:
    with model.cache_context("cond"):
        return dit.run(model, inputs)


CACHED = ["flux", "qwen_edit", "wan", "hunyuan_video", "cogvideox_5b", "ltx", "cogview4"]


@ORDER
@pytest.mark.parametrize("cache", [first_block, magnitudes])
@pytest.mark.parametrize("name", CACHED)
def test_caches_of_blocks(name: str, cache: Callable[[Any], None], patch_first: bool) -> None:
    """A step that is made is merged, and one that is not gets what the blocks gave then."""
    dit = SUPPORTED[name]
    inputs = dit.inputs()
    # All blocks, so that those merge whose output the cache compares and keeps; or the inner ones.
    depth = (0.0, 1.0) if patch_first else None
    merged = dit.run(patched_model(dit, depth=depth), inputs)
    model = in_order(patch_first, dit.build(), cache, depth=depth)
    with block_calls(model) as made:
        assert_rounding(in_context(dit, model, inputs), merged)
    with block_calls(model) as skipped:
        # The same input again: what was kept is what would have been computed.
        assert_rounding(in_context(dit, model, inputs), merged)
    assert len(tokens_seen(model, skipped)) <= 1 < len(tokens_seen(model, made))
    tomesd.remove_patch(model)
    model._reset_stateful_cache()
    assert_rounding(in_context(dit, model, inputs), dit.run(dit.build(), inputs))


def test_the_end_of_an_image_is_told_through_the_wrapper_of_a_compiled_model() -> None:
    """A cache begins anew, as without the patch."""
    inputs = FLUX.inputs()
    outputs = []
    for merges in (False, True):
        model = FLUX.build()
        model.enable_cache(FirstBlockCacheConfig(threshold=1e9))
        compiled = torch.compile(model, backend="eager")
        if merges:
            tomesd.apply_patch(compiled, 0.0, schedule=[0.0])

        def run(level: float, model: Any = model) -> Tensor:
            return in_context(FLUX, model, at_noise(FLUX, inputs, level))

        _, in_one_image = run(0.9), run(0.5)
        compiled._reset_stateful_cache()
        outputs.append(run(0.5))
        assert not torch.equal(in_one_image, outputs[-1])
    assert torch.equal(*outputs)


# ... and those of attention


def taylor(model: Any) -> None:
    model.enable_cache(
        TaylorSeerCacheConfig(
            cache_interval=3,
            disable_cache_before_step=1,
            taylor_factors_dtype=torch.float32,
        )
    )


def broadcast(model: Any) -> None:
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(0, 1000),
        current_timestep_callback=lambda: 500,
    )
    model.enable_cache(config)


@ORDER
@pytest.mark.parametrize(
    ("dit", "cache"),
    [(FLUX, taylor), (QWEN, taylor), (WAN, broadcast), (FLUX, broadcast)],
    ids=["flux-taylor", "qwen-taylor", "wan-broadcast", "flux-broadcast"],
)
def test_caches_of_attention_keep_their_tokens(
    dit: Dit, cache: Callable[[Any], None], patch_first: bool
) -> None:
    """What attention gave for some merged tokens is not for those of another step: this says so,
    and merges nothing."""
    steps = [dit.inputs(seed=k) for k in range(4)]
    twin = dit.build()
    cache(twin)
    expected = [in_context(dit, twin, step) for step in steps]
    model = in_order(patch_first, dit.build(), cache)
    with pytest.warns(tomesd.MergeWarning, match="cache keeps what attention gave") as warned:
        outputs = [in_context(dit, model, step) for step in steps]
    assert len(warned) == 1
    for output, one in zip(outputs, expected, strict=True):
        assert torch.equal(output, one)
    model.disable_cache()
    assert torch.equal(dit.run(model, steps[0]), dit.run(patched_model(dit), steps[0]))


def test_attention_that_gives_all_tokens_back_can_be_cached() -> None:
    """With target="attn", what a cache keeps is for all tokens."""
    steps = [WAN.inputs(seed=k) for k in range(4)]
    for patch_first in (True, False):
        model = in_order(patch_first, WAN.build(), broadcast, target="attn")
        outputs = [in_context(WAN, model, step) for step in steps]
        plain = patched_model(WAN, target="attn")
        assert torch.equal(outputs[0], WAN.run(plain, steps[0]))
        assert_differs(outputs[1], WAN.run(plain, steps[1]))
        assert outputs[1].isfinite().all()


# Copies and files


def by_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@SOME
@pytest.mark.parametrize("copied", [by_pickle, by_torch, copy.deepcopy])
def test_saved_whole(dit: Dit, copied: Callable[[Any], Any]) -> None:
    model, inputs = dit.build(), dit.inputs()
    plain, clean = dit.run(model, inputs), module_state(model)
    tomesd.apply_patch(model, 0.5, **ALWAYS)
    merged = dit.run(model, inputs)
    twin = copied(model)
    assert torch.equal(dit.run(twin, inputs), merged)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(dit.run(twin, inputs), merged)
    tomesd.remove_patch(twin)
    assert torch.equal(dit.run(twin, inputs), plain)
    assert module_state(twin) == clean


@pytest.mark.parametrize("dit", [FLUX, WAN], ids=lambda dit: dit.name)
def test_pretrained_files_know_nothing_of_the_patch(dit: Dit, tmp_path: Path) -> None:
    clean, model = dit.build(), patched_model(dit)
    clean.save_pretrained(tmp_path / "clean")
    model.save_pretrained(tmp_path / "patched")
    files = {p.name: p.read_bytes() for p in (tmp_path / "clean").iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "patched").iterdir()} == files
    loaded = type(clean).from_pretrained(tmp_path / "patched")
    assert module_state(loaded) == module_state(clean)


# Several calls


@SOME
def test_sizes_in_turn(dit: Dit) -> None:
    model = patched_model(dit)
    for size in ((12, 8), (8, 16), (16, 8), (12, 8)):
        inputs = dit.inputs(size=size)
        assert torch.equal(dit.run(model, inputs), dit.run(patched_model(dit), inputs))


@SOME
def test_threads_share_a_model(dit: Dit) -> None:
    torch.set_num_threads(1)  # as in the threads; `make test` has one core for each process
    model = patched_model(dit, share="steps")
    jobs = [dit.inputs(size=(12, 8 + 4 * k), seed=k) for k in range(3)]
    expected = [dit.run(patched_model(dit, share="steps"), job) for job in jobs]
    together = threading.Barrier(len(jobs))
    wrong: list[tuple[int, float]] = []

    def work(k: int) -> None:
        torch.set_num_threads(1)  # bits may depend on how many cores share an operation
        together.wait()
        for _ in range(4):
            output = dit.run(model, jobs[k])
            # Sums on busy cores may differ in the last bit; a mix-up is thousands of times that.
            off = float((output - expected[k]).abs().max() / expected[k].std())
            if not off < 1e-5:
                wrong.append((k, off))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_exception_inside_the_model_leaves_it_usable() -> None:
    """In the middle of a run of blocks, when tokens are merged."""
    model, inputs = patched_model(FLUX), FLUX.inputs()
    merged = FLUX.run(model, inputs)

    class StopHere(Exception):
        pass

    def fail(*_: Any) -> None:
        raise StopHere

    handle = model.single_transformer_blocks[1].register_forward_hook(fail)
    with pytest.raises(StopHere):
        FLUX.run(model, FLUX.inputs(size=(8, 16)))
    handle.remove()
    assert torch.equal(FLUX.run(model, inputs), merged)


def test_a_block_on_its_own_says_what_is_wrong() -> None:
    model = patched_model(SD3)
    with block_calls(model) as calls:
        SD3.run(model, SD3.inputs())
    with pytest.raises(RuntimeError, match="outside its model's forward"):
        model.transformer_blocks[1](**calls[1][1])


def test_the_patch_before_comes_back() -> None:
    model, inputs = patched_model(FLUX, depth=(0.5, 1.0)), FLUX.inputs()
    merged = FLUX.run(model, inputs)
    with tomesd.patched(model, 0.25, **ALWAYS):
        assert_differs(FLUX.run(model, inputs), merged)
    assert torch.equal(FLUX.run(model, inputs), merged)


@pytest.mark.parametrize("name", ["flux", "chroma", "hunyuan_video", "ltx", "wan"])
def test_merged_tokens_are_gone_when_their_run_is_over(name: str) -> None:
    """The blocks after a run take no more memory than in the model without a patch."""
    dit = SUPPORTED[name]
    model, inputs = dit.build(), dit.inputs(batch=1)
    last = getattr(model, block_lists(model)[-1])[-1]
    kept: list[int] = []

    def note(*_: Any) -> None:
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter)]
        floating = [one for one in tensors if one.is_floating_point()]
        kept.append(sum({s.data_ptr(): s.nbytes() for s in map(storage, floating)}.values()))

    storage = Tensor.untyped_storage
    last.register_forward_pre_hook(note)
    with torch.no_grad():
        model(**inputs)
        tomesd.apply_patch(model, 0.5, **ALWAYS)
        model(**inputs)
    assert kept[1] <= kept[0]
