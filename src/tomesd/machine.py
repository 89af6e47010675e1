"""What a machine can do, measured once for each device and dtype.

Four rates decide whether merging pays: how fast the device multiplies matrices, how fast attention
runs, how fast memory is, and how long the host takes to start a kernel. They are measured when they
are first needed, in well under a second, and kept: for the process, and in a file, so that the same
model on the same machine always merges the same layers.
"""

import functools
import json
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compiler import constant_when_traced
from .files import write_text

_log = logging.getLogger("tomesd")

Launcher = Literal["eager", "compiled", "graph"]
"""Who starts kernels: PyTorch, the code that torch.compile makes, or a CUDA graph."""

# What starting a kernel takes, as a share of what it takes in eager mode. That of compiled code is
# from SDXL: 51 ms a step instead of 77 to 99.
_LAUNCH_SHARE: dict[Launcher, float] = {"eager": 1.0, "compiled": 0.6, "graph": 0.0}


@dataclass(frozen=True)
class Machine:
    """How fast a device and its host are, with numbers of one dtype."""

    operations: float
    """Floating-point operations per second, in linear layers."""
    attention: float
    """The same in fused attention."""
    bytes: float
    """Bytes read or written per second."""
    launch: float
    """Seconds that the host takes for a kernel in a model, with the code around it."""
    kernel: float = 0.0
    """Seconds that a kernel takes at least, on the device."""
    apart: bool = True
    """Whether host and device work at the same time. A CPU is both."""

    def run_by(self, launcher: Launcher) -> "Machine":
        """The same machine where something else starts the kernels."""
        if launcher == "graph" and not self.apart:
            launcher = "compiled"  # a CPU has no graphs
        return replace(self, launch=self.launch * _LAUNCH_SHARE[launcher])

    def seconds(
        self,
        operations: float = 0.0,
        attention: float = 0.0,
        moved: float = 0.0,
        kernels: float = 0.0,
    ) -> float:
        """What the device takes for so many operations, bytes and kernels."""
        computing = operations / self.operations + attention / self.attention
        return computing + moved / self.bytes + kernels * self.kernel


def find_launcher(device: torch.device) -> Launcher:
    """Who will start the kernels of what runs or is traced now."""
    if torch.compiler.is_compiling():
        return "graph" if _compiles_to_graphs() else "compiled"
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return "graph" if capturing else "eager"


@constant_when_traced
def _compiles_to_graphs() -> bool:
    """Whether torch.compile runs in a mode that replays CUDA graphs.

    PyTorch has no public way to ask; where this one is closed, the answer is no.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
    except (AttributeError, ImportError):
        return False
    compiler = getattr(compiler, "_torchdynamo_orig_backend", compiler)
    config = getattr(compiler, "config", None)
    return isinstance(config, dict) and bool(config.get("triton.cudagraphs"))


_known: dict[str, Machine] = {}
_lock = threading.Lock()


def machine_of(device: torch.device, dtype: torch.dtype, *, renew: bool = False) -> Machine:
    """The machine's rates: those of this process, of the file, or measured now.

    Nothing is measured while a CUDA graph is captured, while torch.compile traces, or where tensors
    have no data. What is not known then is taken from the device's properties, and not kept.
    """
    compiling = torch.compiler.is_compiling()
    name = str(dtype).removeprefix("torch.")
    return Machine(*_rates(device.type, device.index, name, not compiling, renew))


@constant_when_traced
def _rates(kind: str, index: int | None, dtype: str, allowed: bool, renew: bool) -> tuple[Any, ...]:
    device = torch.device(kind) if index is None else torch.device(kind, index)
    number = getattr(torch, dtype)
    with _lock:
        key = _key(device, dtype)
        machine = None if renew else _known.get(key) or _read(cache_file()).get(key)
        if machine is None and allowed and _may_measure(device):
            machine = _try_to_measure(device, number)
            if machine is not None:
                _write(cache_file(), key, machine)
                _log.info("measured %s: %s", key, machine)
        if machine is None:
            machine = _known.get(key) or _from_properties(device, number)
        else:
            _known[key] = machine
    return tuple(asdict(machine).values())


def _may_measure(device: torch.device) -> bool:
    # A mode may keep shapes alone, or count what is done.
    modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)()
    if device.type == "meta" or modes > 0:
        return False
    return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def cache_file() -> Path:
    """`TOMESD_CACHE`, or `tomesd` in the user's cache folder."""
    given = os.environ.get("TOMESD_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(given) if given else Path(base) / "tomesd") / "machine.json"


def _key(device: torch.device, dtype: str) -> str:
    """Everything that rates may depend on."""
    parts = [device.type, dtype, f"torch {torch.__version__}"]
    if device.type == "cuda":
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: None)()
        library = torch.version.hip or torch.version.cuda
        parts += [torch.cuda.get_device_name(device), f"driver {driver}", f"cuda {library}"]
        parts += [f"tf32 {torch.backends.cuda.matmul.allow_tf32}"] if dtype == "float32" else []
    elif device.type == "cpu":
        parts += [cpu_name(), f"threads {torch.get_num_threads()}"]
    return ", ".join(parts)


