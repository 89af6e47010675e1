"""Where the Triton kernels are used, and what depends on the kind of GPU; no GPU is needed."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tomesd.kernels import backend, triton_search, use_triton

CUDA = torch.device("cuda", 0)


class Machine:
    """A machine with one GPU, of which we can say what it is, and whether kernels run on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.tries = 0
        self.capturing = False
        self.error: Exception | None = None
        # What is not a tensor stands for one on the GPU.
        monkeypatch.setattr(backend, "Tensor", SimpleNamespace)
        monkeypatch.setattr(backend, "_tried", {})
        monkeypatch.setattr(backend, "_try", self._try)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.version, "hip", None)
        self.capability(9, 0)

    def capability(self, *numbers: int) -> None:
        backend._find_reason.cache_clear()
        self._patch.setattr(torch.cuda, "get_device_capability", lambda index: numbers)

    def rocm(self) -> None:
        backend._find_reason.cache_clear()
        self._patch.setattr(torch.version, "hip", "6.2")

    def _try(self, device: torch.device, dtype: torch.dtype) -> bool:
        self.tries += 1
        return self.error is None

    def uses(self, name: str = "auto", dtype: torch.dtype = torch.float16) -> bool:
        x: Any = SimpleNamespace(device=CUDA, dtype=dtype)
        return use_triton(name, x)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield Machine(monkeypatch)
    backend._find_reason.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "used"),
    [
        ((6, 1), torch.float16, False),
        ((7, 0), torch.float16, True),
        ((7, 5), torch.bfloat16, False),
        ((7, 5), torch.float32, True),
        ((8, 0), torch.bfloat16, True),
        ((12, 0), torch.bfloat16, True),
        ((9, 0), torch.float64, False),
    ],
)
def test_a_gpu_has_to_be_new_enough(machine: Machine, capability, dtype, used) -> None:
    machine.capability(*capability)
    assert machine.uses("auto", dtype) == used
    assert not machine.uses("reference", dtype)
    if not used:
        with pytest.raises(RuntimeError, match=r'backend="triton" cannot be used here'):
            machine.uses("triton", dtype)


def test_the_numbers_of_rocm_are_no_compute_capabilities(machine: Machine) -> None:
    machine.capability(6, 0)
    machine.rocm()
    assert machine.uses("auto", torch.bfloat16)


def test_without_triton_there_are_no_kernels(machine: Machine, monkeypatch) -> None:
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    assert not machine.uses()
    with pytest.raises(RuntimeError, match="not installed"):
        machine.uses("triton")


def test_kernels_are_tried_once_unless_they_are_asked_for(machine: Machine) -> None:
    machine.error = RuntimeError("no C compiler")
    assert machine.uses("triton") and machine.tries == 0  # the error is the user's
    assert not machine.uses() and not machine.uses()
    assert machine.tries == 1
    assert not machine.uses(dtype=torch.float32)
    assert machine.tries == 2


def test_nothing_is_tried_while_a_graph_is_captured_but_what_is_known_counts(
    machine: Machine,
) -> None:
    machine.capturing, machine.error = True, RuntimeError("no C compiler")
    assert machine.uses() and machine.tries == 0
    machine.capturing = False
    assert not machine.uses()
    machine.capturing = True
    assert not machine.uses() and machine.tries == 1


def test_nothing_is_tried_on_shapes_alone(machine: Machine, monkeypatch) -> None:
    monkeypatch.setattr(backend, "Tensor", int)
    assert machine.uses() and machine.tries == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernels_that_run_pass_the_trial(dtype) -> None:
    """In Triton's interpreter."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # others are Triton's own
        assert backend._try(torch.device("cpu"), dtype)


def test_kernels_that_do_not_compile_are_told_of(monkeypatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease set CC")

    monkeypatch.setattr(backend, "load_fast", lambda: SimpleNamespace(match_tokens=fail))
    with pytest.warns(RuntimeWarning, match=r"Triton kernels.*\(RuntimeError: Failed to find C"):
        assert not backend._try(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("hip", "dtype", "precision"),
    [
        (None, torch.float32, "tf32x3"),
        (None, torch.float16, "ieee"),
        ("6.2", torch.float32, "ieee"),  # Triton has no tf32x3 there
        ("6.2", torch.bfloat16, "ieee"),
    ],
)
def test_products_are_as_precise_as_the_dtype(monkeypatch, hip, dtype, precision) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert triton_search._tiles(torch.empty(1, 1, 1, dtype=dtype), 64)["precision"] == precision


@pytest.mark.parametrize(
    ("hip", "capability", "dtype", "width"),
    [
        (None, (9, 0), torch.float16, 256),
        (None, (8, 0), torch.bfloat16, 256),
        (None, (8, 9), torch.float16, 128),
        (None, (9, 0), torch.float32, 128),
        ("6.2", (9, 0), torch.float16, 64),
    ],
)
def test_tiles_are_as_large_as_the_memory_allows(
    monkeypatch, hip, capability, dtype, width
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    metric: Any = SimpleNamespace(is_cuda=True, device=CUDA, dtype=dtype)
    assert triton_search._tiles(metric, 64)["BLOCK_D"] == width
