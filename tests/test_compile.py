"""torch.compile and torch.export of patched models, in any order with the patch.

The hosts are cut to very few layers: what is traced around the blocks only costs time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from zoo_diffusers import HOSTS, PIXART_CONFIG, SDXL_CONFIG, Host, make_unet, seeded

import tomesd

SD1, SDXL, PIXART = HOSTS["sd1"], HOSTS["sdxl"], HOSTS["pixart"]
STEPS = (900, 700, 500, 300, 100)


def make_tiny_sd1() -> Any:
    return make_unet(
        block_out_channels=(32,),
        down_block_types=("CrossAttnDownBlock2D",),
        mid_block_type=None,
        up_block_types=("UpBlock2D",),
    )


def make_tiny_sdxl() -> Any:
    return make_unet(
        SDXL_CONFIG,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        mid_block_type=None,
        up_block_types=("UpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(2, 4),
    )


def make_tiny_pixart() -> Any:
    return seeded(diffusers.PixArtTransformer2DModel, **(PIXART_CONFIG | {"num_layers": 1}))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """What one test compiled must not count in the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def assert_differs(actual: torch.Tensor, other: torch.Tensor) -> None:
    """Merging moves the outputs of these models by some percent of their spread."""
    assert (actual - other).std() > 1e-3 * other.std()


@pytest.mark.parametrize(
    ("host", "make", "use_rand"),
    [(SD1, make_tiny_sd1, True), (SD1, make_tiny_sd1, False), (SDXL, make_tiny_sdxl, True)],
)
def test_whole_model_compiles_once_for_all_steps(
    host: Host, make: Callable[[], nn.Module], use_rand: bool
) -> None:
    unet = make()
    plain = host.run(unet, timestep=STEPS[0])
    options = {"use_rand": use_rand, "merge_crossattn": True, "merge_mlp": True}
    tomesd.apply_patch(unet, 0.5, **options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(unet, fullgraph=True, backend=counter)
    for step in STEPS:
        assert_same(host.run(compiled, timestep=step), host.run(unet, timestep=step))
    assert counter.frame_count == 1
    assert_differs(host.run(compiled, timestep=STEPS[0]), plain)


def test_steps_given_as_numbers_compile_no_more_often_than_unpatched() -> None:
    counts = []
    for ratio in (None, 0.5):
        torch._dynamo.reset()
        unet = make_tiny_sd1()
        if ratio is not None:
            tomesd.apply_patch(unet, ratio)
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(unet, fullgraph=True, backend=counter)
        inputs = SD1.inputs(16, 16, 2, 0, 500)
        with torch.no_grad():
            for step in STEPS[:4]:
                inputs["timestep"] = step
                assert_same(compiled(**inputs).sample, unet(**inputs).sample)
        counts.append(counter.frame_count)
    assert counts[1] == counts[0]


def test_inductor() -> None:
    """The default backend generates code of its own: equal to rounding."""
    model = make_tiny_pixart()
    plain = PIXART.run(model)
    tomesd.apply_patch(model, 0.5)
    compiled = torch.compile(model, fullgraph=True)
    for step in (500, 100):
        assert_same(PIXART.run(compiled, timestep=step), PIXART.run(model, timestep=step))
    assert_differs(PIXART.run(compiled), plain)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_model_also_says_that_it_merges_nothing(dynamic: bool | None) -> None:
    model = make_tiny_pixart()
    plain = PIXART.run(model)
    tomesd.apply_patch(model, 0.5, max_downsample=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=dynamic)
    with pytest.warns(tomesd.MergeWarning, match="merged nothing") as warned:
        for step in STEPS:
            PIXART.run(compiled, timestep=step)
    assert len([w for w in warned if w.category is tomesd.MergeWarning]) == 1
    assert_same(PIXART.run(compiled), plain)


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (None, 2)])
def test_several_image_sizes_through_one_compiled_model(dynamic: bool | None, graphs: int) -> None:
    """A graph for sizes in general, after one for the first size where torch begins with that."""
    unet = tomesd.apply_patch(make_tiny_sd1(), 0.5)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(unet, fullgraph=True, backend=counter, dynamic=dynamic)
    for height, width in ((16, 12), (14, 18), (20, 10), (16, 12)):
        expected = SD1.run(unet, height=height, width=width)
        assert_same(SD1.run(compiled, height=height, width=width), expected)
    assert counter.frame_count == graphs