@functools.cache
def cpu_name() -> str:
    """The name that the processor gives itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model n"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _read(path: Path) -> dict[str, Machine]:
    """What is in the file; nothing if it is not there, or not what this version writes."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        names = {field.name for field in fields(Machine)}
        machines = {key: Machine(**rates) for key, rates in found.items() if rates.keys() == names}
        return {key: machine for key, machine in machines.items() if _is_sound(machine)}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _is_sound(machine: Machine) -> bool:
    rates = (machine.operations, machine.attention, machine.bytes, machine.launch)
    return all(isinstance(n, float) and 0 < n < math.inf for n in rates)


def _write(path: Path, key: str, machine: Machine) -> None:
    """Adds to the file. A folder that cannot be written to only means to measure again."""
    found = {k: asdict(m) for k, m in {**_read(path), key: machine}.items()}
    try:
        write_text(path, json.dumps(found, indent=2) + "\n")
    except OSError as error:
        _log.info("could not keep what was measured in %s: %s", path, error)


# Seconds that a kernel takes at least on a GPU.
_KERNEL = 2.5e-6
# How many times as long the host takes for a kernel in a model of diffusers as in a plain layer,
# which is not called through several others: 33 us instead of 12.6, for SDXL on an H200.
_MODEL_CODE = 2.6


def _try_to_measure(device: torch.device, dtype: torch.dtype) -> Machine | None:
    """Rates, or None where the device cannot do what is measured, or has no memory left for it."""
    try:
        with torch.autocast(device.type, enabled=False):
            return _measure(device, dtype)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        _log.info("could not measure %s: %s", device, error)
        return None


@torch.inference_mode()
def _measure(device: torch.device, dtype: torch.dtype) -> Machine:
    cpu = device.type == "cpu"
    # Large enough that a GPU takes longer for a kernel than the host to start it, and that memory
    # is not the cache; and layers of about the size that models have.
    rows, width, tokens, heads, numbers = (
        (1024, 640, 1024, 4, 2**22) if cpu else (8192, 2048, 4096, 16, 2**26)
    )
    x, weight = _numbers((rows, width), device, dtype), _numbers((width, width), device, dtype)
    matrix = _seconds(functools.partial(F.linear, x, weight), device)
    q = _numbers((1, heads, tokens, 64), device, dtype)
    attention = _seconds(functools.partial(F.scaled_dot_product_attention, q, q, q), device)
    source, target = torch.zeros(2, numbers, dtype=dtype, device=device)
    copy = _seconds(functools.partial(target.copy_, source), device)
    with torch.device("meta"):  # where no random numbers are drawn for the weights
        layers = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    layers.to(dtype).to_empty(device=device)
    for weight in layers.parameters():
        weight.zero_()
    few = _numbers((1, 8), device, dtype)
    layer = _seconds(functools.partial(layers, few), device, wait=cpu) / len(layers)
    return Machine(
        operations=2 * rows * width**2 / matrix,
        attention=4 * heads * 64 * tokens**2 / attention,
        bytes=2 * source.nbytes / copy,
        launch=layer if cpu else _MODEL_CODE * layer,
        kernel=0.0 if cpu else _KERNEL,
        apart=not cpu,
    )


def _numbers(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Between -1 and 1, no two neighbours alike; the state of random generators stays as it is."""
    places = torch.arange(math.prod(shape), dtype=torch.float32, device=device)
    return places.mul_(0.7).sin_().to(dtype).view(shape)


def _seconds(work: Callable[[], Any], device: torch.device, wait: bool = True) -> float:
    """Seconds of one call: the best of three rounds that take a hundredth of a second each.

    Args:
        wait: until the device is done; without, it is what the host takes.
    """
    best, calls, rounds = math.inf, 2, 0
    while rounds < 3:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        if wait:
            synchronize(device)
        taken = time.perf_counter() - start
        if taken < 0.01 and calls < 256:  # more would fill the queue of the device
            calls *= 2
            continue
        best, rounds = min(best, taken / calls), rounds + 1
    return best


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


# Dense half-precision Tflop/s of a multiprocessor, by compute capability. ROCm has numbers of its
# own, in which (9, 0) is no Hopper.
_TFLOPS = {
    **{(7, 0): 1.6, (7, 5): 0.9, (8, 0): 2.9, (8, 6): 0.9, (8, 9): 1.3},
    **{(9, 0): 7.5, (10, 0): 15.0, (12, 0): 1.2},
}
_ROCM_TFLOPS = {(9, 0): 1.7, (9, 4): 4.3}  # MI200, MI300


def _from_properties(device: torch.device, dtype: torch.dtype) -> Machine:
    """A guess, where nothing is known and nothing may be measured."""
    if device.type == "cpu":
        return Machine(1e11, 5e10, 2e10, 5e-6, apart=False)
    peak = 1e14
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        known = _TFLOPS if torch.version.hip is None else _ROCM_TFLOPS
        peak = known.get((gpu.major, gpu.minor), 1.0) * gpu.multi_processor_count * 1e12
    layers = 0.5 * peak if dtype.itemsize <= 2 else 0.5 * peak / 8
    # Memory moves a byte in the time of about 200 operations at the peak, in half precision.
    return Machine(layers, layers / 2, peak / 200, 3e-5, _KERNEL)
