"""Settings in files and by name: what is written comes back, and what is wrong is said."""

import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zoo_diffusers import HOSTS
from zoo_dit import DITS

import tomesd
from tomesd.patch import patch_of
from tomesd.presets import MERGING_PRESETS, PRESETS, changed, combined, load, preset, save
from tomesd.settings import MergeWarning, Settings

RATIO = st.floats(0, 1)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "ratio": st.floats(0.01, 1),
        "max_downsample": st.sampled_from([None, 1, 2, 4, 8]),
        "sx": st.integers(1, 8),
        "use_rand": st.booleans(),
        "merge_crossattn": st.booleans(),
        "seed": st.integers(0, 2**40),
        "window": st.none() | st.integers(0, 64),
        "share": st.sampled_from(["block", "level", "steps"]),
        "refresh": st.integers(1, 50),
        "selector": st.sampled_from(["bipartite", "kmeans", "grid"]),
        "metric": st.sampled_from(["input", "keys", "mean", "previous"]),
        "target": st.sampled_from(["attn", "kv"]),
        "proportional": st.booleans(),
        "schedule": st.none() | st.lists(RATIO, min_size=1, max_size=5),
        "start": st.floats(0, 0.4),
        "end": st.floats(0.6, 1),
        "tau": st.none() | RATIO,
        "level_ratios": st.none() | st.dictionaries(st.sampled_from([1, 2, 4, 8]), RATIO),
        "kind_ratios": st.none() | st.dictionaries(st.sampled_from(["attn", "mlp"]), RATIO),
        "protect_share": RATIO,
    },
)


@given(OPTIONS)
def test_what_is_saved_comes_back(tmp_path_factory: Any, options: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("settings") / "settings.json"
    settings = Settings(**options)
    save(path, settings, model="demo")
    assert Settings(**load(path)) == settings
    save(path, options)
    assert Settings(**load(path)) == settings


def test_a_file_holds_what_differs_and_what_it_is_about(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "settings.json"
    linear = {"ratio": np.float32(0.5), "sx": np.int64(3), "schedule": "linear", "ratio_end": 0.25}
    save(path, {**linear, "refresh": 4}, speedup=1.5, where=Path("x"))
    assert json.loads(path.read_text()) == {
        "format": 1,
        "settings": {"ratio": 0.5, "sx": 3, "schedule": "linear", "ratio_end": 0.25},
        "about": {"speedup": 1.5, "where": "x"},
    }
    assert list(path.parent.iterdir()) == [path]


def test_protect_is_kept_though_settings_are_compared_without_it(tmp_path: Path) -> None:
    save(tmp_path / "s.json", Settings(protect="guidance"))
    assert load(tmp_path / "s.json") == {"ratio": 0.5, "protect": "guidance"}


@pytest.mark.parametrize(
    "options", [{"schedule": lambda progress: 0.5}, {"protect": torch.ones(4, 4)}]
)
def test_functions_and_tensors_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(TypeError, match=f"^{name}: .* cannot be saved"):
        save(tmp_path / "s.json", options)
    assert not any(tmp_path.iterdir())


def file_of(**changes: Any) -> str:
    return json.dumps({"format": 1, "settings": {}, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "not a JSON file"),
        ("\xff", "not a JSON file"),
        ("[]", "not a settings file"),
        ("{}", "not a settings file"),
        (file_of(settings=[]), "not a settings file"),
        (file_of(format=2), "format 2, and this version reads format 1"),
        (file_of(settings={"ration": 0.5}), "unknown option 'ration'; known are ratio, max_down"),
        (file_of(settings={"ratio": 2}), "ratio=2: must be a number between 0 and 1"),
        (file_of(settings={"ratio": "0.5"}), "ratio='0.5': must be a number"),
        ('{"format": 1, "settings": {"ratio": NaN}}', "ratio=nan: must be"),
        (
            file_of(settings={"level_ratios": {"3": 0.5}}),
            "level_ratios={3: 0.5}: must be None or a dict from 1, 2,",
        ),
        (file_of(settings={"level_ratios": {"x": 0.5}}), "level_ratios={'x': 0.5}: must be"),
        (file_of(settings={"schedule": {"a": 1}}), "schedule={'a': 1}: must be"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "settings.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError) as error:
        load(path)
    assert str(error.value).startswith(f"settings={str(path)!r}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_options_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown option 'ration'"):
        save(tmp_path / "s.json", {"ration": 0.5})


@pytest.mark.parametrize("kind", ["unet", "transformer"])
def test_presets_are_settings_that_say_no_more_than_they_change(kind: Any) -> None:
    assert list(PRESETS[kind]) == list(MERGING_PRESETS) == ["quality", "balanced", "fast"]
    for name in PRESETS[kind]:
        options = preset(name, kind)
        allowed = {field.name for field in fields(Settings)}
        assert set(options) <= allowed
        assert set(changed(Settings(**options))) >= set(options) - {"ratio"}
        options["ratio"] = 0.9
        assert preset(name, kind)["ratio"] != 0.9
    with pytest.raises(ValueError, match="preset='best': must be one of 'quality', 'balanced'"):
        preset("best")


@pytest.mark.parametrize("build", [HOSTS["sd1"].build, DITS["flux"].build])
def test_what_is_given_says_how_a_preset_reuses(build: Any) -> None:
    model = build()

    def settings(name: Any, **options: Any) -> Settings:
        patch = patch_of(tomesd.apply_patch(model, preset=name, **options))
        assert patch is not None
        return patch.settings

    assert settings("fast", reuse_start=0.4).reuse_start == 0.4
    assert settings("fast", reuse_within=None, extrapolate=True).extrapolate
    assert settings("balanced", reuse_end=5).reuse_end == 5


@pytest.mark.parametrize("build", [HOSTS["sd1"].build, DITS["flux"].build])
def test_options_of_merging_beside_a_preset_that_merges_nothing_are_named(build: Any) -> None:
    model = build()
    with pytest.warns(MergeWarning, match=r"end=0\.3 changes nothing: .* give a ratio too"):
        tomesd.apply_patch(model, preset="fast", end=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tomesd.apply_patch(model, preset="fast", end=0.3, ratio=0.5)
        tomesd.apply_patch(model, preset="fast", schedule=[0.5, 0.0], window=0)
        tomesd.apply_patch(model, preset="fast", reuse_start=0.5, window=None)


def test_fewer_steps_from_the_start_are_not_more_at_the_end() -> None:
    options = combined(PRESETS["transformer"]["balanced"], {"reuse": 10})
    assert Settings(**options).reuse_every(1.0) == Settings(**options).reuse_every(0.3) == 10
    assert combined(PRESETS["transformer"]["balanced"], {"reuse": 3})["reuse_end"] == 8
