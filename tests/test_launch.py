"""Launches of Triton kernels that skip what Triton found out before."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver

from tomesd.kernels import triton_launch
from tomesd.kernels.triton_launch import power_of_2, quickly


class Compiled:
    """What Triton compiles a kernel to; notes what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *values: self.launches.append((grid, values))


class Kernel(triton.JITFunction):
    """A kernel that compiles to the above, and keeps what it was compiled for."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self.made: list[Compiled] = []

    def __getitem__(self, grid: Any) -> Any:
        def compile_and_launch(*_: Any, **__: Any) -> Compiled:
            self.made.append(Compiled())
            return self.made[-1]

        return compile_and_launch


class OneDevice:
    device = 0

    def get_current_device(self) -> int:
        return self.device


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(driver, "_active", OneDevice())

    def body(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        pass

    return Kernel(body)


def test_what_may_be_anywhere_is_compiled_for_once(kernel: Kernel) -> None:
    kernel.params[1].do_not_specialize_on_alignment = True
    x, y = torch.zeros(64), torch.zeros(64)
    quickly(kernel)[(1,)](x, y, 5, 16)
    quickly(kernel)[(1,)](x, y[1:], 5, 16)
    (compiled,) = kernel.made
    assert len(compiled.launches) == 1


def test_a_second_launch_goes_to_what_was_compiled(kernel: Kernel) -> None:
    x, y = torch.zeros(64), torch.zeros(64)
    quickly(kernel)[(2, 3)](x, n=5, BLOCK=16, y=y, num_warps=4)
    other = torch.ones(64)
    quickly(kernel)[(4,)](x, n=5, BLOCK=16, y=other, num_warps=4)
    (compiled,) = kernel.made
    ((grid, values),) = compiled.launches
    assert grid == (4, 1, 1)
    assert values[0] is x and values[1] is other and values[2:] == (5, 16)


@pytest.mark.parametrize("change", ["dtype", "alignment", "number", "constant", "warps", "device"])
def test_whatever_code_depends_on_is_compiled_for(kernel: Kernel, change: str) -> None:
    x, y = torch.zeros(64), torch.zeros(64)
    quickly(kernel)[(1,)](x, y, 5, 16, num_warps=4)
    numbers, warps = (5, 16), 4
    if change == "dtype":
        x = x.double()
    elif change == "alignment":
        x = x[1:]
    elif change == "number":
        numbers = (1, 16)
    elif change == "constant":
        numbers = (5, 32)
    elif change == "warps":
        warps = 8
    else:
        driver.active.device = 1
    quickly(kernel)[(1,)](x, y, *numbers, num_warps=warps)
    assert len(kernel.made) == 2 and not kernel.made[0].launches


def test_older_versions_of_triton_launch_by_themselves(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "_LAUNCHES_COMPILED", False)
    assert quickly(kernel) is kernel


def test_powers_of_2() -> None:
    assert [power_of_2(n) for n in (1, 2, 3, 48, 64, 65)] == [1, 2, 4, 64, 64, 128]


def test_what_is_known_does_not_grow_forever(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "_MOST_KNOWN", 8)
    monkeypatch.setattr(triton_launch, "_known", {})
    x, y = torch.zeros(64), torch.zeros(64)
    for number in range(50):
        quickly(kernel)[(1,)](x, y, number, 16)
        assert len(quickly(kernel)._compiled) <= 8
    quickly(kernel)[(1,)](x, y, 49, 16)
    assert len(kernel.made) == 50 and kernel.made[-1].launches
    for other in [Kernel(kernel.fn) for _ in range(20)]:
        quickly(other)
        assert len(triton_launch._known) <= 8
