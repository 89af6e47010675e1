"""What whole blocks on merged tokens, keys alone and proportional attention go together with."""

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import zoo_ldm
from torch._dynamo.testing import CompileCounterWithBackend
from zoo_diffusers import HOSTS, call

import tomesd
from tomesd.patch import patch_of

SD1, SDXL, SVD, PIXART = (HOSTS[name] for name in ("sd1", "sdxl", "svd", "pixart"))
METHODS: list[dict[str, Any]] = [
    {"target": "kv", "proportional": True},
    {"target": "attn", "proportional": True, "merge_mlp": True},
    {"target": "block"},
    {"target": "stack"},
    {"target": "stack", "selector": "kmeans", "metric": "keys"},
]


def words(options: dict[str, Any]) -> str:
    return " ".join(map(str, options.values()))


def run(host: Any, model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return host.run(model, **options)


def gradients(model: Any, output: torch.Tensor) -> torch.Tensor:
    loss = output.square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None])


@pytest.mark.parametrize("options", METHODS, ids=words)
@pytest.mark.parametrize("host", [SDXL, PIXART], ids=lambda host: host.name)
def test_compiled_models_do_the_same(host: Any, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = tomesd.apply_patch(host.build(), 0.5, **options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for time in (700, 300):
        want = run(host, model, timestep=time)
        torch.testing.assert_close(run(host, compiled, timestep=time), want, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*autocast.*deprecated")
@pytest.mark.parametrize("options", METHODS, ids=words)
@pytest.mark.parametrize("library", ["diffusers", "ldm"])
def test_checkpointing_gives_the_same_gradients(library: str, options: dict[str, Any]) -> None:
    found = []
    for checkpoint in (False, True):
        if library == "diffusers":
            model = SDXL.build().train().requires_grad_()
            if checkpoint:
                model.enable_gradient_checkpointing()
            tomesd.apply_patch(model, 0.5, **options)
            output = call(model, SDXL.inputs(16, 16, 2, 0, 500))
        else:
            host = zoo_ldm.HOSTS["ldm-sd1"]
            model = tomesd.apply_patch(host.build(checkpoint=checkpoint).train(), 0.5, **options)
            output = host.run(model)
        found.append(gradients(model, output))
    plain, checkpointed = found
    assert (plain - checkpointed).norm() < 1e-4 * plain.norm()


def test_frames_of_a_video_are_merged_between_temporal_blocks() -> None:
    """Temporal blocks lie between the others: they must get all tokens of every frame."""
    model = tomesd.apply_patch(SVD.build(), 0.5, target="stack")
    tokens: dict[str, set[int]] = {"spatial": set(), "temporal": set()}
    for name, module in model.named_modules():
        kind = "temporal" if "temporal_transformer_blocks" in name else "spatial"
        if name.endswith("attn1"):
            module.register_forward_pre_hook(
                lambda _, args, kwargs, kind=kind: tokens[kind].add(
                    (args[0] if args else kwargs["hidden_states"]).shape[1]
                ),
                with_kwargs=True,
            )
    merged = run(SVD, model)
    plain = SVD.build()
    unmerged = run(SVD, plain)
    assert merged.shape == unmerged.shape and not torch.equal(merged, unmerged)
    assert 128 in tokens["spatial"] and 256 not in tokens["spatial"]
    tomesd.apply_patch(model, 0.5, target="block")
    assert torch.equal(run(SVD, model), merged)  # every run is one block long


@pytest.mark.parametrize("options", METHODS, ids=words)
def test_copies_pickles_and_threads(options: dict[str, Any]) -> None:
    model = tomesd.apply_patch(SDXL.build(), 0.5, **options)
    want = run(SDXL, model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(SDXL, other), want)
        assert patch_of(other) is not patch_of(model)
    sizes = ((16, 16), (24, 16))
    alone = [run(SDXL, model, height=h, width=w) for h, w in sizes]
    found: list[Any] = [None, None]

    def work(place: int) -> None:
        h, w = sizes[place]
        found[place] = [run(SDXL, model, height=h, width=w) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outputs, expected in zip(found, alone, strict=True):
        assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.parametrize("options", METHODS[:4], ids=words)
def test_described_operations_fall(options: dict[str, Any]) -> None:
    model = tomesd.apply_patch(SDXL.build(), 0.5, **options)
    (part,) = tomesd.describe(model, 256, 256).parts
    assert 0 < part.saved < 1
    assert options["target"] in str(part)


def test_stacks_save_more_than_blocks_and_blocks_more_than_attention() -> None:
    saved = {}
    for target in ("kv", "attn", "block", "stack"):
        model = tomesd.apply_patch(SDXL.build(), 0.5, target=target)
        saved[target] = tomesd.describe(model, 256, 256).parts[0].saved
    assert saved["kv"] < saved["attn"] < saved["block"] < saved["stack"]


def test_fused_projections_keep_their_keys_and_say_so() -> None:
    model = SD1.build()
    model.fuse_qkv_projections()
    plain = run(SD1, model)
    tomesd.apply_patch(model, 0.5, target="kv")
    with pytest.warns(tomesd.MergeWarning, match="projections are fused"):
        assert torch.equal(run(SD1, model), plain)


def test_masks_for_tokens_leave_whole_blocks_alone() -> None:
    model = tomesd.apply_patch(PIXART.build(), 0.5, target="block")
    block = model.transformer_blocks[0]
    mask = torch.zeros(2, 1, 256)
    block.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
    )
    with pytest.warns(tomesd.MergeWarning, match="attention_mask is given"):
        run(PIXART, model, height=32, width=32)


@pytest.mark.parametrize("target", ["kv", "attn"])
def test_additional_tokens_are_attended_to(target: str) -> None:
    """They are keys as well: with kv there is no place for them, and no size for proportion."""
    host = zoo_ldm.HOSTS["sgm"]

    def with_more(model: Any) -> torch.Tensor:
        more = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1))
        for module in model.modules():
            if type(module).__name__ == "CrossAttention" and module.to_k.in_features == 32:
                module.register_forward_pre_hook(
                    lambda _, args, kwargs: (args, {**kwargs, "additional_tokens": more}),
                    with_kwargs=True,
                )
        return run(host, model)

    plain = with_more(host.build())
    proportional = tomesd.apply_patch(host.build(), 0.5, target=target, proportional=True)
    if target == "kv":
        with pytest.warns(tomesd.MergeWarning, match="attend to additional tokens"):
            assert torch.equal(with_more(proportional), plain)
    else:
        merged = with_more(tomesd.apply_patch(host.build(), 0.5))
        assert not torch.equal(merged, plain)
        assert torch.equal(with_more(proportional), merged)
