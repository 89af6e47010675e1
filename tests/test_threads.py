"""Threads that share a patched model, or run differently patched ones, do not see each other."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from zoo_diffusers import HOSTS

import tomesd

SD1 = HOSTS["sd1"]
REPEATS = 12
SIZES = ((16, 16), (8, 12), (12, 8), (9, 7))


@pytest.fixture(autouse=True)
def one_core_each() -> Iterator[None]:
    """Bits may depend on how many cores share an operation: one, here and in the threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def at_once(jobs: list[Callable[[], torch.Tensor]], repeats: int) -> list[list[torch.Tensor]]:
    """Runs each job `repeats` times on a thread of its own, all starting together."""
    start = threading.Barrier(len(jobs))

    def work(job: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        torch.set_num_threads(1)
        start.wait(timeout=60)
        return [job() for _ in range(repeats)]

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(work, jobs))


def check(jobs: list[Callable[[], torch.Tensor]], repeats: int = REPEATS) -> None:
    expected = [job() for job in jobs]
    for k, output in enumerate(expected):  # else a mix-up could pass unseen
        for other in expected[:k]:
            assert output.shape != other.shape or not torch.equal(output, other)
    for alone, outputs in zip(expected, at_once(jobs, repeats), strict=True):
        for output in outputs:
            assert torch.equal(output, alone)


def job(model: Any, **arguments: Any) -> Callable[[], torch.Tensor]:
    return lambda: SD1.run(model, **arguments)


@pytest.mark.parametrize("use_rand", [True, False])
def test_one_model_at_several_sizes(use_rand: bool) -> None:
    unet = tomesd.apply_patch(SD1.build(), 0.5, use_rand=use_rand, merge_mlp=True)
    check([job(unet, height=h, width=w) for h, w in SIZES])


def test_one_model_at_several_timesteps_and_batch_sizes() -> None:
    """Same shapes inside: only the draws differ."""
    unet = tomesd.apply_patch(SD1.build(), 0.5)
    jobs = [job(unet, timestep=t, batch=b) for t, b in ((900, 2), (500, 2), (100, 2), (500, 1))]
    check(jobs)


def test_differently_patched_models() -> None:
    models = [
        SD1.build(),
        tomesd.apply_patch(SD1.build(), 0.25),
        tomesd.apply_patch(SD1.build(), 0.5, merge_mlp=True),
        tomesd.apply_patch(SD1.build(), 0.75, max_downsample=2, seed=3),
    ]
    check([job(model) for model in models])


def test_patching_and_removing_beside_a_running_model() -> None:
    steady, other = tomesd.apply_patch(SD1.build(), 0.5), SD1.build()
    expected, plain = SD1.run(steady), SD1.run(other)

    def patch_run_remove() -> torch.Tensor:
        with tomesd.patched(other, 0.75):
            SD1.run(other, height=8, width=8)
        return SD1.run(other)

    outputs, unpatched = at_once([job(steady), patch_run_remove], REPEATS)
    assert all(torch.equal(output, expected) for output in outputs)
    assert all(torch.equal(output, plain) for output in unpatched)


def test_gradients_with_checkpointing_in_two_threads() -> None:
    """The backward pass runs blocks again, on autograd's own terms, while others run theirs."""
    unet = tomesd.apply_patch(SD1.build().requires_grad_(True).train(), 0.5)
    unet.enable_gradient_checkpointing()

    def gradient(height: int, width: int, timestep: int) -> torch.Tensor:
        inputs = SD1.inputs(height, width, 2, 0, timestep)
        sample = inputs.pop("sample").requires_grad_(True)
        loss = unet(sample, **inputs).sample.square().sum()
        return torch.autograd.grad(loss, sample)[0]

    check([lambda: gradient(16, 16, 500), lambda: gradient(8, 12, 100)], repeats=4)
