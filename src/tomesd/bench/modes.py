"""How a model runs: eagerly, compiled, or replayed as a CUDA graph."""

from types import SimpleNamespace
from typing import Any, Protocol, get_args

import torch
from torch import nn

from ..choices import Mode
from ..machine import synchronize
from .calls import Call

MODES: tuple[str, ...] = get_args(Mode)
EAGER, GRAPH = "eager", "graph"
_COMPILE: dict[str, dict[str, Any]] = {
    "compile": {},
    "compile-reduce-overhead": {"mode": "reduce-overhead"},
    # As max-autotune, but without coordinate descent, which takes most of its time.
    "compile-autotune": {"options": {"max_autotune": True, "triton.cudagraphs": True}},
    "compile-max-autotune": {"mode": "max-autotune"},
    "compile-max-autotune-no-cudagraphs": {"mode": "max-autotune-no-cudagraphs"},
}


def raise_compile_limits() -> None:
    """Lets all contenders compile the same code, once each: torch would stop at its limits."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 128)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 512)


def compile_model(model: nn.Module, mode: str, fullgraph: bool) -> None:
    """Has `model` compiled in one of the compile modes when it is first called."""
    raise_compile_limits()
    model.compile(**_COMPILE[mode], fullgraph=fullgraph, dynamic=False)


def warm_up(call: Call, device: torch.device, calls: int) -> None:
    """Lets happen what happens only once: loading and tuning kernels, compiling."""
    for _ in range(calls):
        call()
    synchronize(device)


class Capturable(Protocol):
    """Something to do again and again, where all that changes in between is done by `advance`."""

    def advance(self) -> None: ...

    def run(self) -> Any: ...


class Graph:
    """A step captured into a CUDA graph. Calling it replays the graph at the next timestep."""

    def __init__(self, step: Capturable, device: torch.device):
        self._step = step  # whatever the graph reads has to stay where it is
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # on a stream of its own, as in capture
                step.advance()
                step.run()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = step.run()
        self.pool_mib = (torch.cuda.memory_reserved(device) - reserved) / 2**20

    def __call__(self) -> Any:
        self._step.advance()
        self._graph.replay()
        return self._output


def replayed(call: Call, device: torch.device) -> Call:
    """A CUDA graph of a call, where there is a GPU; what it reads may be overwritten in place."""
    if device.type != "cuda":
        return call
    return Graph(SimpleNamespace(run=call, advance=lambda: None), device)
