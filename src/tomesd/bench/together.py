"""Makes calls ready to be timed, and lets them take turns."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ..generation.memory import MemoryProbe
from ..patch import patch_of
from .calls import Call
from .measure import Effort, attempt, free_memory, is_finite, take_turns, time_calls, time_launches
from .modes import EAGER, GRAPH, Graph, warm_up
from .rows import OUT_OF_MEMORY, Row

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(eq=False)
class Prepared:
    """A contender that is ready to be timed: patched, compiled or captured, and warm."""

    call: Call
    device: torch.device
    peak_mib: float | None
    """None on a CPU."""
    pool_mib: float | None = None
    """Of a CUDA graph: the memory that it keeps for itself."""
    finite: bool = True
    """Whether what the call returned is a number everywhere."""
    left_alone: bool | None = None
    """In eager mode: whether no layer was merged, because that would not be faster."""
    launches: bool = True
    """Whether its row tells what the host takes for a call."""
    more: Row = field(default_factory=dict)
    """What else its row says."""

    @torch.no_grad()
    def time(self, calls: int) -> float:
        return time_calls(self.call, calls, self.device)

    @torch.no_grad()
    def time_launches(self) -> float | None:
        return time_launches(self.call, self.device)

    def row(self) -> Row:
        """All but how long a call takes."""
        names = ("peak_mib", "pool_mib", "finite", "left_alone")
        known = {name: getattr(self, name) for name in names}
        host_seconds = self.time_launches() if self.launches else None
        return {**known, "host_seconds": host_seconds, **self.more, "error": None}


@torch.no_grad()
def make_ready(
    call: Any,
    model: nn.Module,
    mode: str,
    probe: MemoryProbe,
    device: torch.device,
    *,
    captured: bool,
    warm: bool = True,
) -> Prepared:
    """Warms up a call of a model, looks at what it does, and captures it if asked to.

    Args:
        probe: made before the model was patched.
        warm: whether the model may be called for nothing but to warm up.
    """
    if warm:
        warm_up(call, device, calls=1 if mode in (EAGER, GRAPH) else 2)
    outputs: list[Any] = []
    prepared = Prepared(call, device, probe.peak_mib(lambda: outputs.append(call())))
    patch = patch_of(model)
    if mode == EAGER and patch is not None:
        merged = any(decision.merges for decision in patch.decisions)
        prepared.left_alone = not merged and any(d.left_alone for d in patch.decisions)
    if captured:
        graph = Graph(call, device)
        prepared.call, prepared.pool_mib = graph, graph.pool_mib
        outputs = [graph()]
    prepared.finite = is_finite(outputs[-1])
    return prepared


def measure_together(
    makers: Mapping[_Key, Callable[[], Prepared]],
    device: torch.device,
    effort: Effort,
    *,
    periods: Mapping[_Key, int] | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
    on_first: Callable[[float], None] | None = None,
) -> dict[_Key, Row]:
    """Makes all ready, then lets them take turns. What fails is a result like any other.

    Args:
        periods: as in `take_turns`.
        on_progress: called with the share that is done, 0 to 1.
        on_first: called with the seconds of one call of the first.
    """
    results: dict[_Key, Row] = {}
    waiting = deque(makers)
    while waiting:
        ready: dict[_Key, Prepared] = {}
        while waiting:
            outcome = attempt(makers[waiting[0]], device)
            if outcome == OUT_OF_MEMORY and ready:
                break  # maybe only for what the others keep: again, when they are gone
            key = waiting.popleft()
            if isinstance(outcome, Prepared):
                if on_first is not None and not results and not ready:
                    on_first(outcome.time(1))
                ready[key] = outcome
            else:
                results[key] = {"seconds": None, "error": outcome}
            del outcome
            on_progress((len(ready) + len(results)) / len(makers) / 2)
        found = attempt(partial(_time, ready, effort, periods, on_progress), device)
        failed = {"seconds": None, "error": found}
        results |= dict.fromkeys(ready, failed) if isinstance(found, str) else found
        ready.clear()
        free_memory(device)
    return results


def _time(
    ready: dict[_Key, Prepared],
    effort: Effort,
    periods: Mapping[_Key, int] | None,
    on_progress: Callable[[float], None],
) -> dict[_Key, Row]:
    timers = {key: one.time for key, one in ready.items()}
    timings = take_turns(
        timers, effort, periods=periods, on_repeat=lambda share: on_progress(0.5 + share / 2)
    )
    return {key: {**timings[key].row(), **one.row()} for key, one in ready.items()}
