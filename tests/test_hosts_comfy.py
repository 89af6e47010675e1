"""ComfyUI's diffusion transformers: what merges in them, against merging done by hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo_comfy
import zoo_ldm
from torch import Tensor, nn
from zoo_comfy import COMFY_DITS, TEXT, ComfyDit, alone

import tomesd
from tomesd.api import prepare
from tomesd.hosts import find_models
from tomesd.hosts.table_comfy import COMFY_TRANSFORMERS

# The models are far too small to gain anything, and their times are those of late steps.
ALWAYS: dict[str, Any] = {"when": "always", "end": 1.0}
WHOLE_CELLS = {**ALWAYS, "ratio": 0.75, "selector": "grid", "use_rand": False}
GRIDS = {"flux_kontext": [(1, 6, 4), (1, 2, 4)], "wan": [(3, 6, 4)], "wan_vace": [(3, 6, 4)]}


@pytest.fixture(params=COMFY_DITS)
def dit(request: pytest.FixtureRequest) -> ComfyDit:
    return COMFY_DITS[request.param]


def grids(dit: ComfyDit) -> list[tuple[int, int, int]]:
    name = next(name for name, other in COMFY_DITS.items() if other is dit)
    return GRIDS.get(name, [(1, 6, 4)])


def assert_rounding(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() < 5e-5 * expected.std()


def assert_differs(actual: Tensor, other: Tensor) -> None:
    assert actual.isfinite().all() and (actual - other).std() > 0.01 * other.std()


def classes(model: nn.Module) -> list[tuple[type, list[str]]]:
    return [(type(module), list(module.__dict__)) for module in model.modules()]


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
def test_merges_and_is_put_back(dit: ComfyDit) -> None:
    model = dit.build()
    inputs, before = dit.inputs(model), classes(model)
    plain = dit.run(model, inputs)
    merged = dit.run(tomesd.apply_patch(model, 0.5, **ALWAYS), inputs)
    assert_differs(merged, plain)
    assert torch.equal(dit.run(model, inputs), merged)
    assert torch.equal(dit.run(tomesd.apply_patch(model, 0.0, **ALWAYS), inputs), plain)
    tomesd.remove_patch(tomesd.apply_patch(model, 0.5, **ALWAYS))
    assert classes(model) == before
    assert torch.equal(dit.run(model, inputs), plain)


def by_hand(dit: ComfyDit, model: nn.Module, block: nn.Module, path: str) -> Callable[..., Any]:
    """The forward of a block on one token for each 2x2 cell of the image."""
    forward, names = block.forward, zoo_comfy.block_parameters(block)
    name, place, joint = dit.blocks[path]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        x = given[name].clone()
        before = x.shape[1] - sum(t * h * w for t, h, w in grids(dit)) if joint else 0
        if getattr(model, "pad_tokens_multiple", None):
            before = 32  # the text is padded too
        cells = [torch.tensor([token]) for token in range(before)]
        first = before
        for frames, h, w in grids(dit):
            tokens = first + torch.arange(frames * h * w).view(frames, h // 2, 2, w // 2, 2)
            cells += tokens.transpose(2, 3).flatten(3).flatten(0, 2).unbind()
            first += frames * h * w
        cells += [torch.tensor([token]) for token in range(first, x.shape[1])]
        merged = torch.stack([x[:, cell].mean(1) for cell in cells], dim=1)
        given |= {name: merged.clone()}
        if dit.rope is not None:
            rope, axis, with_text = dit.rope
            rows = torch.stack([cell[0] for cell in cells])
            if with_text and not joint:
                rows = torch.cat([torch.arange(TEXT), TEXT + rows])
            given |= {rope: given[rope].index_select(axis, rows)}
        ordered = [given.pop(name) for name in ("context", "x")] if dit.rope is None else []
        output = forward(*ordered, **given)
        gained = (output if place is None else output[place]) - merged
        for number, cell in enumerate(cells):
            x[:, cell] += gained[:, number : number + 1]
        return x if place is None else (*output[:place], x, *output[place + 1 :])

    return run


@contextmanager
def merged_by_hand(dit: ComfyDit, model: nn.Module) -> Iterator[None]:
    blocks = [(path, block) for path in dit.blocks for block in getattr(model, path)]
    inner = blocks[1:-1]
    for path, block in inner:
        block.forward = by_hand(dit, model, block, path)
    try:
        yield
    finally:
        for _, block in inner:
            del block.forward


@pytest.mark.parametrize("target", ["stack", "block"])
def test_equals_merging_by_hand(dit: ComfyDit, target: str) -> None:
    model = dit.build()
    inputs = dit.inputs(model)
    with merged_by_hand(dit, model):
        expected = dit.run(model, inputs)
    assert_differs(expected, dit.run(model, inputs))
    tomesd.apply_patch(model, **WHOLE_CELLS, target=target)
    assert_rounding(dit.run(model, inputs), expected)


def test_each_item_of_a_batch_merges_by_itself(dit: ComfyDit) -> None:
    model = dit.build()
    inputs = dit.inputs(model, batch=3)
    tomesd.apply_patch(model, 0.5, **ALWAYS)
    output = dit.run(model, inputs)
    for k in (0, 2):
        assert_rounding(dit.run(model, alone(inputs, k))[0], output[k])


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
def test_sizes_that_are_padded(dit: ComfyDit) -> None:
    """A latent of odd sides is padded to whole patches."""
    model = dit.build()
    inputs = dit.inputs(model, size=(11, 7))
    plain = dit.run(model, inputs)
    assert_differs(dit.run(tomesd.apply_patch(model, 0.5, **ALWAYS), inputs), plain)


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
def test_describes_it(dit: ComfyDit) -> None:
    model = tomesd.apply_patch(dit.build(), 0.5, **ALWAYS)
    (part,) = tomesd.describe(model, 96, 64, num_frames=9).parts
    (level,) = part.levels
    assert level.tokens - level.merged_tokens == 12 * (3 if dit.kind.endswith("WanModel") else 1)
    assert 0 < part.merged_flops < part.flops


def test_what_other_nodes_put_between_blocks_sees_every_token() -> None:
    """ComfyUI's own extension points: residuals of a ControlNet, and blocks that are replaced."""
    dit = COMFY_DITS["flux"]
    model = dit.build()
    inputs = dit.inputs(model)
    seen: list[int] = []

    def half(args: Any, extra: Any) -> Any:
        seen.append(args["img"].shape[1])
        return {name: 0.5 * value for name, value in extra["original_block"](args).items()}

    def skipped(args: Any, extra: Any) -> Any:
        seen.append(args["img"].shape[1])
        return args

    replaced = {("double_block", 1): half, ("single_block", 1): skipped}
    options = {"patches_replace": {"dit": replaced}}
    residual = zoo_ldm.noise("residual", 0, 2, 24, 32)
    residuals = {"input": [residual] * 2, "output": [residual] * 3}
    tomesd.apply_patch(model, 0.5, **ALWAYS)
    merged = dit.run(model, inputs)
    assert_differs(dit.run(model, inputs | {"control": residuals}), merged)
    assert_differs(dit.run(model, inputs | {"transformer_options": options}), merged)
    assert seen == [24, TEXT + 24]


