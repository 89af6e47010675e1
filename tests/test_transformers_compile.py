"""torch.compile of patched diffusion transformers, in any order with the patch.

The models are cut to few blocks, and most calls are of one item: tracing more only costs time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from merging_dit import ALWAYS, SUPPORTED, assert_differs, assert_rounding, at_noise
from pipelines_dit import PIPELINES, run
from torch._dynamo.testing import CompileCounterWithBackend
from zoo_dit import Dit, alone

import tomesd


def small(name: str, **layers: int) -> Dit:
    return replace(SUPPORTED[name], config=SUPPORTED[name].config | layers)


FLUX = small("flux", num_layers=2, num_single_layers=2)
QWEN = small("qwen", num_layers=3)
SD3 = small("sd3", num_layers=3)
WAN = small("wan", num_layers=3)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def patch(model: Any, **options: Any) -> Any:
    return tomesd.apply_patch(model, 0.5, **{**ALWAYS, **options})


def one(dit: Dit) -> dict[str, Any]:
    return alone(dit.inputs(), 0)


@pytest.mark.parametrize(
    ("dit", "patch_first", "batch"),
    [(FLUX, True, 2), (SD3, False, 1), (WAN, True, 1)],
    ids=lambda value: value.name if isinstance(value, Dit) else str(value),
)
def test_in_place(dit: Dit, patch_first: bool, batch: int) -> None:
    inputs = dit.inputs(batch=batch)
    plain, merged = dit.run(dit.build(), inputs), dit.run(patch(dit.build()), inputs)
    assert_differs(merged, plain)
    model, counter = dit.build(), CompileCounterWithBackend("eager")
    if patch_first:
        patch(model).compile(fullgraph=True, backend=counter)
    else:
        model.compile(fullgraph=True, backend=counter)
        patch(model)
    assert_rounding(dit.run(model, inputs), merged)
    assert counter.frame_count == 1
    # Another step of the same size needs no other graph.
    later = at_noise(dit, inputs, 0.2)
    assert_rounding(dit.run(model, later), dit.run(patch(dit.build()), later))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "options",
    [{"reuse": 2, "reuse_start": 0.0}, {"share": "steps"}, {"metric": "previous"}],
    ids=["reuse", "share", "previous"],
)
def test_sizes_in_turn_where_tensors_are_kept(options: dict[str, Any]) -> None:
    """The compiler makes symbols of sizes that change; those of what is kept are numbers."""
    eager, model = (patch(SD3.build(), **options) for _ in range(2))
    model.compile(fullgraph=True, backend="eager")
    for size in ((12, 8), (16, 8)):
        inputs = alone(SD3.inputs(size=size), 0)
        for noise in (0.9, 0.8):
            now = at_noise(SD3, inputs, noise)
            assert_rounding(SD3.run(model, now), SD3.run(eager, now))


def test_wrapped_and_then_patched() -> None:
    """The wrapper becomes the root: it reads what no graph can read."""
    inputs = one(FLUX)
    plain, merged = FLUX.run(FLUX.build(), inputs), FLUX.run(patch(FLUX.build()), inputs)
    compiled = torch.compile(FLUX.build(), fullgraph=True, backend="eager")
    assert_rounding(FLUX.run(compiled, inputs), plain)
    assert patch(compiled) is compiled
    assert_rounding(FLUX.run(compiled, inputs), merged)
    tomesd.remove_patch(compiled)
    assert_rounding(FLUX.run(compiled, inputs), plain)


def test_patched_and_then_wrapped() -> None:
    inputs = one(SD3)
    merged = SD3.run(patch(SD3.build()), inputs)
    compiled = torch.compile(patch(SD3.build()), fullgraph=True, backend="eager")
    assert_rounding(SD3.run(compiled, inputs), merged)


def test_what_no_graph_can_read_is_said_with_what_helps() -> None:
    """Flux has the grid in a tensor."""
    compiled = torch.compile(patch(FLUX.build()), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"apply_patch after torch\.compile"):
        FLUX.run(compiled, one(FLUX))


@pytest.mark.parametrize(
    ("dit", "order", "batch"),
    [
        (FLUX, "compile, run, patch", 1),
        (FLUX, "patch, compile", 1),
        (FLUX, "patch, compile", 2),
        (QWEN, "patch, compile", 2),
    ],
    ids=lambda value: value.name if isinstance(value, Dit) else str(value),
)
def test_repeated_blocks(dit: Dit, order: str, batch: int) -> None:
    inputs = dit.inputs(batch=batch)
    plain, merged = dit.run(dit.build(), inputs), dit.run(patch(dit.build()), inputs)
    model, counter = dit.build(), CompileCounterWithBackend("eager")
    for action in order.split(", "):
        if action == "compile":
            model.compile_repeated_blocks(fullgraph=True, backend=counter)
        elif action == "patch":
            patch(model)
        else:
            assert_rounding(dit.run(model, inputs), plain)
    assert_rounding(dit.run(model, inputs), merged)
    graphs = counter.frame_count
    assert graphs > 0
    later = at_noise(dit, inputs, 0.2)
    assert_rounding(dit.run(model, later), dit.run(patch(dit.build()), later))
    assert counter.frame_count == graphs
    tomesd.remove_patch(model)
    assert_rounding(dit.run(model, inputs), plain)


def graphs_of_blocks(options: dict[str, Any], **layers: int) -> int:
    """How many graphs the blocks of a Flux need in some steps, within the compiler's own limits."""
    dit, counter = small("flux", **layers), CompileCounterWithBackend("eager")
    model = dit.build()
    if options:
        tomesd.apply_patch(model, **options)
    model.compile_repeated_blocks(fullgraph=True, backend=counter)
    for noise in (0.95, 0.9, 0.7, 0.3, 0.2, 0.1):
        dit.run(model, at_noise(dit, one(dit), noise))
    torch._dynamo.reset()
    return counter.frame_count


