"""With one window and use_rand=False, the results are those of tomesd 0.1.3."""

import warnings
from itertools import combinations
from pathlib import Path

import exact_cases as exact
import pytest
import torch
from exact_cases import CASES, MATCH_CASES, Case, MatchCase
from safetensors.torch import load_file

import tomesd
from tomesd.merge import bipartite_soft_matching_random2d

FROZEN = load_file(Path(__file__).parent / "fixtures" / "original.safetensors")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}  # outputs are of order one
BASES = {case.base: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_original(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", tomesd.MergeWarning)  # every case merges what it was told
        ours = exact.sample(exact.run(case, tomesd, window=0, when="always"))
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(ours, FROZEN[case.name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", BASES.values(), ids=lambda case: case.base)
def test_unpatched_hosts_are_those_of_the_fixture(case: Case) -> None:
    """Tells a change of the host from a change of ours, should the test above fail."""
    tolerance = TOLERANCE[case.dtype]
    output = exact.sample(exact.forward(case))
    torch.testing.assert_close(output, FROZEN[case.base], rtol=tolerance, atol=tolerance)


def test_every_frozen_row_tells_settings_apart() -> None:
    """Rows differ from the unpatched output and from each other, far beyond the tolerance."""
    for base in BASES:
        rows = [base, *(case.name for case in CASES if case.base == base)]
        for one, other in combinations(rows, 2):
            difference = (FROZEN[one] - FROZEN[other]).abs().max()
            assert difference > 1e-3, f"{one} and {other} cannot be told apart"


def test_cases_cover_every_axis() -> None:
    def values(option: str, default: object = None) -> set[object]:
        return {case.settings.get(option, default) for case in CASES}

    assert {case.host for case in CASES} == set(exact.BUILDERS)
    assert values("ratio") >= {0.1, 0.25, 0.3, 0.5, 0.6, 0.75}
    assert values("max_downsample") == {1, 2, 4, 8}
    assert {(case.settings["sx"], case.settings["sy"]) for case in CASES} == {
        (2, 2),
        (2, 4),
        (4, 2),
        (4, 4),
    }
    layers = {
        (
            case.settings.get("merge_attn", True),
            case.settings.get("merge_crossattn", False),
            case.settings.get("merge_mlp", False),
        )
        for case in CASES
    }
    assert layers >= {(True, a, b) for a in (False, True) for b in (False, True)}
    assert {case.batch for case in CASES} == {1, 2, 3, 4}
    sizes = {(case.height, case.width) for case in CASES}
    assert sizes >= {(16, 16), (24, 32), (65, 77), (33, 17)}
    assert {case.dtype for case in CASES} == {torch.float64, torch.float32}
    for host in ("diffusers-sd1", "diffusers-sd2", "ldm-sd1", "ldm-sd2"):
        own = [case.settings["max_downsample"] for case in CASES if case.host == host]
        assert set(own) == {1, 2, 4, 8}, host


@pytest.mark.parametrize("case", MATCH_CASES, ids=lambda case: case.name)
def test_matching_function_equals_the_original(case: MatchCase) -> None:
    """Shapes, values, and the order in which kept src precede dst."""
    outputs = exact.match_outputs(case, bipartite_soft_matching_random2d)
    assert set(outputs) == {key for key in FROZEN if key.startswith(case.name + "/")}
    for key, ours in outputs.items():
        torch.testing.assert_close(ours, FROZEN[key], rtol=1e-12, atol=1e-12, msg=key)


def test_matching_function_takes_the_original_arguments_by_position() -> None:
    case = MATCH_CASES[0]
    metric, tokens = exact.match_inputs(case)
    merge, unmerge = bipartite_soft_matching_random2d(
        metric, case.w, case.h, case.sx, case.sy, case.r, True, None
    )
    merged = merge(tokens)
    assert torch.equal(merged, merge(tokens, mode="mean"))
    assert merged.shape == (case.batch, case.w * case.h - case.r, tokens.shape[-1])
    assert unmerge(merged).shape == tokens.shape


def destinations(
    w: int, h: int, sx: int, sy: int, generator: torch.Generator, batch: int = 2
) -> torch.Tensor:
    """[B, h, w], true where a token got a dst's row; one src per image is merged away as well."""
    metric = exact.noise("random mode", (batch, w * h, 4))
    merge, unmerge = bipartite_soft_matching_random2d(
        metric, w, h, sx, sy, 1, no_rand=False, generator=generator
    )
    merged = merge(metric)
    assert merged.shape == (batch, w * h - 1, 4)
    rows = torch.arange(w * h - 1.0).expand(batch, -1)[..., None]
    restored = unmerge(rows)
    assert restored.shape == (batch, w * h, 1)
    unmerged = w * h - (w // sx) * (h // sy) - 1
    return (restored >= unmerged).reshape(batch, h, w)


@pytest.mark.parametrize("w, h, sx, sy", [(8, 8, 2, 2), (9, 7, 2, 2), (12, 8, 4, 2)])
def test_random_mode_puts_one_dst_in_every_cell(w: int, h: int, sx: int, sy: int) -> None:
    found = destinations(w, h, sx, sy, torch.Generator().manual_seed(1))
    cells = found[:, : h // sy * sy, : w // sx * sx].unflatten(1, (-1, sy)).unflatten(3, (-1, sx))
    cells = cells.transpose(2, 3).flatten(3)
    # The original's own draw: one number per cell, counted row by row, for the whole batch.
    size = (h // sy, w // sx, 1)
    drawn = torch.randint(sx * sy, size, generator=torch.Generator().manual_seed(1))
    assert cells.gather(3, drawn.expand(len(found), *size)).all()
    # Besides the dst there is exactly one token of each image, the merged src.
    assert (found.sum(dim=(1, 2)) == (w // sx) * (h // sy) + 1).all()


def test_random_mode_draws_uniformly_from_the_generator() -> None:
    generator = torch.Generator().manual_seed(2)
    global_state = torch.get_rng_state()
    w, h, sx, sy = 16, 16, 2, 2
    draws = torch.stack([destinations(w, h, sx, sy, generator, 1)[0] for _ in range(60)])
    cells = draws.unflatten(1, (-1, sy)).unflatten(3, (-1, sx)).transpose(2, 3).flatten(3)
    single = cells[cells.sum(-1) == 1]  # leaves out the cells with the merged src
    counts = single.sum(0)
    expected = len(single) / (sx * sy)
    assert len(single) > 3500
    assert ((counts - expected).abs() < 5 * (expected * 0.75) ** 0.5).all(), counts
    assert not torch.equal(draws[0], draws[1]), "the generator must advance"
    again = destinations(w, h, sx, sy, torch.Generator().manual_seed(2), 1)[0]
    assert torch.equal(draws[0], again)
    assert torch.equal(global_state, torch.get_rng_state())
