"""The benchmarks measure what the tables in the documents show."""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import front
import numpy as np
import pytest
import quality
import rule
import speed
import torch
from doc_tables.quality import IN_SHORT
from front_ways import RUN_BY_BALANCED, WAYS, cheaper

import tomesd
from tomesd.bench import Effort, RowFile, run_cases
from tomesd.bench.rows import read_rows
from tomesd.evaluation import Variant
from tomesd.evaluation.variants import patched_with
from tomesd.files import json_lines
from tomesd.generation import load_pipeline, sample
from tomesd.patch import patch_of
from tomesd.presets import PRESETS
from tomesd.settings import Settings

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
PRESET_ROWS = {
    "unet": {
        "quality": "reuse 2 from 0.5",
        "balanced": "reuse 2 from 0.25",
        "fast": "reuse 2 from 0",
    },
    "transformer": {name: IN_SHORT[f'`preset="{name}"`'] for name in PRESETS["transformer"]},
}
"""Labels of the trade-offs that presets are, by kind of model."""


@pytest.mark.parametrize("section", speed.SECTIONS)
def test_a_section_is_timed_again_with_the_settings_of_its_rows(section: str) -> None:
    def identity(names: tuple[Any, ...], settings: dict[str, Any] | None) -> str:
        return json.dumps([*names, settings and settings["ratio"]])

    rows = [row for row in speed.MEASURED[speed.SECTIONS[section]] if row["section"] == section]
    names = ("setting", "mode", "variant", "label")
    measured = {identity(tuple(row[name] for name in names), row["settings"]) for row in rows}
    cases = speed.cases(section, "a folder")
    contenders = [
        (case.row(contender), contender) for case in cases for contender in case.contenders
    ]
    wanted = [identity(tuple(r[name] for name in names), r["settings"]) for r, _ in contenders]
    assert set(wanted) == measured and len(wanted) == len(measured)
    for row, contender in contenders:
        known = [r["settings"] for r in rows if r["label"] == row["label"]]
        assert contender.settings is None or any(
            options.items() <= row["settings"].items() for options in known
        )
    assert all(case.contenders[0].kind != "original" for case in speed.cases(section, None))


def test_an_earlier_version_is_timed_beside_this_one(tmp_path: Path) -> None:
    """This version stands for it, with operators of another name."""
    folder = tmp_path / "before" / "tomesd"
    shutil.copytree(Path(tomesd.__file__).parent, folder)
    for path in folder.rglob("*.py"):
        words = path.read_text(encoding="utf-8")
        for name in ("tomesd::", "ops.tomesd", '"_tomesd'):
            words = words.replace(name, name.replace("tomesd", "tomesd_before"))
        path.write_text(words, encoding="utf-8")
    [case, *_] = speed.cases("eager", None)
    case = speed.with_before(case, str(folder.parent))
    case = replace(case, model="unet", device="cpu", dtype="float32", width=64, height=64, images=1)
    file = RowFile(tmp_path / "rows.jsonl", torch.device("cpu"))
    rows = run_cases([case], file, Effort(seconds=0, min_repeats=1, sample_seconds=0))
    labels = ["unpatched", "plan every step", "plan every block"]
    assert [row["label"] for row in rows] == [*labels, *(f"{one}, before" for one in labels[1:])]
    assert all(row["error"] is None and row["section"] == "eager, before" for row in rows)
    assert "eager, before" not in speed.SECTIONS


@pytest.mark.parametrize("name", quality.SECTIONS)
def test_a_section_is_measured_again_with_the_settings_of_its_rows(name: str) -> None:
    def identity(row: dict[str, Any]) -> str:
        names = ("variant", "setting", "label", "settings")
        return json.dumps([row[name] for name in names], sort_keys=True)

    rows = read_rows(RESULTS / "quality.jsonl")
    measured = {identity(row) for row in rows if row["section"] == f"quality-{name}"}
    wanted = [identity(row) for row in quality.candidates(name)]
    assert set(wanted) == measured and len(wanted) == len(measured)
    assert len({quality.name_of(row) for row in quality.candidates(name)}) <= len(wanted)


@pytest.mark.parametrize("kind", PRESETS)
def test_presets_are_measured_as_they_are_now(kind: Any) -> None:
    rows = [row for row in read_rows(RESULTS / "front.jsonl") if kind in row["model"]]
    for name, label in PRESET_ROWS[kind].items():
        # Of as many steps as were measured, the limit for few steps leaves none to run.
        options = {"reuse_start": 0.0, **PRESETS[kind][name], "reuse_within": None}
        (settings,) = {
            json.dumps(row["settings"], sort_keys=True) for row in rows if row["label"] == label
        }
        assert Settings(**{**json.loads(settings), "depth": options.get("depth")}) == Settings(
            **options
        )


