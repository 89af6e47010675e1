"""The commands as a user meets them: what they write, and how they refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from zoo_diffusers import make_sd_pipeline

import tomesd
from tomesd.cli.run import run
from tomesd.generation import load_pipeline, record_maps, sample, save_image


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "sd"
    make_sd_pipeline().save_pretrained(folder)
    return str(folder)


def small(model: str, out: Path) -> list[str]:
    return ["--model", model, "--size", "128", "128", "--steps", "2", "--out", str(out)]


def test_generate_writes_images_that_tell_how_they_were_made(model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a dog\n\n")
    words = ["generate", "--prompt", "a cat", "--prompt-file", str(file), "--images", "2"]
    assert run([*words, *small(model, tmp_path / "out"), "--ratio", "0.6", "--seed", "7"]) == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["a-cat-7.png", "a-cat-8.png", "a-dog-7.png", "a-dog-8.png"]
    with Image.open(tmp_path / "out" / "a-cat-8.png") as image:
        assert image.size == (128, 128)
        metadata = json.loads(image.info["tomesd"])
    assert (metadata["prompt"], metadata["seed"], metadata["merge"]["ratio"]) == ("a cat", 8, 0.6)

    again = sample(
        load_pipeline(model),
        metadata["prompt"],
        tomesd.Settings(**metadata["merge"]),
        steps=metadata["steps"],
        guidance=metadata["guidance"],
        size=(metadata["width"], metadata["height"]),
        seed=metadata["seed"],
    )
    save_image(again.image, tmp_path / "again.png", metadata)
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "out/a-cat-8.png").read_bytes()


def test_size_is_width_then_height(model: str, tmp_path: Path) -> None:
    words = ["generate", "--prompt", "a cat", "--model", model, "--out", str(tmp_path)]
    assert run([*words, "--size", "192", "128", "--steps", "1"]) == 0
    with Image.open(tmp_path / "a-cat-0.png") as image:
        assert image.size == (192, 128)


def test_describe_prints_the_table(model: str, capsys: pytest.CaptureFixture) -> None:
    words = ["describe", "--model", model, "--size", "128", "256", "--max-downsample", "2"]
    assert run(words) == 0
    assert "attn merged at ratio 0.5" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["prompt", "image"])
def test_show_draws_a_map(model: str, tmp_path: Path, source: str, capsys) -> None:
    picture = tmp_path / "picture.png"
    Image.effect_noise((128, 128), 60).convert("RGB").save(picture)
    given = ["--prompt", "a cat"] if source == "prompt" else ["--image", str(picture)]
    out = tmp_path / "map.png"
    words = ["show", *given, *small(model, out), "--max-downsample", "2", "--level", "2"]
    assert run([*words, "--step", "1"]) == 0
    side = 128 // load_pipeline(model).vae_scale_factor // 2
    assert f"step 1: {side * side // 2} of {side * side} tokens" in capsys.readouterr().out
    with Image.open(out) as image:
        assert image.width % side == 0
        one = image.width
    assert run(words) == 0  # an early, a middle and a late step
    assert capsys.readouterr().out.count(f": {side * side // 2} of {side * side} tokens") == 3
    with Image.open(out) as image:
        assert image.width > 4 * one


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate"], "no prompt"),
        (["generate", "--prompt", "x", "--ratio", "1.5"], "ratio=1.5"),
        (["generate", "--prompt", "x", "--max-downsample", "3"], "max_downsample=3"),
        (["generate", "--prompt", "x", "--images", "0"], "images=0"),
        (["generate", "--prompt", "x", "--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["generate", "--prompt", "x", "--model", "./nowhere"], "no such model: ./nowhere"),
        (["generate", "--prompt", "x", "--model", "nowhere.safetensors"], "no such file"),
        (["generate", "--prompt", "x", "--config", "MODEL"], "only a single"),
        (["generate", "--prompt", "x", "--device", "warp"], "device='warp'"),
        (["generate", "--prompt", "x", "--model", "MODEL", "--size", "100", "100"], "width=100"),
        (["generate", "--prompt", "x", "--model", "MODEL", "--steps", "0"], "steps=0"),
        (["generate", "--prompt", "x", "--model", "MODEL", "--attention", "foo"], "'foo'"),
        (["generate", "--prompt", "x", "--model", "MODEL", "--offload", "model"], "needs a GPU"),
        (["show"], "either --image or --prompt"),
        (["show", "--image", "nowhere.png"], "nowhere.png"),
        (["show", "--prompt", "x", "--step", "30"], "step=30"),
        (["show", "--prompt", "x", "--model", "MODEL", "--steps", "1", "--level", "4"], "level=4"),
        (["demo", "--ratios", "0.5", "2"], "ratio=2"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: list[str], message: str, model: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([model if word == "MODEL" else word for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("tomesd: ")
    assert error.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_an_unreachable_hub_is_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(["generate", "--prompt", "x", "--model", "nobody/nothing"]) == 2
    error = capsys.readouterr().err
    assert "nobody/nothing" in error
    assert error.count("\n") == 1


def test_running_out_of_memory_is_one_line(monkeypatch, model: str, tmp_path, capsys) -> None:
    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("diffusers.StableDiffusionPipeline.__call__", exhausted)
    assert run(["generate", "--prompt", "x", *small(model, tmp_path / "out")]) == 1
    assert "out of memory; try" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_interruption_is_clean(monkeypatch, model: str, tmp_path: Path, capsys) -> None:
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("diffusers.StableDiffusionPipeline.__call__", interrupted)
    assert run(["demo", *small(model, tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "tomesd: interrupted\n"
    assert not (tmp_path / "out").exists()


def test_a_ratio_above_the_cap_warns(model: str, tmp_path: Path, capsys) -> None:
    words = ["generate", "--prompt", "x", "--ratio", "0.9", *small(model, tmp_path)]
    assert run(words) == 0
    assert "effective ratio of 0.75" in capsys.readouterr().err


def test_maps_are_the_plans_of_the_layers(model: str) -> None:
    pipe = load_pipeline(model)
    with tomesd.patched(pipe, ratio=0.5), record_maps(pipe) as maps:
        sample(pipe, "a cat", steps=2, size=(128, 128))
    assert len({map.timestep for map in maps}) == 2
    for map in maps:
        slots = map.slot.size - map.slot.size // 2
        assert sorted(set(map.slot.ravel().tolist())) == list(range(slots))
        assert map.members.sum() >= map.slot.size


def test_the_module_runs_as_a_program() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "tomesd", "--version"], capture_output=True, text=True
    )
    assert out.stdout.strip() == f"tomesd {tomesd.__version__}"


def test_nothing_is_said_when_nobody_reads_on() -> None:
    nobody, pipe = os.pipe()
    os.close(nobody)
    command = [sys.executable, "-m", "tomesd", "--help"]
    out = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True)
    os.close(pipe)
    assert (out.returncode, out.stderr) == (1, "")
