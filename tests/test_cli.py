"""The commands as a user meets them: what they write, and how they refuse."""

import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import IPNDMScheduler
from PIL import Image
from zoo_diffusers import make_sd_pipeline

import tomesd
from tomesd.cli.run import parse, run
from tomesd.cli.screen import about
from tomesd.generation import MergeMap, draw_map, load_pipeline, record_maps, sample, save_image
from tomesd.generation.sampling import Batch, Sampling, estimate_seconds


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
    for steps in (1, 3):  # an early, a middle and a late one, each of them once
        assert run([*words, "--overwrite", "--steps", str(steps)]) == 0
        told = capsys.readouterr().out.count(f": {side * side // 2} of {side * side} tokens")
        assert told == steps
    with Image.open(out) as image:
        assert image.width > 4 * one


def test_show_says_what_a_picture_cannot_show(model: str, tmp_path: Path, capsys) -> None:
    """Each of its steps is looked at alone."""
    picture, words = tmp_path / "picture.png", "only --prompt can show"
    Image.effect_noise((128, 128), 60).convert("RGB").save(picture)
    given = ["show", "--image", str(picture), *small(model, tmp_path / "map.png")]
    assert run([*given, "--reuse", "2", "--when", "always"]) == 0
    assert words in capsys.readouterr().out
    assert run([*given, "--preset", "fast"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate"], "no prompt"),
        (["generate", "--prompt", "x", "--ratio", "1.5"], "ratio=1.5"),
        (["generate", "--prompt", "x", "--max-downsample", "3"], "max_downsample=3"),
        (["generate", "--prompt", "x", "--images", "0"], "images=0"),
        (["generate", "--prompt", "x", "--strength", "0.9"], "strength=0.9: needs --hires"),
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
        (
            ["show", "--prompt", "x", "--model", "MODEL", "--steps", "1", "--preset", "fast"],
            "with so many steps, nothing is merged, made coarse or reused",
        ),
        (["demo", "--ratios", "0.5", "2"], "ratio=2"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: list[str], message: str, model: str, refusal: Callable[[list[str]], str]
) -> None:
    assert message in refusal([model if word == "MODEL" else word for word in words])


def test_an_unreachable_hub_is_one_line(monkeypatch, refusal: Callable[[list[str]], str]) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = ["generate", "--prompt", "x", "--model", "nobody/nothing"]
    assert "nobody/nothing" in refusal(words)


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


# An option that is given wins over a preset, also where it is the default

COMMANDS = ("describe", "generate", "show", "tune", "demo", "bench", "eval")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_given_wins_over_a_preset_in_every_command(command: str) -> None:
    several = command in ("demo", "bench", "eval")
    given = parse([command, "--preset", "balanced", "--ratios" if several else "--ratio", "0.5"])
    preset = parse([command, "--preset", "balanced"])
    merges = [one.merge.each()[0] if several else one.merge.checked() for one in (given, preset)]
    assert [merge.ratio for merge in merges] == [0.5, 0.0]
    assert [merge.reuse for merge in merges] == [2, 2]
    if several:  # what a newcomer types is understood
        assert [m.ratio for m in parse([command, "--ratio", "0.3"]).merge.each()] == [0.3]
        assert [m.ratio for m in parse([command]).merge.each()] == [0.25, 0.5, 0.75]


@pytest.mark.parametrize("command", COMMANDS)
def test_presets_are_those_of_the_model_in_every_command(command: str) -> None:
    """What transformers alone can do is not refused before the model is known."""
    merge = parse([command, "--preset", "fast", "--reuse-start", "0.5"]).merge
    merge.check()
    for coarse, words in ((True, (0.35, 6, 0.5)), (False, (None, 4, 0.5))):
        made = merge.checked(kind="transformer", coarse=coarse)
        assert (made.coarse, made.reuse, made.reuse_start) == words
    with pytest.raises(ValueError, match="reuse_start=2"):
        parse([command, "--reuse-start", "2"]).merge.check()


def test_a_benchmark_of_several_models_gives_each_its_own_preset() -> None:
    bench = parse(["bench", "--model", "transformer", "sd15", "--preset", "fast"])
    first, second = (case.contenders[1].settings for case in bench._cases([]))
    assert (first.reuse, first.coarse, first.ratio) == (6, 0.35, 0)
    assert (second.reuse, second.coarse, second.ratio) == (2, None, 0)


def test_without_options_commands_take_the_preset_that_apply_patch_takes(
    model: str, tmp_path: Path, capsys
) -> None:
    told = []
    for more in ([], ["--preset", "fast"], ["--ratio", "0.5"]):
        assert run(["describe", "--model", model, "--size", "128", "--steps", "4", *more]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] != told[2]
    in_python = tomesd.describe(tomesd.apply_patch(load_pipeline(model)), 128, 128, steps=4)
    assert str(in_python).split() == told[0].split()
    assert run(["generate", "--prompt", "a cat", "--seed", "3", *small(model, tmp_path)]) == 0
    with Image.open(tmp_path / "a-cat-3.png") as image:
        merge = json.loads(image.info["tomesd"])["merge"]
    assert (merge["ratio"], merge["reuse"]) == (0, 2)


def test_where_times_are_not_known_describe_merges_as_apply_patch_does(tmp_path, capsys) -> None:
    pipe = make_sd_pipeline()
    pipe.scheduler = IPNDMScheduler()
    pipe.save_pretrained(tmp_path)
    assert run(["describe", "--model", str(tmp_path), "--size", "128"]) == 0
    in_python = tomesd.describe(tomesd.apply_patch(pipe), 128, 128)
    assert str(in_python).split() == capsys.readouterr().out.split()


def test_describe_says_the_ratio_that_was_given(model: str, capsys) -> None:
    words = ["describe", "--model", model, "--preset", "balanced", "--ratio", "0.5"]
    assert run([*words, "--when", "always", "--size", "128"]) == 0
    assert "at ratio 0.5" in capsys.readouterr().out


# What is there stays there


def test_images_of_one_name_are_numbered(model: str, tmp_path: Path) -> None:
    words = ["generate", "--prompt", "a cat", "A cat!", *small(model, tmp_path)]
    assert run(words) == 0
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(first) == {"a-cat-0.png", "a-cat-0-2.png"}
    assert run([*words, "--ratio", "0.7"]) == 0
    assert len(list(tmp_path.iterdir())) == 4
    assert all((tmp_path / name).read_bytes() == data for name, data in first.items())
    assert run([*words, "--steps", "1", "--overwrite"]) == 0
    assert (tmp_path / "a-cat-0.png").read_bytes() != first["a-cat-0.png"]
    assert (tmp_path / "a-cat-0-2.png").read_bytes() == first["a-cat-0-2.png"]


def test_pictures_and_folders_are_numbered(model: str, tmp_path: Path) -> None:
    words = ["show", "--prompt", "a cat", *small(model, tmp_path / "map.png"), "--when", "always"]
    assert run(words) == run(words) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"map.png", "map-2.png"}
    words = ["demo", "--prompt", "a cat", *small(model, tmp_path / "demo"), "--ratios", "0.5"]
    assert run([*words, "--when", "always"]) == run([*words, "--when", "always"]) == 0
    assert (tmp_path / "demo-2" / "comparison.png").is_file()


@pytest.mark.parametrize("command", [*COMMANDS[1:], "report"])
def test_where_to_write_is_checked_before_the_work(
    command: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    def load(*args: object, **options: object) -> None:
        raise AssertionError("nothing may be loaded")

    monkeypatch.setattr("tomesd.generation.loading.load_pipeline", load)
    in_the_way = tmp_path / "a file"
    in_the_way.write_text("x")
    budget = ["--max-lpips", "0.1"] if command == "tune" else []
    prompt = ["--prompt", "x"] if command in ("generate", "show", "demo") else []
    places = {"show": tmp_path, "tune": tmp_path}  # to which they write a file
    wrong = [places.get(command, in_the_way), in_the_way / "further"]
    for out in wrong:
        where = [str(out)] if command == "report" else ["--out", str(out)]
        assert run([command, *where, *prompt, *budget]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"tomesd: {'folder' if command == 'report' else 'out'}='{out}': ")
        assert error.count("\n") == 1
    assert in_the_way.read_text() == "x"


# Small splinters


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt-file", "FOLDER"], "Is a directory"),
        (["--prompt-file", "BINARY"], "is not UTF-8 text"),
        (["--prompt", "x", "--size", "100000", "--model", "MODEL"], "and this machine has"),
        (["--prompt", "x", "--size", "72x128", "--model", "MODEL"], "width=72: must be"),
    ],
)
def test_what_cannot_be_is_said_in_plain_words(
    words: list[str], message: str, model: str, tmp_path: Path, capsys
) -> None:
    (tmp_path / "binary").write_bytes(b"\x89PNG\xff")
    stands = {"FOLDER": str(tmp_path), "BINARY": str(tmp_path / "binary"), "MODEL": model}
    words = [stands.get(word, word) for word in words]
    assert run(["generate", *words, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "size"), [("64", (64, 64)), ("96x64", (96, 64)), ("96 64", (96, 64))]
)
def test_a_size_is_a_side_or_two(words: str, size: tuple[int, int], capsys) -> None:
    assert parse(["generate", "--size", *words.split()]).sampling.size == size
    assert parse(["describe", "--size", *words.split()]).size == size
    for bad in ("12x", "1x2x3", "big", "-5"):
        assert run(["describe", "--size", bad]) == 2
        assert "[bold]" not in capsys.readouterr().err