def test_forty_percent_of_the_steps_lie_below_the_threshold() -> None:
    noise = 1 - load_pipeline("unet", device="cpu").scheduler.alphas_cumprod
    label = "threshold at 40 % of the steps"
    rows = [r for r in quality.candidates("seed") if r["label"].startswith(label)]
    assert len(rows) == 2
    for row in rows:
        share = (noise < row["settings"]["tau"]).float().mean().item()
        assert share == pytest.approx(0.4, abs=0.002)


def test_images_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"section": "quality-paper", "setting": "", "images": 2, "steps": 1, "scheduler": "plms"}
    ways = {"unmerged": {}, "half": {"ratio": 0.5}, "again": {"ratio": 0.5, "when": "always"}}
    rows = [
        {**few, "place": place, "label": label, "settings": settings}
        | {"variant": "tomesd" if settings else "unmerged"}
        for place, (label, settings) in enumerate(ways.items())
    ]
    (tmp_path / "before.jsonl").write_text(json_lines(rows))
    monkeypatch.setattr(quality, "ROWS", tmp_path / "before.jsonl")
    monkeypatch.setattr(quality, "SIDE", 64)
    folders = ["--images", str(tmp_path / "images"), "--out", str(tmp_path / "rows.jsonl")]
    quality.main(["paper", "--device", "cpu", "--batch", "2", *folders])
    images = read_rows(tmp_path / "rows.jsonl")
    assert [row["label"] for row in images] == ["unmerged", "half", "again"]
    assert images[1]["psnr"] == images[2]["psnr"] < 100  # made once
    assert {"lpips", "lpips_low", "fid_unmerged"} <= images[1].keys()
    assert "psnr" not in images[0]
    assert images[1]["settings"] == {"when": "always", "ratio": 0.5}


def test_settings_that_were_read_can_be_merged_with() -> None:
    pipe = load_pipeline("unet", device="cpu")
    [row] = [r for r in quality.candidates("search") if "level_ratios" in r["settings"]]
    with patched_with(pipe, Variant("", "merged", row["settings"])):
        patch = patch_of(pipe.unet)
    assert patch is not None and patch.settings.level_ratios == {1: 0.75, 2: 0.5}


def test_the_decisions_in_the_rows_are_those_of_the_rule(tmp_path: Path) -> None:
    """Those about one UNet; all of them would take long."""
    for name in ("gpu", "compiled"):
        rows = [row for row in read_rows(RESULTS / f"{name}.jsonl") if row["model"] == "sd15"]
        (tmp_path / f"{name}.jsonl").write_text(json_lines(rows))
    now = [row for row in rule.measured(tmp_path) if row["section"] in ("graph", "compile")]
    kept = [row for row in read_rows(RESULTS / "rule.jsonl") if row["setting"].startswith("SD1.5")]
    kept = [row for row in kept if row["section"] in ("graph", "compile")]
    assert len(now) > 10
    # How long the host takes for a kernel comes from other models too.
    names = ("setting", "label", "mode", "merges", "measured")
    assert [[r[n] for n in names] for r in now] == [[r[n] for n in names] for r in kept]


@pytest.mark.parametrize("model", WAYS)
def test_ways_to_make_images_have_names_of_their_own(model: str) -> None:
    labels = [way.label for way in WAYS[model]]
    assert len(set(labels)) == len(labels)


def front_rows(tmp_path: Path, *arguments: str, rows: str) -> list[dict[str, Any]]:
    few = ["--device", "cpu", "--images", "2", "--steps", "4", "--batch", "2", "--rows", rows]
    places = ["--rows-file", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]
    front.main([*few, *places, *arguments])
    return read_rows(tmp_path / "rows.jsonl")


