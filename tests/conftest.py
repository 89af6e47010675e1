"""What all tests have in common: how Triton runs, and the machine that merging is judged by."""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TRAINING = Path(__file__).parents[1] / "demo_model" / "training"
# Triton decides when it is imported, by whichever test, whether it interprets its kernels.
os.environ["TRITON_INTERPRET"] = "1"
# Nothing is read from, or left in, the user's folder; what tests start inherits it.
os.environ["TOMESD_CACHE"] = tempfile.mkdtemp(prefix="tomesd-tests-")


@pytest.fixture(scope="session", autouse=True)
def slow_machine() -> Iterator[None]:
    """A machine on which all that saves operations pays: the models of the tests are tiny, and what
    a test sees must not depend on where it runs. Fixtures of whole modules run on it too."""
    from tomesd import machine

    slow = machine.Machine(1e6, 1e6, 1e12, 1e-9, apart=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_read", lambda _: {})  # what a command in another test measured
        patch.setattr(machine, "_measure", lambda *_: slow)
        yield


@pytest.fixture(autouse=True)
def nothing_known(slow_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test knows what another one measured."""
    monkeypatch.setattr("tomesd.machine._known", {})


@pytest.fixture(autouse=True)
def own_attention_backend() -> Iterator[None]:
    """A backend that one model is given becomes that of all others in diffusers; not of the next
    test."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    before = getattr(registry, "_active_backend", None)
    yield
    if registry is not None:
        registry._active_backend = before


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny pipeline, as commands take it."""
    from zoo_diffusers import make_sd_pipeline

    folder = tmp_path_factory.mktemp("model") / "sd"
    make_sd_pipeline().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[[list[str]], str]:
    """Gives a command words that are wrong, in an empty folder; returns the one line it says."""
    from tomesd.cli.run import run

    def refused(words: list[str]) -> str:
        monkeypatch.chdir(tmp_path)
        assert run(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("tomesd: ")
        assert error.count("\n") == 1
        assert not any(tmp_path.iterdir())
        return error

    return refused


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of the training folder by name; afterwards its plain names are free."""
    monkeypatch.syspath_prepend(TRAINING)
    yield importlib.import_module
    for name in {path.stem for path in TRAINING.glob("*.py")}:
        sys.modules.pop(name, None)