@pytest.mark.parametrize(
    ("options", "more"),
    [({"preset": "balanced"}, 0), ({"ratio": 0.5, **ALWAYS}, 2), ({"ratio": 0.5, "end": 0.5}, 5)],
    ids=["reused", "merged", "merged at first"],
)
def test_blocks_of_a_kind_have_their_graphs_in_common(options: dict[str, Any], more: int) -> None:
    """Of the graphs that are added, two or three are of blocks on fewer tokens. The others differ
    from those of unpatched blocks in the class, or in the strides of the text, only."""
    options = {**options, "when": "always"}
    few = {"num_layers": 4, "num_single_layers": 5}
    many = {"num_layers": 6, "num_single_layers": 8}
    graphs = graphs_of_blocks(options, **few)
    assert graphs == graphs_of_blocks(options, **many) == graphs_of_blocks({}, **few) + more


@pytest.mark.parametrize(
    ("order", "options"),
    [
        ("patch, compile", {"ratio": 0.5, "when": "always"}),
        ("compile, patch", {"preset": "fast"}),
    ],
    ids=["ratio", "fast"],
)
def test_an_image_with_repeated_blocks(order: str, options: dict[str, Any]) -> None:
    """Each kind of block may have as many graphs as PyTorch allows, not all of them together."""
    pipe, arguments = PIPELINES["flux"]()
    arguments["num_inference_steps"] = 8
    tomesd.apply_patch(pipe, **options)
    eager = run(pipe, arguments)
    tomesd.remove_patch(pipe)
    for action in order.split(", "):
        if action == "patch":
            tomesd.apply_patch(pipe, **options)
        else:
            pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
    assert_rounding(run(pipe, arguments), eager)


def test_a_graph_for_each_ratio() -> None:
    """Early steps merge and late ones do not: two graphs, however many steps."""
    counter = CompileCounterWithBackend("eager")
    model = torch.compile(SD3.build(), fullgraph=True, backend=counter)
    tomesd.apply_patch(model, 0.5, when="always")
    eager = tomesd.apply_patch(SD3.build(), 0.5, when="always")
    for noise in (0.9, 0.7, 0.3, 0.1, 0.8):
        step = at_noise(SD3, one(SD3), noise)
        assert_rounding(SD3.run(model, step), SD3.run(eager, step))
    assert counter.frame_count == 2
