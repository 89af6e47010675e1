"""What the machine can do: measured once, kept, and never measured where that would do harm."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tomesd
from tomesd import machine
from tomesd.cli.run import run
from tomesd.machine import Machine, cache_file, machine_of

MEASURE, READ = machine._measure, machine._read
HERE = torch.device("cpu")
RATES = Machine(1e11, 2e11, 3e10, 4e-6, apart=False)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[torch.dtype]]:
    """What has been measured, in an empty cache folder."""
    made: list[torch.dtype] = []
    monkeypatch.setenv("TOMESD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "_read", READ)
    monkeypatch.setattr(machine, "_measure", lambda _, dtype: made.append(dtype) or RATES)
    yield made


def forget() -> None:
    """As in another process."""
    machine._known.clear()


def test_rates_are_measured_for_real() -> None:
    state = torch.get_rng_state()
    found = MEASURE(HERE, torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert not found.apart and machine._is_sound(found)
    # Any computer is within these; what they catch is a wrong unit.
    assert 1e8 < found.operations < 1e15 and 1e8 < found.attention < 1e15
    assert 1e8 < found.bytes < 1e13 and 1e-8 < found.launch < 1e-2


def test_a_slower_machine_has_lower_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that runs twice as fast, everything takes twice as long."""
    now = iter(range(10**6))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: 0.1 * next(now))
    fast = MEASURE(HERE, torch.float32)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: 0.2 * next(now))
    slow = MEASURE(HERE, torch.float32)
    for name in ("operations", "attention", "bytes"):
        assert getattr(slow, name) == pytest.approx(getattr(fast, name) / 2)
    assert slow.launch == pytest.approx(2 * fast.launch)


def test_they_are_kept_for_each_dtype_and_in_a_file(measured: list) -> None:
    for _ in range(2):
        assert machine_of(HERE, torch.float32) == machine_of(HERE, torch.bfloat16) == RATES
    assert measured == [torch.float32, torch.bfloat16]
    forget()
    assert machine_of(HERE, torch.float32) == RATES
    assert len(measured) == 2
    keys = list(json.loads(cache_file().read_text()))
    assert len(keys) == 2 and all(f"torch {torch.__version__}" in key for key in keys)


def test_other_versions_and_threads_have_rates_of_their_own(
    measured: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("get_num_threads", lambda: 77), ("__version__", "99.0")):
        machine_of(HERE, torch.float32)
        monkeypatch.setattr(torch, name, value)
    machine_of(HERE, torch.float32)
    assert len(measured) == 3


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"a": 1}', '{"a": {"b": 1}}', "bytes \udcff"], ids=repr
)
def test_a_file_of_something_else_is_replaced(content: str, measured: list) -> None:
    cache_file().parent.mkdir()
    cache_file().write_bytes(content.encode(errors="surrogateescape"))
    assert machine_of(HERE, torch.float32) == RATES
    assert measured == [torch.float32]
    assert len(machine._read(cache_file())) == 1


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), "fast", None])
def test_rates_that_cannot_be_are_measured_again(rate: Any, measured: list) -> None:
    machine_of(HERE, torch.float32)
    found = json.loads(cache_file().read_text())
    next(iter(found.values()))["bytes"] = rate
    cache_file().write_text(json.dumps(found))
    forget()
    assert machine_of(HERE, torch.float32) == RATES
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_to_is_no_error(
    measured: list, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOMESD_CACHE", str(tmp_path / "file" / "folder"))
    for _ in range(2):
        assert machine_of(HERE, torch.float32) == RATES
    assert len(measured) == 1  # for the process, they are kept


def test_the_folder_is_where_users_expect_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cache_file() == tmp_path / "cache" / "machine.json"
    monkeypatch.delenv("TOMESD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_file() == tmp_path / "xdg" / "tomesd" / "machine.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_file() == Path.home() / ".cache" / "tomesd" / "machine.json"


def test_nothing_is_measured_while_the_compiler_traces(measured: list) -> None:
    torch._dynamo.reset()

    def launch(x: torch.Tensor) -> torch.Tensor:
        return x + machine_of(x.device, x.dtype).launch

    guess = machine._from_properties(HERE, torch.float32)
    compiled = torch.compile(launch, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == pytest.approx(guess.launch)
    assert measured == [] and not cache_file().exists()
    machine_of(HERE, torch.float32)
    torch._dynamo.reset()
    assert compiled(torch.zeros(1)).item() == pytest.approx(RATES.launch)


def test_nothing_is_measured_without_data_or_in_a_capture(
    measured: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeTensorMode():
        machine_of(HERE, torch.float32)
    machine_of(torch.device("meta"), torch.float16)
    assert measured == [] and not cache_file().exists()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not machine._may_measure(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert machine._may_measure(torch.device("cuda"))


def test_what_cannot_be_measured_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Machine:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(machine, "_measure", fail)
    guess = machine._from_properties(HERE, torch.float32)
    assert machine_of(HERE, torch.float32) == guess
    assert not cache_file().exists()


@pytest.mark.parametrize(
    ("hip", "numbers", "tflops"),
    [(None, (9, 0), 7.5), ("6.2", (9, 0), 1.7), ("6.2", (9, 4), 4.3), ("6.2", (8, 0), 1.0)],
)
def test_the_guess_takes_no_rocm_gpu_for_one_of_nvidia(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, numbers: tuple[int, int], tflops: float
) -> None:
    properties = SimpleNamespace(major=numbers[0], minor=numbers[1], multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    guess = machine._from_properties(torch.device("cuda"), torch.float16)
    assert guess.operations == pytest.approx(0.5 * tflops * 100e12)
    single = machine._from_properties(torch.device("cuda"), torch.float32)
    assert single.operations < guess.operations and single.bytes == guess.bytes


def test_the_command_shows_and_renews(
    capsys: pytest.CaptureFixture[str], measured: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert run(["calibrate", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "0.1 Tflop/s" in out and "30 GB/s" in out and "4 us" in out
    assert str(cache_file()) in out and len(measured) == 1
    faster = Machine(5e11, 2e11, 3e10, 4e-6, apart=False)
    monkeypatch.setattr(machine, "_measure", lambda *_: faster)
    assert run(["calibrate", "--device", "cpu", "--renew"]) == 0
    assert "0.5 Tflop/s" in capsys.readouterr().out
    forget()
    assert machine_of(HERE, torch.float32) == faster


def test_patching_measures_once_and_only_what_is_asked_for(measured: list) -> None:
    """A compiled model could not, when it runs first."""
    from zoo_diffusers import HOSTS

    model = HOSTS["sd1"].build()
    tomesd.apply_patch(model, 0.5, when="always")
    tomesd.apply_patch(model, 0.0)
    assert measured == []
    tomesd.apply_patch(model, 0.5)
    with torch.no_grad():
        HOSTS["sd1"].run(model)
    assert measured == [torch.float32]