def test_the_cap_is_said_once(model: str, tmp_path: Path, capsys) -> None:
    words = ["generate", "--prompt", "x", "y", "--ratio", "0.9", *small(model, tmp_path)]
    assert run(words) == 0
    assert capsys.readouterr().err.count("effective ratio") == 1


def test_half_precision_on_a_cpu_gets_a_word(model: str, capsys) -> None:
    words = ["describe", "--model", model, "--size", "128", "--device", "cpu"]
    assert run([*words, "--dtype", "float16"]) == 0
    assert "float16 on a CPU" in capsys.readouterr().err
    assert run(words) == 0
    assert capsys.readouterr().err == ""


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, env={**known, **environment})


def test_help_needs_no_torch_and_threads_are_told_how_to_wait_before_it() -> None:
    program = """
        import os, sys
        sys.argv = ["tomesd", "eval", "--help"]
        from tomesd.cli import main
        try:
            main()
        except SystemExit as end:
            assert end.code == 0
        heavy = {"torch", "numpy", "PIL", "diffusers", "transformers", "matplotlib", "scipy"}
        print("loaded:", sorted(heavy & set(sys.modules)), os.environ.get("OMP_WAIT_POLICY"))
    """
    assert "loaded: [] passive" in python(program).stdout
    assert "loaded: [] active" in python(program, OMP_WAIT_POLICY="active").stdout
    assert "loaded: [] None" in python(program, GOMP_SPINCOUNT="5").stdout