@pytest.mark.parametrize(
    ("host", "make", "ran_before"), [(SD1, make_tiny_sd1, True), (PIXART, make_tiny_pixart, False)]
)
@pytest.mark.parametrize("way", ["wrapper", "inside wrapper", "in place"])
def test_compiled_before_the_patch(
    host: Host, make: Callable[[], Any], way: str, ran_before: bool
) -> None:
    """A model that was compiled, or has even run, unpatched must not keep its old code."""
    plain = host.run(make())
    merged = host.run(tomesd.apply_patch(make(), 0.5))
    assert_differs(merged, plain)
    model = make()
    if way == "in place":
        model.compile(fullgraph=True, backend="eager")
        compiled = model
    else:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
    if ran_before:
        assert_same(host.run(compiled), plain)
    target = model if way == "inside wrapper" else compiled
    assert tomesd.apply_patch(target, 0.5) is target
    assert_same(host.run(compiled), merged)
    tomesd.remove_patch(target)
    assert_same(host.run(compiled), plain)


def test_time_is_read_outside_the_graph_of_a_wrapper() -> None:
    """As with `pipe.unet = torch.compile(pipe.unet, fullgraph=True)`, and then the patch."""

    def run(model: Any) -> list[torch.Tensor]:
        return [SD1.run(model, timestep=time) for time in (900, 100)]

    merged = SD1.run(tomesd.apply_patch(make_tiny_sd1(), 0.5), timestep=900)
    plain = run(make_tiny_sd1())
    compiled = torch.compile(make_tiny_sd1(), fullgraph=True, backend="eager")
    tomesd.apply_patch(compiled, 0.5, end=0.5)
    early, late = run(compiled)
    assert_same(early, merged)
    assert_same(late, plain[1])
    assert_differs(early, plain[0])
    tomesd.remove_patch(compiled)
    assert_same(run(compiled)[0], plain[0])


def test_repeated_blocks_have_their_graphs_in_common() -> None:
    """As many graphs as without a patch, though each block makes a plan."""
    graphs = []
    for patched in (False, True):
        torch._dynamo.reset()
        unet, counter = make_tiny_sdxl(), CompileCounterWithBackend("eager")
        if patched:
            tomesd.apply_patch(unet, ratio=0.5, max_downsample=4, when="always")
        unet.compile_repeated_blocks(fullgraph=True, backend=counter)
        SDXL.run(unet, timestep=STEPS[0])
        graphs.append(counter.frame_count)
    assert 0 < graphs[1] == graphs[0]


@pytest.mark.parametrize("order", ["compile, patch", "compile, run, patch", "patch, compile"])
def test_repeated_blocks(order: str) -> None:
    """Regional compilation finds its blocks by class name and runs outside the root's trace."""
    options = {"ratio": 0.5, "merge_mlp": True}
    plain = SDXL.run(make_tiny_sdxl())
    eager = tomesd.apply_patch(make_tiny_sdxl(), **options)
    unet, counter = make_tiny_sdxl(), CompileCounterWithBackend("eager")
    for action in order.split(", "):
        if action == "compile":
            unet.compile_repeated_blocks(fullgraph=True, backend=counter)
        elif action == "patch":
            tomesd.apply_patch(unet, **options)
        else:
            assert_same(SDXL.run(unet), plain)
    assert_same(SDXL.run(unet, timestep=STEPS[0]), SDXL.run(eager, timestep=STEPS[0]))
    assert counter.frame_count > 0
    compiled_so_far = counter.frame_count
    for step in STEPS[1:]:
        assert_same(SDXL.run(unet, timestep=step), SDXL.run(eager, timestep=step))
    assert counter.frame_count == compiled_so_far
    assert_differs(SDXL.run(unet), plain)
    assert_same(SDXL.run(unet, height=12, width=8), SDXL.run(eager, height=12, width=8))
    tomesd.remove_patch(unet)
    assert_same(SDXL.run(unet), plain)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    """The timestep stays an input of the exported program: the draw is not frozen into it."""
    unet = make_tiny_sd1()
    plain = SD1.run(unet)
    tomesd.apply_patch(unet, 0.5)
    example = SD1.inputs(16, 16, 2, 0, 500)
    program = torch.export.export(unet, (), {**example, "return_dict": False}, strict=strict)
    exported = program.module()
    for step in (500, 100):
        inputs = SD1.inputs(16, 16, 2, 0, step)
        with torch.no_grad():
            actual = exported(**inputs, return_dict=False)[0]
        assert_same(actual, SD1.run(unet, timestep=step))
    assert_differs(SD1.run(unet), plain)