def test_reuses_what_blocks_gave(dit: ComfyDit) -> None:
    """Nearly the same call again gets what the blocks added at the first, whatever they write
    into."""
    model = dit.build()
    inputs = dit.inputs(model)
    time = "timestep" if "timestep" in inputs else "timesteps"
    later = inputs | {time: inputs[time] * 0.9999}
    expected = dit.run(model, later)
    tomesd.apply_patch(model, ratio=0, reuse=2, reuse_start=0.0)
    dit.run(model, inputs)
    output = dit.run(model, later)
    assert not torch.equal(output, expected)
    assert (output - expected).std() < 0.05 * expected.std()


def test_frames_with_times_of_their_own_are_left_alone() -> None:
    dit = COMFY_DITS["wan"]
    model = dit.build()
    inputs = dit.inputs(model) | {"timestep": torch.tensor([[0.0, 200.0, 200.0]] * 2)}
    plain = dit.run(model, inputs)
    tomesd.apply_patch(model, 0.5, **ALWAYS)
    with pytest.warns(tomesd.MergeWarning, match="merged nothing"):
        assert torch.equal(dit.run(model, inputs), plain)


def test_a_prepared_patch_leaves_nothing_behind() -> None:
    dit = COMFY_DITS["flux"]
    model = dit.build()
    inputs = dit.inputs(model)
    plain, untouched = dit.run(model, inputs), classes(model)
    merged = dit.run(tomesd.apply_patch(model, 0.5, **ALWAYS), inputs)
    tomesd.remove_patch(model)
    prepared = prepare(model, {**ALWAYS, "ratio": 0.5})
    assert classes(model) == untouched
    with prepared.merging():
        assert torch.equal(dit.run(model, inputs), merged)
    assert classes(model) == untouched
    with pytest.raises(ZeroDivisionError), prepared.merging():
        _ = 1 / 0
    assert torch.equal(dit.run(model, inputs), plain) and classes(model) == untouched
    other = dit.run(tomesd.apply_patch(model, 0.25, **ALWAYS), inputs)
    with prepared.merging():
        assert torch.equal(dit.run(model, inputs), merged)
    assert torch.equal(dit.run(model, inputs), other)


def test_times_run_as_the_model_says() -> None:
    """ComfyUI's nodes may change how times run; a UNet's noise is known at each timestep."""
    sampling = zoo_ldm.comfy("model_sampling")
    model = COMFY_DITS["sd3"].build()
    for multiplier in (1000, 1.0):
        flow = type("Flow", (sampling.ModelSamplingDiscreteFlow, sampling.CONST), {})()
        flow.set_parameters(shift=3.0, multiplier=multiplier)
        owner = nn.Module()
        owner.diffusion_model, owner.model_sampling = model, flow
        ((_, patch),) = prepare(owner, {}).parts
        assert patch.timeline.noise == multiplier and patch.timeline.flow


@pytest.mark.parametrize("kind", [row.name for row in COMFY_TRANSFORMERS if row.reason])
def test_what_cannot_merge_is_refused(kind: str) -> None:
    model = type(kind, (nn.Module,), {"__module__": "comfy.ldm.wan.model"})()
    assert hasattr(zoo_ldm.comfy("ldm.wan.model"), kind)
    with pytest.raises(tomesd.UnsupportedModelError, match="audio"):
        find_models(model)


@pytest.mark.parametrize("name", ["flux", "qwen", "z_image"])
def test_references_with_a_modulation_of_their_own_are_left_alone(name: str) -> None:
    """Newer versions of ComfyUI tell each block where such tokens are, by their index."""
    dit = COMFY_DITS[name]
    model = dit.build()
    for row in (row for row in COMFY_TRANSFORMERS if row.name == type(model).__name__):
        for part in row.lists:
            tokens = part.tokens(getattr(model, part.path)[0])
            for argument in ("timestep_zero_index", "modulation_dims", "modulation_dims_img"):
                assert tokens.given_refused((), {argument: [(0, 4)]}) == argument
                assert tokens.given_refused((), {argument: None}) is None