def test_an_interruption_while_things_are_loaded_is_one_line() -> None:
    program = """
        import sys
        class Interrupt:
            def find_spec(self, name, path=None, target=None):
                if name == "torch":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupt())
        sys.argv = ["tomesd", "generate", "--prompt", "x"]
        from tomesd.cli import main
        main()
    """
    out = python(program)
    assert (out.returncode, out.stderr) == (130, "tomesd: interrupted\n")


def test_help_is_wrapped_where_a_line_is_full() -> None:
    program = "import sys; sys.argv[1:] = ['demo', '--help']; import tomesd.cli as c; c.main()"
    lines = python(program, PYTHONIOENCODING="utf-8").stdout.splitlines()
    lines = [line.strip("│") for line in lines if line.startswith("│")]
    start = next(line.index("show this help") for line in lines if "show this help" in line)
    width = len(lines[0]) - start - 1
    for line, following in itertools.pairwise(lines):
        more = following[start:].split(maxsplit=1)
        texts = [each for each in (line, following) if each.strip() and not each[:start].strip()]
        if len(texts) == 2:
            assert len(line[start:].rstrip()) + 1 + len(more[0]) > width, line


def test_what_was_kept_is_drawn_as_it_is() -> None:
    """Of 4 x 4 tokens, the first row is merged in pairs, the others stay alone."""
    slot = np.arange(16).reshape(4, 4)
    slot[0] = [0, 0, 2, 2]
    slot = np.unique(slot, return_inverse=True)[1].reshape(4, 4)
    picture = Image.effect_noise((64, 64), 90).convert("RGB")
    drawn = np.asarray(draw_map(MergeMap("x", 0.0, 1, slot), picture)).astype(int)
    plain = np.asarray(picture).astype(int)
    assert drawn.shape == plain.shape
    assert (drawn[16:] == plain[16:]).all()
    means = [plain[:16, :32].mean((0, 1)), plain[:16, 32:].mean((0, 1))]
    assert (drawn[2, 2] > means[0]).all() and (drawn[2, 60] > means[1]).all()  # paler
    assert len(np.unique(drawn[:16, :30].reshape(-1, 3), axis=0)) == 1  # no line in a slot
    assert (drawn[5, 31] > drawn[5, 2]).all()  # a line between the two


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "about 1 s"), (80, "about 80 s"), (100, "about 1.7 minutes"), (600, "about 10 minutes")],
)
def test_estimates_are_as_exact_as_they_are(seconds: float, words: str) -> None:
    assert about(seconds) == words
    assert about(7 * 3600) == "about 7 hours"


def test_an_estimate_counts_the_steps(monkeypatch, model: str) -> None:
    made = Batch(
        (), seconds=10.0, step_seconds=3.0, mean_step_seconds=3.0, peak_mib=None, flagged=()
    )
    monkeypatch.setattr("tomesd.generation.sampling.sample_batch", lambda *args: made)
    assert estimate_seconds(None, Sampling(64, 64, steps=20), 4) == 10 + 18 * 3
    assert estimate_seconds(None, Sampling(64, 64, steps=1)) == 10
