"""The benchmark: what it measures, the rows it writes, and the tables made of them."""

import gc
import math
import re
import sys
import weakref
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from PIL import Image
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from zoo_dit import DITS

import tomesd
from tomesd import Settings
from tomesd.bench import (
    ARCHITECTURES,
    Case,
    Contender,
    Effort,
    RowFile,
    Subject,
    Subjects,
    comparisons,
    load_original,
    load_subject,
    measure_case,
    prepare,
    read_rows,
    recovered,
    run_cases,
)
from tomesd.bench import models as bench_models
from tomesd.bench.calls import Step, make_call, random_inputs
from tomesd.bench.contenders import FreePlan
from tomesd.bench.measure import Timing, take_turns, time_calls
from tomesd.bench.models import shared_copy
from tomesd.bench.tables import duration, failures, split_common
from tomesd.cli.run import parse
from tomesd.hosts import find_models
from tomesd.patch import patch_of

CPU = torch.device("cpu")
QUICK = Effort(seconds=0.0, min_repeats=2, sample_seconds=0.0)
ALWAYS = Settings(when="always")
ROOT = Path(__file__).parent.parent

TINY = {
    **ARCHITECTURES["sd15"],
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 32,
}
TINY_XL = {
    **ARCHITECTURES["sdxl"],
    "block_out_channels": (32, 64, 64),
    "layers_per_block": 1,
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": (4, 8, 8),
    "cross_attention_dim": 32,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The architectures under their names, but small."""
    monkeypatch.setitem(ARCHITECTURES, "sd15", TINY)
    monkeypatch.setitem(ARCHITECTURES, "sdxl", TINY_XL)
    monkeypatch.setitem(bench_models.VAE, "block_out_channels", (32, 32, 32, 32))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a library named tomesd that has the interface of the original."""
    folder = tmp_path_factory.mktemp("original")
    package = folder / "tomesd"
    package.mkdir()
    (package / "__init__.py").write_text("from .patch import apply_patch\n")
    (package / "patch.py").write_text(
        "def apply_patch(model, ratio=0.5, max_downsample=1, sx=2, sy=2, use_rand=True,\n"
        "                merge_attn=True, merge_crossattn=False, merge_mlp=False):\n"
        "    model.patched_by_the_original = (ratio, max_downsample, use_rand)\n"
        "    return model\n"
    )
    return str(folder)


def all_variants(original: str) -> tuple[Contender, ...]:
    return (
        Contender("unpatched"),
        Contender("tomesd", ALWAYS),
        Contender("tomesd", replace(ALWAYS, share="steps", refresh=3), "kept"),
        Contender("original", ALWAYS, folder=original),
        Contender("free", ALWAYS),
    )


def step_of(subject: Subject, variant: Contender) -> torch.Tensor:
    model = shared_copy(subject.model)
    variant.apply(model)
    with torch.no_grad():
        return make_call(subject, model, "step", (128, 128), 1, 1)()[0]


# What is measured


@pytest.mark.parametrize(("name", "parameters"), [("sd15", 860), ("sd21", 866), ("sdxl", 2567)])
def test_architectures_are_the_published_ones(name, parameters, monkeypatch) -> None:
    """By their number of parameters, in millions."""
    monkeypatch.undo()
    with torch.device("meta"):
        model = UNet2DConditionModel(**ARCHITECTURES[name])
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == parameters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_weights_are_the_same_each_time_and_leave_the_generator_alone(dtype: str) -> None:
    state = torch.get_rng_state()
    one, two = (load_subject("sd15", device="cpu", dtype=dtype) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert one.model.dtype == one.pipe.vae.dtype == getattr(torch, dtype)
    for left, right in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(left, right)
        assert left.ndim == 1 or left.any()


def test_variants_differ_where_they_should(original: str) -> None:
    subject = load_subject("sd15", device="cpu")
    base, ours, kept, _, free = (step_of(subject, v) for v in all_variants(original))
    level = step_of(subject, Contender("tomesd", replace(ALWAYS, share="level")))
    assert torch.equal(level, kept)  # at the first step, the plan is new in both
    assert not torch.allclose(base, ours)
    assert not torch.allclose(base, free)
    assert not torch.allclose(ours, free)
    assert torch.equal(base, step_of(subject, Contender("unpatched")))  # all ran on copies


def test_copies_share_the_weights_and_nothing_else() -> None:
    model = load_subject("sd15", device="cpu").model
    copy = shared_copy(model)
    for left, right in zip(model.parameters(), copy.parameters(), strict=True):
        assert left is right
    assert not {id(m) for m in model.modules()} & {id(m) for m in copy.modules()}
    tomesd.apply_patch(copy)
    assert patch_of(model) is None


def test_the_original_is_told_the_finest_level(original: str) -> None:
    for name, level in (("sd15", 1), ("sdxl", 2)):
        model = shared_copy(load_subject(name, device="cpu").model)
        Contender("original", replace(ALWAYS, use_rand=False), folder=original).apply(model)
        assert model.patched_by_the_original == (0.5, level, False)
    assert sys.modules["tomesd"] is tomesd
    assert sys.modules["tomesd_original"].__file__.startswith(original)


def test_the_original_is_loaded_once_whatever_its_folder_is_called(
    original: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(original)
    monkeypatch.chdir(folder.parent)
    assert load_original(folder.name) is load_original(folder)


def test_timesteps_fall_from_call_to_call() -> None:
    subject = load_subject("sd15", device="cpu")
    call = make_call(subject, subject.model, "step", (128, 128), 3, 1)
    seen = []
    subject.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0].shape, int(kwargs["timestep"]))),
        with_kwargs=True,
    )
    with torch.no_grad():
        for _ in range(3):
            call()
    assert [shape[0] for shape, _ in seen] == [6, 6, 6]
    assert [time for _, time in seen] == [999, 998, 997]


