"""The benchmark of diffusion transformers runs, on tiny models, and its bound is one."""

from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import dit
import pytest
import torch
from bound import apply_bound
from dit_settings import Setting
from torch._dynamo.testing import CompileCounterWithBackend
from zoo_diffusers import PIXART_CONFIG
from zoo_dit import DITS

import tomesd
from tomesd.bench.models import shared_copy
from tomesd.bench.rows import Row, read_rows
from tomesd.bench.tables import comparisons

TINY: dict[str, dict[str, Any]] = {
    DITS[name].kind: DITS[name].config
    for name in ("flux", "hunyuan_video", "ltx", "qwen", "sd3", "wan", "zimage")
} | {"PixArtTransformer2DModel": PIXART_CONFIG}


def tiny(setting: Setting) -> Setting:
    """The same on a latent of 8x8, three frames of it if it has frames."""
    side, frames = 8 * setting.scale[0], 2 * setting.scale[1] + 1 if setting.frames > 1 else 1
    config = TINY[setting.kind]
    return replace(setting, config=config, height=side, width=side, frames=frames)


@pytest.fixture
def tiny_dit(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {name: tuple(map(tiny, those)) for name, those in dit.SETTINGS.items()}
    monkeypatch.setattr(dit, "SETTINGS", settings)
    monkeypatch.setattr(dit, "SIDES", (16,))
    monkeypatch.setattr(dit, "CHANNELS", (32,))


def dit_rows(folder: Path, *arguments: str) -> list[Row]:
    quick = ["--device", "cpu", "--seconds", "0", "--commit", "abc", "--out", str(folder)]
    dit.main([*arguments, *quick])
    return read_rows(folder / "dit.jsonl")


@pytest.mark.usefixtures("tiny_dit")
def test_every_transformer_is_timed_at_its_bound_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOMESD_COMMIT", "")
    rows = dit_rows(tmp_path, "transformers", "attention", "time", "matching", "--mode", "eager")
    labels = ["unpatched", "ratio 0.5", "bound 0.5", "ratio 0.75", "bound 0.75"]
    for section in ("transformers", "attention", "time"):
        name = section if section == "transformers" else f"transformers-{section}"
        found = [(r["setting"], r["label"]) for r in rows if r["section"] == name]
        wanted = [s.name for s in dit.SETTINGS[section] if "eager" in s.modes]
        assert found == [(name, label) for name in wanted for label in labels]
    assert all(row["error"] is None and row["seconds"] > 0 for row in rows)
    assert {row["commit"] for row in rows} == {"abc"}
    merged = [row for row in rows if row["label"].startswith("ratio")]
    assert not any(row["left_alone"] for row in merged)
    once = {setting.name for those in dit.SETTINGS.values() for setting in those if setting.once}
    told = [row for row in merged if row["setting"] not in once]
    assert all(row["plans"] > 0 and row["plan_seconds"] > 0 for row in told)
    assert all(row["tokens_left"] < row["tokens"] for row in told)
    plans = [(r["tokens"], r["frames"]) for r in rows if r["section"] == "transformers-matching"]
    assert plans == [(256, 1), (256, 16)]


@pytest.mark.usefixtures("tiny_dit")
def test_whole_images_are_timed_with_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOMESD_COMMIT", "")
    times: list[float] = []
    step = dit.Step.run
    monkeypatch.setattr(
        dit.Step, "run", lambda self: times.append(self._timestep.flatten()[0].item()) or step(self)
    )
    rows = dit_rows(tmp_path, "images", "--only", "Flux")
    labels = ["unpatched", "preset quality", "preset balanced", "preset fast"]
    assert [row["label"] for row in rows] == labels
    assert all(row["error"] is None and row["steps"] == 28 for row in rows)
    assert len(times) == 2 * 4 * 28  # once for the memory, and once for the time
    levels = [t / (3 - 2 * t) for t in times[:28]]  # without the shift
    assert levels == pytest.approx([1 - k / 28 for k in range(28)])


def deep(setting: Setting) -> Setting:
    """The same with more blocks, if its configuration tells how many it has."""
    layers = {"num_layers": 5, "num_single_layers": 5}
    known = {name: count for name, count in layers.items() if name in setting.config}
    return replace(setting, config={**setting.config, **known})


@pytest.mark.usefixtures("tiny_dit")
@pytest.mark.parametrize(
    ("name", "graphs"), [("Flux.1-dev 64x64", [3, 4, 4, 4, 4]), ("SD3.5-large", [2, 1, 1, 1, 1])]
)
def test_blocks_of_a_kind_are_compiled_once_for_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, graphs: list[int]
) -> None:
    monkeypatch.setenv("TOMESD_COMMIT", "")
    counter, made = CompileCounterWithBackend("eager"), []
    compile_module, prepare = torch.nn.Module.compile, dit.Runner.prepare

    def prepare_and_count(*args: Any) -> Any:
        before = counter.frame_count
        ready = prepare(*args)
        made.append(counter.frame_count - before)
        return ready

    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(compile_module, backend=counter))
    monkeypatch.setattr(dit.Runner, "prepare", prepare_and_count)
    settings = {"transformers": tuple(map(deep, dit.SETTINGS["transformers"]))}
    monkeypatch.setattr(dit, "SETTINGS", settings)
    torch._dynamo.reset()
    rows = dit_rows(tmp_path, "--only", name, "--mode", "compile-blocks")
    assert [row["error"] for row in rows] == [None] * 5
    assert made == graphs