def test_the_front_has_quality_and_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "FEWEST_FOR_KID", 2)
    monkeypatch.setattr(front, "FEWEST_FOR_FID", 2)
    scenes = torch.randint(256, (4, 3, 64, 64), dtype=torch.uint8)
    monkeypatch.setattr(front, "compose", lambda *arguments: scenes.split(2))
    ways = [cheaper(reuse=3, reuse_start=0.25)]
    ways += [way for way in WAYS["transformer"] if way.label == "TaylorSeer 2"]
    ways += [front.Way("first block cache", "loose", {"threshold": 9.0}, cache="first block")]
    ways += [front.Way("fewer steps", "half", steps=0.5), front.Way("reuse", "bad", {"reuse": 0})]
    ways += [front.Way("fewer steps", "placed", levels=(0, 1, 3))]
    ways = [replace(way, share=1) for way in ways]
    monkeypatch.setitem(front.WAYS, "transformer", ways)
    with pytest.raises(SystemExit, match="bad: ValueError: reuse=0"):
        front_rows(tmp_path, "--pixels", "128", "--sprites", "none.npz", rows="")
    rows = {row["label"]: row for row in read_rows(tmp_path / "rows.jsonl")}
    assert list(rows) == [
        "unmerged",
        "reuse 3 from 0.25",
        "TaylorSeer 2",
        "loose",
        "half",
        "placed",
    ]
    # Two of four steps leave out 14 of 16 blocks; TaylorSeer leaves out one step, of all blocks;
    # the other cache, three steps but for the first block.
    works = {"reuse 3 from 0.25": 1 - 14 / 32, "TaylorSeer 2": 0.75, "half": 0.5}
    works |= {"unmerged": 1, "loose": 1 - 3 / 4 * 15 / 16, "placed": 0.75}
    assert {label: row["work"] for label, row in rows.items()} == pytest.approx(works)
    base = rows.pop("unmerged")
    assert base["fid"] > 0 and "lpips" not in base
    for row in rows.values():
        assert 10 < row["psnr"] < 60 and 0 < row["lpips"] < 1 and row["kid_unmerged"] != 0
        assert row["kid_change"] == pytest.approx(row["kid"] - base["kid"])
    out = sorted((tmp_path / "out").iterdir())
    assert [path.suffix for path in out] == [".npz"] * 6 + [".jpg"]
    with np.load(out[1]) as kept:
        assert kept["features"].shape == (2, 2048)
        assert kept["psnr"].mean() == rows["reuse 3 from 0.25"]["psnr"]


@torch.no_grad()
def test_the_steps_that_balanced_runs_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"model": "transformer", "device": "cpu", "dtype": "float32", "pixels": 64}
    model = front.Model(argparse.Namespace(**wanted))
    predict, ran = model._predict_flow, []
    way = front.Way("presets", "balanced", PRESETS["transformer"]["balanced"])
    with front.counted_tokens() as count, model.changed(way, 28) as changed:

        def noted(*arguments: Any) -> torch.Tensor:
            before = count[0]
            found = predict(*arguments)
            ran.append(count[0] > before)
            return found

        monkeypatch.setattr(model, "_predict_flow", noted)
        model.loop(changed, model.encode(["a cat"]), model.noise(range(1)), 28)
    assert tuple(step for step, run in enumerate(ran) if run) == RUN_BY_BALANCED


def test_magcache_is_calibrated_and_leaves_steps_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"threshold": 9.0, "max_skip_steps": 1, "retention_ratio": 0.0}
    way = front.Way("MagCache", "loose", options, cache="magnitude")
    monkeypatch.setitem(front.WAYS, "transformer", [way])
    rows = front_rows(tmp_path, "--pixels", "64", rows="")
    assert [row["work"] for row in rows] == [1.0, 0.5]  # the first step, and each second one


@pytest.mark.parametrize(("model", "guidance"), [("transformer", 4.0), ("unet", 5.0)])
def test_unmerged_images_of_the_front_are_those_of_the_pipeline(
    model: str, guidance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    shrunk = front.shrunk
    monkeypatch.setattr(front, "shrunk", lambda images: made.append(images) or shrunk(images))
    front_rows(tmp_path, "--model", model, "--pixels", "64", rows="none")
    pipe = load_pipeline(model, device="cpu")
    captions = front.tomesd_demo_model.held_out_captions()
    for seed in range(2):
        image = sample(pipe, captions[seed], seed=seed, size=(64, 64), steps=4, guidance=guidance)
        difference = made[0][seed].permute(1, 2, 0).numpy() - np.array(image.image, dtype=float)
        assert np.abs(difference).max() <= 2


def test_the_rule_knows_the_settings_of_its_rows() -> None:
    rows = read_rows(RESULTS / "rule.jsonl")
    asked = {row["setting"] for row in rows if not row["setting"].startswith("SD")}
    asked |= {row["setting"] for row in rows if row["setting"].startswith("SD3")}
    assert asked and asked <= rule.TRANSFORMERS.keys()