def test_a_plan_kept_for_three_steps_is_timed_in_threes() -> None:
    kept = replace(ALWAYS, share="steps", refresh=3)
    assert Contender("tomesd", kept).period == 3
    assert Contender("tomesd", ALWAYS).period == 1
    assert Contender("tomesd", replace(ALWAYS, reuse=3)).period == 3
    assert Contender("tomesd", replace(kept, refresh=1000)).period == 1  # for the whole image
    calls: list[int] = []

    def timer(count: int) -> float:
        calls.append(count)
        return 1.0

    timings = take_turns({"kept": timer}, QUICK, periods={"kept": 3})
    assert timings["kept"].calls == 3
    assert calls == [1, 3, 3]


def test_no_garbage_is_collected_while_the_clock_runs() -> None:
    collects: list[bool] = []
    assert time_calls(lambda: collects.append(gc.isenabled()), 3, CPU) > 0
    assert collects == [False] * 3 and gc.isenabled()

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        time_calls(fail, 1, CPU)
    assert gc.isenabled()
    gc.disable()  # who has turned it off does not find it on
    try:
        time_calls(lambda: None, 1, CPU)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_variants_take_turns() -> None:
    order: list[str] = []
    timers = {
        name: lambda count, name=name: (order.append(name), 1.0)[1] for name in ("a", "b", "c")
    }
    take_turns(timers, replace(QUICK, min_repeats=3))
    assert order == ["a", "b", "c"] * 4  # once to see how long a call takes


def test_measuring_stops_when_the_result_is_known_or_the_time_is_over() -> None:
    steady = take_turns({"a": lambda count: 1.0}, Effort(seconds=60, min_repeats=4))
    assert len(steady["a"].seconds) == 4
    noise = iter(range(1, 1000))
    noisy = take_turns({"a": lambda count: next(noise) % 7}, Effort(seconds=60, max_repeats=30))
    assert len(noisy["a"].seconds) == 30
    noisy = take_turns({"a": lambda count: next(noise) % 7}, Effort(seconds=0, min_repeats=6))
    assert len(noisy["a"].seconds) == 6


