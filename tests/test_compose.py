"""A patched model keeps working with what else is done to models."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import nn
from zoo_diffusers import HOSTS, call, module_state

import tomesd

SD1, SDXL, PIXART = HOSTS["sd1"], HOSTS["sdxl"], HOSTS["pixart"]
ALL: dict[str, Any] = {"ratio": 0.5, "merge_crossattn": True, "merge_mlp": True}


def assert_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def assert_differs(actual: torch.Tensor, other: torch.Tensor) -> None:
    assert (actual - other).std() > 1e-3 * other.std()


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return SD1.run(SD1.build())


@pytest.fixture(scope="module")
def merged() -> torch.Tensor:
    return SD1.run(tomesd.apply_patch(SD1.build(), **ALL))


def patched_unet() -> Any:
    return tomesd.apply_patch(SD1.build(), **ALL)


# Gradients


def gradients(
    model: nn.Module, calls: list[tuple[Any, tuple[int, int, int]]]
) -> list[torch.Tensor]:
    """Gradients of every parameter after all forward passes and one backward pass."""
    model.requires_grad_(True).train()
    loss = torch.zeros(())
    for host, (height, width, timestep) in calls:
        loss = loss + call(model, host.inputs(height, width, 2, 0, timestep)).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("host", [SD1, SDXL, PIXART, HOSTS["svd"]], ids=lambda h: h.name)
@pytest.mark.parametrize(
    "calls",
    [[(16, 16, 500)], [(16, 16, 500), (8, 12, 500), (16, 16, 100)]],
    ids=["one call", "three calls"],
)
def test_gradient_checkpointing(host: Any, calls: list[tuple[int, int, int]]) -> None:
    """Checkpointing runs blocks again in the backward pass, when later calls have come between."""
    jobs = [(host, shape) for shape in calls]
    expected = gradients(tomesd.apply_patch(host.build(), **ALL), jobs)
    unmerged = gradients(host.build(), jobs)
    model = tomesd.apply_patch(host.build(), **ALL)
    model.enable_gradient_checkpointing()
    actual = gradients(model, jobs)
    assert_differs(flat(expected), flat(unmerged))
    assert_rounding(flat(actual), flat(expected))


def flat(tensors: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors if t is not None])


def test_checkpointing_switched_on_before_the_patch_and_off_after() -> None:
    jobs = [(SD1, (16, 16, 500))]
    expected = gradients(patched_unet(), jobs)
    unet = SD1.build()
    unet.enable_gradient_checkpointing()
    tomesd.apply_patch(unet, **ALL)
    assert_rounding(flat(gradients(unet, jobs)), flat(expected))
    unet.disable_gradient_checkpointing()
    assert_rounding(flat(gradients(unet, jobs)), flat(expected))
    tomesd.remove_patch(unet)
    unet.enable_gradient_checkpointing()
    assert_rounding(flat(gradients(unet, jobs)), flat(gradients(SD1.build(), jobs)))


def test_gradient_is_the_derivative() -> None:
    """Merged layers are differentiable: a small step changes the loss as the gradient says."""
    unet = patched_unet().double()
    inputs = {
        name: value.double() if value.is_floating_point() else value
        for name, value in SD1.inputs(8, 8, 1, 0, 500).items()
    }
    sample = inputs.pop("sample").requires_grad_(True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return call(unet, {"sample": x, **inputs}).square().sum()

    gradient = torch.autograd.grad(loss(sample), sample)[0]
    direction = torch.randn(sample.shape, generator=torch.Generator().manual_seed(0)).double()
    step = 1e-6  # too small to change who merges with whom
    with torch.no_grad():
        change = (loss(sample + step * direction) - loss(sample - step * direction)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), change, rtol=1e-4, atol=1e-6)


# Precision


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_modes(mode: Callable[[], Any], merged: torch.Tensor) -> None:
    unet, inputs = patched_unet(), SD1.inputs(16, 16, 2, 0, 500)
    with mode():
        assert torch.equal(call(unet, inputs), merged)
    assert torch.equal(call(unet, inputs).detach(), merged)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_low_precision(dtype: torch.dtype, autocast: bool, plain: torch.Tensor) -> None:
    """Runs in that precision, really merges, and nearly the same tokens as in float32."""

    def run(unet: Any, low: bool) -> torch.Tensor:
        inputs = SD1.inputs(16, 16, 2, 0, 500)
        kind = dtype if low and not autocast else torch.float32
        inputs = {k: v.to(kind) if v.is_floating_point() else v for k, v in inputs.items()}
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=low and autocast):
            output = call(unet.to(kind), inputs)
        assert output.dtype == (dtype if low else torch.float32)
        return output.float()

    unmerged_error = (run(SD1.build(), low=True) - run(SD1.build(), low=False)).std()
    merged, exact = run(patched_unet(), low=True), run(patched_unet(), low=False)
    assert merged.isfinite().all()
    change = (exact - plain).std()
    assert unmerged_error < 0.2 * change  # else the next lines would say nothing
    assert (merged - plain).std() > 0.7 * change
    assert (merged - exact).std() < 0.7 * change


def test_float64_keeps_its_precision() -> None:
    unet = patched_unet().double()
    inputs = SD1.inputs(16, 16, 2, 0, 500)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        output = call(unet, wide)
    assert output.dtype == torch.float64
    assert_rounding(output.float(), SD1.run(patched_unet()))


# Attention processors and layouts


def test_attention_processors(plain: torch.Tensor, merged: torch.Tensor) -> None:
    unet = patched_unet()
    for processor in (AttnProcessor(), AttnProcessor2_0()):
        unet.set_attn_processor(processor)
        assert_rounding(SD1.run(unet), merged)
        assert {type(p) for p in unet.attn_processors.values()} == {type(processor)}
    tomesd.remove_patch(unet)
    assert_rounding(SD1.run(unet), plain)


def test_an_own_processor_gets_the_merged_tokens() -> None:
    seen = []

    class Counting(AttnProcessor2_0):
        def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kw: Any) -> Any:
            seen.append(hidden_states.shape[1])
            return super().__call__(attn, hidden_states, *args, **kw)

    unet = SD1.build()
    unet.set_attn_processor(Counting())
    tomesd.apply_patch(unet, 0.5)
    SD1.run(unet)
    # Self-attention at the top level on half of the 256 tokens; everything else on all of its own.
    assert set(seen) == {128, 256, 64, 16}


@pytest.mark.parametrize("order", ["before", "after"])
def test_fused_projections(order: str, plain: torch.Tensor, merged: torch.Tensor) -> None:
    unet = SD1.build()
    if order == "before":
        unet.fuse_qkv_projections()
    tomesd.apply_patch(unet, **ALL)
    if order == "after":
        unet.fuse_qkv_projections()
    assert_rounding(SD1.run(unet), merged)
    unet.unfuse_qkv_projections()
    assert_rounding(SD1.run(unet), merged)
    tomesd.remove_patch(unet)
    assert_rounding(SD1.run(unet), plain)


@pytest.mark.parametrize("size", ["auto", "max", 1])
def test_attention_slicing(size: str | int, plain: torch.Tensor, merged: torch.Tensor) -> None:
    unet = patched_unet()
    unet.set_attention_slice(size)
    assert_rounding(SD1.run(unet), merged)
    tomesd.remove_patch(unet)
    assert_rounding(SD1.run(unet), plain)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("order", ["before", "after"])
def test_chunked_feed_forward(order: str, dim: int) -> None:
    """A chunk cannot be merged on its own: the layer is left alone, which is said once."""

    def chunk(unet: nn.Module) -> None:
        for module in unet.modules():
            if hasattr(module, "set_chunk_feed_forward"):
                module.set_chunk_feed_forward(1, dim)

    unet = SD1.build()
    attention_only = SD1.run(tomesd.apply_patch(SD1.build(), 0.5))
    if order == "before":
        chunk(unet)
    tomesd.apply_patch(unet, 0.5, merge_mlp=True)
    if order == "after":
        chunk(unet)
    with pytest.warns(tomesd.MergeWarning, match="chunk") as warned:
        outputs = [SD1.run(unet) for _ in range(2)]
    assert len(warned) == 1
    for output in outputs:
        assert_rounding(output, attention_only)


def test_channels_last(merged: torch.Tensor) -> None:
    unet = patched_unet().to(memory_format=torch.channels_last)
    inputs = SD1.inputs(16, 16, 2, 0, 500)
    inputs["sample"] = inputs["sample"].contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert_rounding(call(unet, inputs), merged)


# Copies and files


def test_deepcopy_has_weights_and_a_patch_of_its_own(
    plain: torch.Tensor, merged: torch.Tensor
) -> None:
    original = patched_unet()
    clone = copy.deepcopy(original)
    assert torch.equal(SD1.run(clone), merged)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.mul_(1.1)
    changed = SD1.run(clone)
    assert_differs(changed, merged)
    assert torch.equal(SD1.run(original), merged)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    assert torch.equal(SD1.run(clone), changed)
    tomesd.remove_patch(original)
    assert torch.equal(SD1.run(clone), changed)
    clone.load_state_dict(SD1.build().state_dict())
    assert torch.equal(SD1.run(clone), merged)
    tomesd.remove_patch(clone)
    assert torch.equal(SD1.run(clone), plain)


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def by_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("host", [SD1, PIXART], ids=lambda h: h.name)
@pytest.mark.parametrize("copied", [by_pickle, by_torch, copy.deepcopy])
def test_saved_whole(host: Any, copied: Callable[[nn.Module], nn.Module]) -> None:
    """A patched model comes back as a patched model."""
    model = host.build()
    plain, clean = host.run(model), module_state(model)
    tomesd.apply_patch(model, **ALL)
    merged = host.run(model)
    loaded = copied(model)
    assert loaded is not model
    assert torch.equal(host.run(loaded), merged)
    assert_differs(merged, plain)
    tomesd.remove_patch(loaded)
    assert torch.equal(host.run(loaded), plain)
    assert module_state(loaded) == clean
    assert torch.equal(host.run(model), merged)


def test_pretrained_files_know_nothing_of_the_patch(
    tmp_path: Path, plain: torch.Tensor, merged: torch.Tensor
) -> None:
    clean, unet = SD1.build(), patched_unet()
    clean.save_pretrained(tmp_path / "clean")
    unet.save_pretrained(tmp_path / "patched")
    files = {p.name: p.read_bytes() for p in (tmp_path / "clean").iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "patched").iterdir()} == files
    loaded = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "patched")
    assert module_state(loaded) == module_state(clean)
    assert torch.equal(SD1.run(loaded), plain)
    assert torch.equal(SD1.run(unet), merged)


def test_state_dict(merged: torch.Tensor) -> None:
    unet, clean = SD1.build(), SD1.build()
    with torch.no_grad():
        for parameter in unet.parameters():
            parameter.zero_()
    tomesd.apply_patch(unet, **ALL)
    assert list(unet.state_dict()) == list(clean.state_dict())
    assert unet.config == clean.config
    unet.load_state_dict(clean.state_dict())
    assert torch.equal(SD1.run(unet), merged)


# Patching again, and for a while


def test_patching_again_replaces() -> None:
    unet = SD1.build()
    clean, plain = module_state(unet), SD1.run(unet)
    second = SD1.run(tomesd.apply_patch(SD1.build(), 0.25, sx=4, use_rand=False))
    tomesd.apply_patch(unet, **ALL)
    tomesd.apply_patch(unet, 0.25, sx=4, use_rand=False)
    assert torch.equal(SD1.run(unet), second)
    tomesd.remove_patch(unet)
    assert torch.equal(SD1.run(unet), plain)
    assert module_state(unet) == clean
    tomesd.remove_patch(unet)  # once more does no harm
    assert module_state(unet) == clean


class StopHere(Exception):
    pass


@pytest.fixture(params=[False, True], ids=["to the end", "with an exception"])
def leave(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    def leave() -> None:
        if request.param:
            raise StopHere

    yield leave


def test_patched_for_a_while(
    leave: Callable[[], None], plain: torch.Tensor, merged: torch.Tensor
) -> None:
    unet = SD1.build()
    clean = module_state(unet)
    try:
        with tomesd.patched(unet, **ALL) as inside:
            assert inside is unet
            assert torch.equal(SD1.run(unet), merged)
            leave()
    except StopHere:
        pass
    assert torch.equal(SD1.run(unet), plain)
    assert module_state(unet) == clean


def test_the_patch_before_comes_back(leave: Callable[[], None], merged: torch.Tensor) -> None:
    unet = patched_unet()
    try:
        with tomesd.patched(unet, 0.25, seed=4):
            assert_differs(SD1.run(unet), merged)
            leave()
    except StopHere:
        pass
    assert torch.equal(SD1.run(unet), merged)


def test_an_exception_inside_the_model_leaves_it_usable(merged: torch.Tensor) -> None:
    """For example out of memory in the middle of a forward pass, then another size."""
    unet = patched_unet()

    def fail(*_: Any) -> None:
        raise StopHere

    handle = unet.down_blocks[0].attentions[0].transformer_blocks[0].ff.register_forward_hook(fail)
    with pytest.raises(StopHere):
        SD1.run(unet, height=8, width=12, timestep=7)
    handle.remove()
    assert torch.equal(SD1.run(unet), merged)


@pytest.mark.parametrize("host", [SD1, SDXL, PIXART], ids=lambda h: h.name)
def test_mixed_sizes_in_sequence(host: Any) -> None:
    model = tomesd.apply_patch(host.build(), **ALL)
    for height, width in ((16, 16), (8, 24), (24, 8), (12, 16), (16, 16)):
        fresh = host.run(tomesd.apply_patch(host.build(), **ALL), height=height, width=width)
        assert torch.equal(host.run(model, height=height, width=width), fresh)
        assert_differs(fresh, host.run(host.build(), height=height, width=width))