@pytest.mark.usefixtures("tiny_dit")
def test_each_row_is_written_when_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOMESD_COMMIT", "")
    prepare = dit.Runner.prepare

    def stop(self: Any, kind: str, options: dict[str, Any] | None) -> Any:
        if (options or {}).get("ratio") == 0.75:
            raise KeyboardInterrupt
        return prepare(self, kind, options)

    monkeypatch.setattr(dit.Runner, "prepare", stop)
    with pytest.raises(KeyboardInterrupt):
        dit_rows(tmp_path, "--only", "SD3.5-large", "--mode", "eager")
    rows = read_rows(tmp_path / "dit.jsonl")
    assert [row["label"] for row in rows] == ["unpatched", "ratio 0.5", "bound 0.5"]
    # The unpatched model takes turns with each of the others.
    [found] = comparisons(rows)
    assert "unpatched_seconds" not in rows[0]
    for row in rows[1:]:
        assert found.speedup(row) == row["unpatched_seconds"] / row["seconds"]


def test_no_way_is_begun_without_time(capsys: pytest.CaptureFixture[str]) -> None:
    setting, model = tiny(dit.SETTINGS["transformers"][0]), DITS["flux"].build()
    has_time = iter([True, True, False]).__next__
    rows = dit.Runner(setting, "eager", model).rows(dit.Effort(seconds=0), has_time)
    assert [row["label"] for row in rows] == ["unpatched", "ratio 0.5"]
    assert "bound 0.5: no time left" in capsys.readouterr().out


@pytest.mark.usefixtures("tiny_dit")
def test_what_fails_is_a_row_and_what_is_late_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOMESD_COMMIT", "")
    rows = dit_rows(tmp_path, "--only", "Flux.1-dev 64x64", "--mode", "graph")  # needs a GPU
    assert len(rows) == 5
    assert all(row["seconds"] is None and row["error"] for row in rows)
    assert len(dit_rows(tmp_path, "--mode", "eager", "--budget", "0")) == 5  # none were added
    assert "no time left" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["flux", "zimage", "wan", "hunyuan_video", "ltx", "sd3"])
@torch.no_grad()
def test_the_bound_runs_the_same_blocks_on_the_tokens_that_are_left(name: str) -> None:
    model = DITS[name].build()
    inputs, lengths = DITS[name].inputs(batch=1), {}

    def note(copy: Any, kind: str) -> None:
        """Notes how many tokens each layer in the blocks gets."""
        lengths[kind] = []
        for path, module in copy.named_modules():
            if (isinstance(module, torch.nn.Linear) and "blocks." in path) or "layers." in path:
                module.register_forward_pre_hook(
                    lambda _, args: lengths[kind].append(args[0].shape) if args else None
                )

    patched, bound = shared_copy(model), shared_copy(model)
    tomesd.apply_patch(patched, ratio=0.5, start=0, end=1, when="always")
    patched(**inputs)
    apply_bound(bound, patched)
    note(model, "unpatched")
    note(patched, "patched")
    note(bound, "bound")
    whole, out = model(**inputs)[0], bound(**inputs)[0]
    patched(**inputs)
    assert lengths["bound"] == lengths["patched"] != lengths["unpatched"]
    if isinstance(out, list):  # Z-Image
        whole, out = whole[0], out[0]
    assert out.shape == whole.shape and not torch.equal(out, whole)