def test_progress_only_grows_and_ends_at_the_end() -> None:
    shares: list[float] = []
    noise = iter(range(1, 10**6))
    timers = {name: lambda count: next(noise) % 7 for name in ("a", "b")}
    take_turns(timers, Effort(seconds=0, min_repeats=5), on_repeat=shares.append)
    assert shares == sorted(shares)
    assert shares[0] == 0.2 and shares[-1] == 1
    seen: list[float] = []
    case = Case("sd15", 64, 64, (Contender("unpatched"), Contender("tomesd", ALWAYS)))
    calls: list[float] = []
    measure_case(
        load_subject("sd15", device="cpu"),
        case,
        QUICK,
        on_progress=lambda case, share: seen.append(share),
        on_first=lambda case, seconds: calls.append(seconds),
    )
    assert seen == sorted(seen) and seen[0] > 0 and seen[-1] <= 1
    assert len(calls) == 1 and calls[0] > 0


def test_median_and_spread() -> None:
    timing = Timing(seconds=[5.0, 1.0, 2.0, 3.0, 4.0])
    assert timing.median == 3.0
    assert timing.spread == 2.0
    assert timing.uncertainty == pytest.approx(0.93 * 2 / math.sqrt(5) / 3)


class Writes(TorchDispatchMode):
    """Counts kernels, and the numbers that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.written.append(out.numel())
        elif function not in (torch.ops.aten.slice.Tensor, torch.ops.aten.detach.default):
            raise AssertionError(f"an unexpected kernel: {function}")
        return out


def test_the_bound_moves_m_rows_in_one_kernel_each_way() -> None:
    plan = FreePlan(tokens=64, kept=16, buffers={})
    x = torch.randn(2, 64, 8)
    plan.unmerge(torch.ones(2, 16, 8))  # makes the buffer, once
    with Writes() as writes:
        y = plan.merge(x)
    assert writes.written == [2 * 16 * 8]
    assert torch.equal(y, x[:, :16])
    with Writes() as writes:
        z = plan.unmerge(y)
    assert writes.written == [2 * 16 * 8]
    assert torch.equal(z[:, :16], y)
    assert not z[:, 16:].any()
    assert plan.fits(x)
    assert not plan.fits(y)


def test_the_bound_in_a_longer_sequence() -> None:
    """Text, 8 tokens of which 2 are kept, and more text."""
    plan = FreePlan(tokens=8, kept=2, buffers={}).placed(3, 15)
    x = torch.randn(2, 15, 4)
    kept = [0, 1, 2, 3, 4, 11, 12, 13, 14]
    merged = plan.merge(x)
    assert torch.equal(merged, x[:, kept])
    assert torch.equal(plan.pick(x.mT, dim=2), x[:, kept].mT)
    restored = plan.restore(x, merged + 1, merged)
    gained = torch.zeros(15)
    gained[kept] = 1
    torch.testing.assert_close(restored - x, gained[None, :, None].expand_as(x))


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen", "zimage", "lumina2", "chroma"])
@torch.no_grad()
def test_steps_of_a_transformer_go_from_noise_to_image(name: str) -> None:
    """Merging ends half-way by default: a step at the wrong end would measure no merging."""
    model = DITS[name].build()
    tomesd.apply_patch(model, ratio=0.5, when="always")
    (found,) = find_models(model)
    step = Step(model, random_inputs(model, (24, 24), 2), steps=3, found=found)
    merged = []
    for _ in range(3):
        step()
        merged.append(any(decision.merges for decision in patch_of(model).decisions))
    assert merged[0]
    assert not merged[2]


def test_the_bound_removes_what_merging_removes() -> None:
    subject = load_subject("sd15", device="cpu")
    seen: dict[str, list[int]] = {}
    for variant in (Contender("tomesd", ALWAYS), Contender("free", ALWAYS)):
        model = shared_copy(subject.model)
        attentions = [m for n, m in model.named_modules() if n.endswith("attn1.to_q")]
        lengths = seen.setdefault(variant.kind, [])
        for attention in attentions:
            attention.register_forward_pre_hook(
                lambda module, args, lengths=lengths: lengths.append(args[0].shape[1])
            )
        variant.apply(model)
        with torch.no_grad():
            make_call(subject, model, "step", (128, 128), 1, 1)()
    assert seen["tomesd"] == seen["free"] == [128, 64, 128, 128]  # half of 256, and the middle


# Rows


ROW_KEYS = {
    *("run", "date", "section", "setting", "model", "what", "steps", "height", "width", "images"),
    *("batch", "dtype", "attention", "mode", "variant", "label", "settings", "seconds", "spread"),
    *("repeats", "calls", "host_seconds", "peak_mib", "pool_mib", "finite", "left_alone", "error"),
    *("hardware", "torch", "triton", "diffusers", "tomesd", "commit"),
}


@pytest.mark.parametrize("what", ["step", "pipeline"])
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_rows_are_complete(name: str, what: str, original: str, tmp_path: Path) -> None:
    variants = all_variants(original)
    variants = variants if what == "step" else variants[:2]
    case = Case(name, 128, 64, variants, images=2, what=what, steps=2, attention="eager")
    file = RowFile(tmp_path / "rows.jsonl", CPU)
    made = run_cases([case], file, QUICK)
    rows = read_rows(tmp_path / "rows.jsonl")
    assert rows == made
    for row, variant in zip(rows, variants, strict=True):
        assert set(row) == ROW_KEYS
        assert row["error"] is None
        assert row["finite"]
        assert row["seconds"] > 0
        assert row["repeats"] == 2
        assert row["calls"] == variant.period  # QUICK asks for one call, or what belongs together
        assert (row["width"], row["height"], row["images"], row["batch"]) == (64, 128, 2, 4)
        assert (row["dtype"], row["attention"], row["mode"]) == ("float32", "eager", "eager")
        assert (row["variant"], row["label"]) == (variant.kind, str(variant))
        assert row["settings"] == (None if variant.settings is None else asdict(variant.settings))
        assert row["torch"] == torch.__version__


def test_running_out_of_memory_is_a_row_and_the_rest_goes_on(tmp_path: Path) -> None:
    huge = Case("sd15", 2**25, 2**25, (Contender("unpatched"), Contender("tomesd", ALWAYS)))
    small = Case("sd15", 128, 128, huge.contenders)
    file = RowFile(tmp_path / "rows.jsonl", CPU)
    rows = run_cases([huge, small], file, QUICK, subjects=Subjects(keep=2))
    assert [row["error"] for row in rows] == ["OOM", "OOM", None, None]
    assert [row["seconds"] is None for row in rows] == [True, True, False, False]


def test_a_variant_that_fits_only_alone_is_measured_alone(monkeypatch) -> None:
    """Like CUDA graphs whose memory pools do not fit side by side."""
    subject = load_subject("sd15", device="cpu")
    alive: weakref.WeakSet = weakref.WeakSet()
    refused = []

    def crowded(subject: Subject, case: Case, variant: Contender) -> object:
        if len(alive) >= 2:
            refused.append(variant)
            raise torch.OutOfMemoryError("CUDA out of memory")
        prepared = prepare(subject, case, variant)
        alive.add(prepared)
        return prepared

    monkeypatch.setattr("tomesd.bench.cases.prepare", crowded)
    variants = tuple(Contender("tomesd", replace(ALWAYS, ratio=r / 10)) for r in range(1, 6))
    rows = measure_case(subject, Case("sd15", 64, 64, variants), QUICK)
    assert [row["error"] for row in rows] == [None] * 5
    assert [row["settings"]["ratio"] for row in rows] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert len(refused) == 2


def test_a_variant_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    package = tmp_path / "tomesd"
    package.mkdir()
    (package / "__init__.py").write_text("from .patch import apply_patch\n")
    (package / "patch.py").write_text(
        "def apply_patch(model, **options):\n    raise IndexError('too old\\nfor this')\n"
    )
    subject = load_subject("sd15", device="cpu")
    variants = (Contender("unpatched"), Contender("original", ALWAYS, folder=str(tmp_path)))
    rows = measure_case(subject, Case("sd15", 64, 64, variants), QUICK)
    assert [row["error"] for row in rows] == [None, "IndexError: too old"]


def test_an_interrupted_run_keeps_its_rows_and_goes_on(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rows.jsonl"
    variants = (Contender("unpatched"), Contender("tomesd", ALWAYS))
    cases = [Case("sd15", side, side, variants) for side in (64, 128, 192)]
    seen = []

    def interrupt(case: Case, share: float) -> None:
        seen.append(case)
        if case.height == 128:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cases(cases, RowFile(path, CPU), QUICK, on_progress=interrupt)
    first = read_rows(path)
    assert [row["height"] for row in first] == [64, 64]
    with path.open("a") as file:
        file.write('{"run": "cut sho')  # the power went

    again = RowFile(path, CPU, resume=True)
    seen.clear()
    rows = run_cases(cases, again, QUICK, on_progress=lambda case, share: seen.append(case))
    assert {case.height for case in seen} == {128, 192}
    assert read_rows(path) == rows
    assert rows[:2] == first
    assert len({row["run"] for row in rows}) == 1

    run_cases(cases[:1], RowFile(path, CPU), QUICK)
    assert read_rows(path)[:6] == rows  # a new run is added, and nothing is lost
    assert len({row["run"] for row in read_rows(path)}) == 2


def test_a_file_that_is_not_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("hello\n{}\n")
    with pytest.raises(ValueError, match="line 1"):
        RowFile(path, CPU)


# Tables


def made_up(label: str, seconds: float | None, **more: object) -> dict:
    kind = label if label in ("unpatched", "original", "free") else "tomesd"
    row = Case("sd15", 1024, 1024, (), section="graph", setting="a setting", mode="graph").row(
        Contender(kind, None if kind == "unpatched" else ALWAYS, label)
    )
    return {
        "run": "a",
        "date": "2025-01-01T00:00:00+00:00",
        **row,
        "seconds": seconds,
        "spread": 0.0001,
        "peak_mib": 1000.0,
        "error": None if seconds else "OOM",
        "hardware": "a GPU",
        "torch": "9.9",
        "commit": "abc",
        **more,
    }


def test_recovered_share_by_hand() -> None:
    assert recovered(base=40.0, ours=32.0, free=30.0) == pytest.approx(0.8)
    assert recovered(base=40.0, ours=44.0, free=30.0) == pytest.approx(-0.4)
    assert recovered(base=40.0, ours=39.0, free=41.0) is None  # there is nothing to gain


def test_rows_are_compared_within_their_run() -> None:
    rows = [made_up("unpatched", 0.04), made_up("free", 0.03), made_up("tomesd", 0.032)]
    rows += [{**row, "run": "b", "seconds": 2 * row["seconds"]} for row in rows[::2]]
    one, two = comparisons(rows)
    ours = one.find("tomesd")
    assert one.recovered(ours) == pytest.approx(0.8)
    assert one.speedup(ours) == pytest.approx(1.25)
    assert two.speedup(two.find("tomesd")) == pytest.approx(1.25)
    assert two.recovered(two.find("tomesd")) is None  # no bound was measured in that run


def test_what_all_lines_say_is_said_once() -> None:
    header = ("model", "size", "variant", "ms")
    lines = [("sd15", "512", "free", "1"), ("sd15", "1024", "free", "1")]
    common, kept, short = split_common(header, lines, always=("variant", "ms"))
    assert common == {"model": "sd15"}
    assert kept == ["size", "variant", "ms"]
    assert short == [["512", "free", "1"], ["1024", "free", "1"]]


def test_failures_are_named_and_memory_is_not_one() -> None:
    bad = made_up("tomesd", None, error="IndexError: too old")
    rows = [made_up("unpatched", 0.04), made_up("free", None), bad]
    assert failures(rows) == ["a setting, graph, tomesd: IndexError: too old"]
    assert [duration(row) for row in rows] == ["40.0", "OOM", "failed"]


# The command


def bench(*words: str) -> None:
    parse(["bench", *words]).run(Console(width=200))


def test_the_command_on_the_embedded_transformer(tmp_path: Path) -> None:
    words = ["--model", "transformer", "--sizes", "64", "--ratios", "0.5", "--when", "always"]
    words.append("--bound")
    for what in ("step", "pipeline"):
        bench(*words, "--what", what, "--steps", "1", "--seconds", "0", "--out", str(tmp_path))
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [row["variant"] for row in rows] == 2 * ["unpatched", "tomesd", "free"]
    assert all(row["error"] is None and row["finite"] for row in rows)
    assert not any(row["left_alone"] for row in rows)


def test_the_command_says_that_steps_differ(tmp_path: Path, capsys) -> None:
    words = ["--model", "unet", "--sizes", "64", "--seconds", "0", "--out", str(tmp_path)]
    for options, told in ((["--preset", "fast"], True), (["--ratios", "0.5"], False)):
        bench(*words, *options)
        printed = capsys.readouterr().out
        assert ("--what pipeline measures whole images" in printed) is told
        assert ("tomesd, reuse 2" in printed) is told


def test_the_command_on_the_embedded_model(tmp_path: Path, capsys, original: str) -> None:
    words = ["--model", "unet", "--sizes", "128x64", "--ratios", "0.5", "--when", "always"]
    words += ["--seconds", "0", "--bound"]
    bench(*words, "--device", "cpu", "--original", original, "--out", str(tmp_path))
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [row["variant"] for row in rows] == ["unpatched", "tomesd", "original", "free"]
    assert {(row["width"], row["height"]) for row in rows} == {(128, 64)}
    assert all(row["model"] == "unet" and row["error"] is None for row in rows)
    assert all(row["settings"]["when"] == "always" for row in rows if row["settings"])
    printed = capsys.readouterr().out
    table = (tmp_path / "results.md").read_text()
    (one,) = comparisons(rows)
    speedup = f"{one.speedup(one.find('tomesd')):.2f}x"
    assert speedup in printed
    assert speedup in table
    assert f"torch {torch.__version__}" in table
    with Image.open(tmp_path / "results.png") as picture:
        assert picture.width > 400

    bench(*words, "--device", "cpu", "--original", original, "--out", str(tmp_path), "--resume")
    assert read_rows(tmp_path / "rows.jsonl") == rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "100"], "width=100"),
        (["--sizes", "512x"], "sizes='512x'"),
        (["--images", "0"], "images=0"),
        (["--ratios", "0.5", "1.5"], "ratio=1.5"),
        (["--original", "nowhere"], "original='nowhere'"),
        (["--mode", "graph", "--what", "pipeline"], "only a step"),
        (["--mode", "graph", "--device", "cpu"], "need a GPU"),
        (["--model"], "nothing to measure"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        bench(*words, "--out", str(tmp_path / "out"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_settings_with_lists_and_tables_are_measured(tmp_path: Path) -> None:
    words = ["--model", "unet", "--sizes", "64", "--ratios", "0.5", "--seconds", "0"]
    words += [
        "--device",
        "cpu",
        "--level-ratios",
        "1",
        "0.5",
        "2",
        "0.25",
        "--schedule",
        "0.5",
        "0.25",
    ]
    bench(*words, "--when", "always", "--out", str(tmp_path))
    _, ours = read_rows(tmp_path / "rows.jsonl")
    assert ours["error"] is None
    assert ours["settings"]["level_ratios"] == {"1": 0.5, "2": 0.25}
    assert ours["settings"]["schedule"] == [0.5, 0.25]


def test_compiled_models_are_measured_too(monkeypatch) -> None:
    compile_module = torch.nn.Module.compile
    compiled = []

    def compile_quickly(module: torch.nn.Module, **options: object) -> None:
        compiled.append(options)
        compile_module(module, backend="aot_eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_quickly)
    subject = load_subject("sd15", device="cpu")
    case = Case("sd15", 64, 64, (Contender("tomesd", ALWAYS),), mode="compile")
    rows = measure_case(subject, case, QUICK)
    assert [row["error"] for row in rows] == [None]
    assert compiled == [{"fullgraph": True, "dynamic": False}]
