"""`tomesd tune`: what the search proposes, what it chooses, and whether that keeps the budget."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from zoo_diffusers import make_sd_pipeline, make_sdxl_pipeline, make_unet

import tomesd
from tomesd.cli.run import parse, run
from tomesd.evaluation import Sampling, make_items
from tomesd.evaluation.metrics import paired_scores
from tomesd.evaluation.networks import Lpips
from tomesd.evaluation.search_space import Choice, first_options, levels_of, search_space
from tomesd.evaluation.tuning import Budget, Measurement, SideBySide, choose, front_of, search
from tomesd.generation import load_pipeline, sample
from tomesd.presets import MERGING_PRESETS, PRESETS, load, options_of, save

SPACE = search_space([1, 2, 4])


def made_up(options: dict[str, Any]) -> Measurement:
    """A trade that has one best answer at every speed: `kv` is as good as `attn`, and faster."""
    ratio = options.get("ratio", 0.5)
    bonus = {"attn": 1.0, "kv": 1.3}.get(options.get("target", "attn"), 0.8)
    return Measurement(options, 1.0, 1 + ratio * bonus, ratio**2, 40 - 20 * ratio)


def measured(speedup: float, lpips: float, psnr: float = 30.0, **more: Any) -> Measurement:
    return Measurement({"ratio": lpips}, 1 / speedup, speedup, lpips, psnr, **more)


# Proposals


def test_a_seed_proposes_the_same_again_and_another_does_not() -> None:
    def proposals(seed: int) -> list[dict]:
        return [m.options for m in search(made_up, SPACE, trials=25, seed=seed)]

    assert proposals(1) == proposals(1)
    assert proposals(1) != proposals(2)


def test_trials_differ_and_all_are_settings_that_do_what_they_say() -> None:
    seen = search(made_up, SPACE, trials=60)
    written = [json.dumps(m.options, sort_keys=True) for m in seen]
    assert len(set(written)) == 60
    for m in seen:
        settings = tomesd.Settings(**m.options)
        assert (settings.schedule is None) == (settings.ratio_end is None)
        assert settings.share == "steps" or "refresh" not in m.options
        assert settings.target == "attn" or not settings.merge_crossattn
        assert settings.selector == "bipartite" or "window" not in m.options
    for choice in SPACE:
        default = getattr(tomesd.Settings(), choice.name)
        tried = {m.options.get(choice.name, default) for m in seen}
        assert len(tried) > 1, choice.name


def test_the_known_ones_come_first_and_given_options_stay() -> None:
    fixed = {"sx": 4, "target": "attn"}
    first = first_options(fixed, {"ratio": 0.37})
    seen = search(
        made_up, search_space([1], fixed), trials=len(first) + 5, fixed=fixed, first=first
    )
    ratios = [m.options.get("ratio", 0.5) for m in seen]
    known = [0.37, *(options["ratio"] for options in MERGING_PRESETS.values())]
    assert ratios[0] == 0.37
    assert set(known) <= set(ratios[: len(first)])
    assert all(m.options["sx"] == 4 and m.options["target"] == "attn" for m in seen)
    assert all(m.options.get("max_downsample") is None for m in seen)


def test_it_learns_from_what_it_sees() -> None:
    seen = search(made_up, SPACE, trials=60, first=[{}])
    later = [m.options.get("target", "attn") for m in seen[30:]]
    assert later.count("kv") > len(later) / 2


def test_refused_settings_cost_no_trial_and_are_logged() -> None:
    def picky(options: dict) -> Measurement:
        if options.get("selector", "bipartite") == "kmeans":
            raise ValueError("selector='kmeans': not on this model")
        return made_up(options)

    lines: list[dict] = []
    seen = search(picky, SPACE, trials=20, log=lines.append)
    assert len(seen) == 20
    assert [line["trial"] for line in lines if "trial" in line] == list(range(1, 21))
    refused = [line for line in lines if "refused" in line]
    assert refused
    assert all("kmeans" in line["refused"] for line in refused)


def test_a_search_ends_where_nothing_new_is_left() -> None:
    seen = search(made_up, [Choice("use_rand", (True, False))], trials=10)
    plain, top_left = {"ratio": 0.5}, {"ratio": 0.5, "use_rand": False}
    assert [m.options for m in seen] in ([plain, top_left], [top_left, plain])


def test_an_interrupted_search_gives_what_was_seen() -> None:
    def interrupted_after(count: int) -> Callable[[dict], Measurement]:
        calls = iter(range(count))

        def measure(options: dict) -> Measurement:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return made_up(options)

        return measure

    assert len(search(interrupted_after(3), SPACE, trials=9)) == 3
    with pytest.raises(KeyboardInterrupt):
        search(interrupted_after(0), SPACE, trials=9)


@given(st.floats(0, 1), st.sampled_from(SPACE))
def test_places_are_those_next_to_a_value(value: float, choice: Choice) -> None:
    for place, known in enumerate(choice.values):
        assert choice.place_of(known) == place
    if choice.name == "ratio":
        nearest = choice.values[choice.place_of(value)]
        assert all(abs(nearest - value) <= abs(other - value) for other in choice.values)


def test_if_all_are_refused_the_reason_is_said() -> None:
    def refuse(options: dict) -> Measurement:
        raise ValueError("nothing here can be merged")

    with pytest.raises(ValueError, match="nothing here can be merged"):
        search(refuse, SPACE, trials=2)


# What is chosen

point = st.builds(
    measured, st.floats(0.5, 3), st.floats(0.001, 1), st.floats(5, 60), merges=st.booleans()
)
points = st.lists(point, max_size=12)
# Each has options of its own.
distinct_points = st.lists(point, max_size=12, unique_by=lambda m: m.lpips)


@given(distinct_points, st.sampled_from(["max_lpips", "min_psnr", "speedup"]), st.floats(1.01, 40))
def test_the_choice_keeps_the_budget_and_nothing_that_does_is_better(
    seen: list[Measurement], kind: Any, limit: float
) -> None:
    budget = Budget(kind, limit / 40 if kind == "max_lpips" else limit)
    chosen = choose(seen, budget, lambda options: next(m for m in seen if m.options == options))
    allowed = []
    for m in seen:
        kept = {
            "max_lpips": m.lpips <= budget.limit,
            "min_psnr": m.psnr >= budget.limit,
            "speedup": m.speedup >= budget.limit,
        }
        if m.merges and m.speedup > 1 and kept[kind]:
            allowed.append(m)
    if not allowed:
        assert chosen is None
    elif kind == "speedup":
        assert chosen is not None
        assert chosen.lpips == min(m.lpips for m in allowed)
    else:
        assert chosen is not None
        assert chosen.speedup == max(m.speedup for m in allowed)


def test_what_breaks_the_budget_on_fresh_images_makes_room_for_the_next() -> None:
    seen = [measured(2.0, 0.10), measured(1.5, 0.08), measured(1.2, 0.05)]
    fresh = {0.10: measured(2.0, 0.13), 0.08: measured(0.9, 0.08), 0.05: measured(1.1, 0.06)}
    asked: list[float] = []

    def again(options: dict) -> Measurement:
        asked.append(options["ratio"])
        return fresh[options["ratio"]]

    lines: list[dict] = []
    assert choose(seen, Budget("max_lpips", 0.11), again, log=lines.append) is fresh[0.05]
    assert asked == [0.10, 0.08, 0.05]
    assert [line["kept"] for line in lines] == [False, False, True]
    assert choose(seen[:2], Budget("max_lpips", 0.11), again) is None


@given(points)
def test_the_front_is_what_no_other_beats(seen: list[Measurement]) -> None:
    front = front_of(seen)
    gaining = [m for m in seen if m.merges and m.speedup > 1]
    assert all(m in gaining for m in front)
    for m in gaining:
        beaten = any(f.speedup >= m.speedup and f.lpips <= m.lpips for f in front)
        assert beaten
    assert [f.speedup for f in front] == sorted(f.speedup for f in front)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_lpips": 0.1, "speedup": 2.0},
        {"max_lpips": 0.0},
        {"speedup": 1.0},
        {"min_psnr": float("nan")},
        {"min_psnr": float("inf")},
    ],
)
def test_a_budget_is_one_number_that_makes_sense(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Budget.of(**{"max_lpips": None, "min_psnr": None, "speedup": None, **limits})


# On a model


@pytest.fixture(scope="module")
def pipe() -> Any:
    # So many heads that attention takes most of the time, and merging gains even on a CPU.
    return make_sd_pipeline(unet=make_unet(attention_head_dim=32))


@pytest.fixture(scope="module")
def model(pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "sd"
    pipe.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("a cat\na dog\na fox\n")
    return str(file)


def pixels(images: list[Any]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])


def scores_of(pipe: Any, options: dict, seeds: dict[int, str], side: int, steps: int) -> dict:
    """Means over images that are made one by one, straight from the library."""

    def make(settings: tomesd.Settings | None) -> torch.Tensor:
        size = (side, side)
        return pixels(
            [
                sample(pipe, prompt, settings, steps=steps, size=size, seed=seed).image
                for seed, prompt in seeds.items()
            ]
        )

    scores = paired_scores(make(tomesd.Settings(**options)), make(None), Lpips("alex"))
    return {name: values.mean() for name, values in scores.items()}


def test_a_measurement_is_that_of_the_images(pipe: Any) -> None:
    items = make_items(["a cat", "a dog", "a fox"], seed=5)
    scales = SideBySide(
        pipe, items, Sampling.of(pipe, (64, 64), steps=2), Lpips("alex"), batch=2, repeats=1
    )
    options = {"ratio": 0.6, "when": "always", "target": "block"}
    found = scales.measure(options)
    expected = scores_of(pipe, options, {5: "a cat", 6: "a dog", 7: "a fox"}, 64, 2)
    assert found.merges
    assert found.options == options
    assert found.lpips == pytest.approx(expected["lpips"], rel=0.05)
    assert found.psnr == pytest.approx(expected["psnr"], abs=0.5)
    assert found.seconds > 0


def test_settings_that_merge_nothing_gain_nothing(pipe: Any, recwarn: Any) -> None:
    scales = SideBySide(pipe, make_items(["a cat"]), Sampling(64, 64, steps=1), Lpips("alex"), 1, 1)
    found = scales.measure({"ratio": 0.0})
    assert (found.merges, found.speedup, found.lpips, found.gains) == (False, 1.0, 0.0, False)
    assert not [w for w in recwarn if issubclass(w.category, tomesd.MergeWarning)]


def test_on_a_transformer_it_tries_nothing_that_means_nothing_there() -> None:
    pipe = load_pipeline("transformer")
    assert levels_of(pipe, Sampling(64, 64)) == []

    def apply(options: dict[str, Any]) -> Measurement:
        with tomesd.patched(pipe, **options):
            return made_up(options)

    lines: list[dict] = []
    seen = search(apply, search_space([]), trials=40, log=lines.append)
    assert len(seen) == 40
    assert not [line for line in lines if "refused" in line]
    assert {m.options.get("depth") for m in seen} > {None}


def test_levels_are_those_that_have_attention(pipe: Any) -> None:
    assert levels_of(pipe, Sampling(128, 128)) == [1, 2, 4]
    assert levels_of(make_sdxl_pipeline(), Sampling(128, 128)) == [2, 4]


def test_tune_writes_settings_that_keep_the_budget(
    pipe: Any, model: str, prompts: str, tmp_path: Path, capsys: Any
) -> None:
    out, log = tmp_path / "settings.json", tmp_path / "log" / "trials.jsonl"
    # Below what merging whole blocks gives here, and above what merging attention does.
    words = f"tune --min-psnr 64 --model {model} --prompts {prompts} --count 1 --out {out}"
    words += f" --log {log} --trials 4 --repeats 1 --size 256 256 --steps 1 --seed 3"
    assert run(words.split()) == 0

    written = json.loads(out.read_text())
    told = written["about"]["measured"]
    assert told["speedup"] > 1
    assert told["psnr"] >= 64
    scores = scores_of(pipe, load(out), {65536: "a cat"}, 256, 1)
    assert scores["psnr"] >= 63.9
    assert scores["psnr"] == pytest.approx(told["psnr"], abs=0.5)
    assert written["about"]["model"]["model"] == model
    assert written["about"]["sampling"]["steps"] == 1

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    trials = [line for line in lines if "trial" in line]
    assert len(trials) == 4
    assert all(line["options"]["seed"] == 3 for line in trials)
    tried = [line["options"] for line in trials]
    for preset in PRESETS["unet"].values():
        assert options_of(tomesd.Settings(**preset, seed=3)) in tried
    checks = [line for line in lines if "check" in line]
    assert [line["kept"] for line in checks] == [False] * (len(checks) - 1) + [True]
    assert checks[-1]["options"] == load(out)

    said = capsys.readouterr().out
    call = next(line for line in said.splitlines() if line.startswith("tomesd.apply_patch("))
    patched: Any = {}
    eval(call, {"tomesd": Recorder(patched), "pipe": pipe})
    assert patched == load(out)
    assert "no merging" in said


class Recorder:
    def __init__(self, into: dict) -> None:
        self.into = into

    def apply_patch(self, model: Any, **options: Any) -> None:
        self.into.update(options)


def test_a_budget_that_nothing_keeps_ends_with_the_nearest(
    model: str, prompts: str, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "settings.json"
    words = f"tune --speedup 50 --model {model} --prompts {prompts} --count 1 --out {out}"
    words += " --trials 2 --repeats 1 --size 64 64 --steps 1"
    assert run(words.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("tomesd: no settings keep a speed-up of at least 50")
    assert error.count("\n") == 1
    assert not out.exists()


def test_generate_and_eval_use_a_settings_file(model: str, prompts: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    options = {"ratio": 0.4, "level_ratios": {1: 0.3, 2: 0.6}, "schedule": [0.4, 0.2]}
    save(file, options)
    small = ["--model", model, "--size", "64", "64", "--steps", "1", "--settings", str(file)]

    def merge_of(*words: str) -> dict[str, Any]:
        out = tmp_path / "images"
        assert (
            run(["generate", "--prompt", "x", *small, "--out", str(out), "--overwrite", *words])
            == 0
        )
        with Image.open(out / "x-0.png") as image:
            return json.loads(image.info["tomesd"])["merge"]

    expected = tomesd.Settings(**options)
    merge = merge_of()
    assert (merge["ratio"], merge["schedule"]) == (0.4, [0.4, 0.2])
    assert merge["level_ratios"] == {"1": 0.3, "2": 0.6}
    assert merge["target"] == expected.target
    assert merge_of("--ratio", "0.7", "--target", "kv")["ratio"] == 0.7

    save(file, {"ratio": 0.4, "target": "kv"})
    words = f"eval --prompts {prompts} --count 1 --no-sets --out {tmp_path / 'run'}".split()
    assert run([*words, *small]) == 0
    variants = json.loads((tmp_path / "run" / "run.json").read_text())["variants"]
    assert [v["settings"].get("ratio") for v in variants] == [None, 0.4]
    assert variants[1]["settings"]["target"] == "kv"


def merge_of(words: str) -> tomesd.Settings:
    return parse(["generate", "--prompt", "x", *words.split()]).merge.checked()


def test_a_preset_is_taken_by_name() -> None:
    assert merge_of("--preset fast") == tomesd.Settings(**PRESETS["unet"]["fast"])


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--ratio 0.5", {"ratio": 0.5}),
        ("--ratio=0.5 --window None", {"ratio": 0.5, "window": None}),
        ("--no-proportional --target attn", {"proportional": False, "target": "attn"}),
        ("--max_downsample 2 --seed 0", {"max_downsample": 2, "seed": 0}),
    ],
)
def test_what_is_given_wins_over_a_preset_also_if_it_is_the_default(
    words: str, given: dict[str, Any], tmp_path: Path
) -> None:
    for name, preset in PRESETS["unet"].items():
        expected = tomesd.Settings(**{**preset, **given})
        assert merge_of(f"--preset {name} {words}") == expected
        save(tmp_path / "settings.json", preset)
        assert merge_of(f"--settings {tmp_path / 'settings.json'} {words}") == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tune", "give one budget: --max-lpips, --min-psnr or --speedup"),
        ("tune --speedup 2 --max-lpips 0.1", "give one budget"),
        ("tune --speedup 0.5", "speedup=0.5: must be more than 1"),
        ("tune --speedup 2 --trials 0", "trials=0"),
        ("tune --speedup 2 --repeats 0", "repeats=0"),
        ("tune --speedup 2 --compile", "compile: "),
        ("tune --speedup 2 --prompts nowhere.txt", "prompts='nowhere.txt'"),
        ("tune --speedup 2 --ratio 3", "ratio=3"),
        ("tune --speedup 2 --settings nowhere.json", "settings='nowhere.json': No such file"),
        ("generate --prompt x --settings nowhere.json", "settings='nowhere.json': No such file"),
        ("generate --prompt x --settings a --preset fast", "either --settings or --preset"),
        ("generate --prompt x --schedule zigzag", "schedule='zigzag'"),
        ("generate --prompt x --schedule linear", "needs ratio_end"),
        ("generate --prompt x --protect everything", "protect='everything'"),
        ("eval --settings nowhere.json", "settings='nowhere.json': No such file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: str, message: str, refusal: Callable[[list[str]], str]
) -> None:
    assert message in refusal(words.split())


def test_options_that_python_takes_more_for_are_given_in_words(
    model: str, tmp_path: Path, capsys: Any
) -> None:
    small = ["--model", model, "--size", "64", "64", "--steps", "1", "--out", str(tmp_path)]
    words = "generate --prompt x --schedule 0.5 0.25 --protect guidance --level-ratios 1 0.5 2 0.25"
    assert run([*words.split(), *small]) == 0
    with Image.open(tmp_path / "x-0.png") as image:
        merge = json.loads(image.info["tomesd"])["merge"]
    assert (merge["schedule"], merge["protect"]) == ([0.5, 0.25], "guidance")
    assert merge["level_ratios"] == {"1": 0.5, "2": 0.25}
    assert run(["generate", "--help"]) == 0
    assert "fixed" not in capsys.readouterr().out


def test_an_interrupted_search_says_what_it_does_and_goes_on(
    model: str, prompts: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    small = ["--model", model, "--prompts", prompts, "--count", "1", "--size", "64", "--steps", "1"]
    words = ["tune", "--max-lpips", "0.9", "--repeats", "1", "--trials", "5", *small]
    words += ["--out", str(tmp_path / "settings.json")]
    measure, done = SideBySide.measure, []

    def interrupted(self: SideBySide, options: dict) -> Measurement:
        if len(done) == 2:
            done.append("interrupted")
            raise KeyboardInterrupt
        done.append(options)
        return measure(self, options)

    with monkeypatch.context() as patching:
        patching.setattr(SideBySide, "measure", interrupted)
        run(words)
    out = capsys.readouterr().out
    assert "5 trials of 3 images: about" in out or "5 trials of 12 images: about" in out
    log = tmp_path / "settings.trials.jsonl"
    assert f"Interrupted after 2 trials, which are in {log}" in out
    assert "Ctrl-C again ends it without" in out
    before = [line for line in map(json.loads, log.read_text().splitlines()) if "trial" in line]
    assert len(before) == 2

    fresh = []
    with monkeypatch.context() as patching:
        count = lambda self, options: (fresh.append(options), measure(self, options))[1]  # noqa: E731
        patching.setattr(SideBySide, "measure", count)
        run([*words, "--resume"])
    lines = [line for line in map(json.loads, log.read_text().splitlines()) if "trial" in line]
    assert lines[:2] == before
    assert len(lines) == 5
    assert all(line["options"] not in fresh[:3] for line in before)
    assert fresh[:3] == [line["options"] for line in lines[2:]]

    capsys.readouterr()
    assert run([*words, "--resume", "--search-seed", "3"]) == 2
    assert "was made with search_seed = 0" in capsys.readouterr().err
    assert run([*words, "--resume", "--log", str(tmp_path / "none.jsonl")]) == 2
    assert "there is no log" in capsys.readouterr().err
