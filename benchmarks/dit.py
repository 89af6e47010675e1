"""Speed of diffusion transformers: one call of the model, unpatched, merged, and at the bound.

    python benchmarks/dit.py [transformers attention time matching] [--only Flux] [--budget 280]

Architectures as published, with random weights: time does not depend on their values. All ways to
run a setting take turns in one process. Rows are added to dit.jsonl as they are measured, the most
important settings first. On a machine without git, --commit says what is measured.
"""

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import matching
import torch
from bound import apply_bound
from dit_settings import BLOCKS, BLOCKS_GRAPH, RATIOS, SETTINGS, Setting
from rows import RESULTS, timed
from torch import Tensor

import tomesd
from tomesd.bench import Effort, RowFile
from tomesd.bench.calls import Step
from tomesd.bench.contenders import FREE, OURS, UNPATCHED
from tomesd.bench.measure import Timing, attempt, free_memory, take_turns, time_calls, time_launches
from tomesd.bench.models import random_model, shared_copy
from tomesd.bench.modes import EAGER, GRAPH, Graph, raise_compile_limits, warm_up
from tomesd.bench.rows import Row
from tomesd.generation.memory import MemoryProbe
from tomesd.hosts import find_models
from tomesd.patch import patch_of
from tomesd.planning import make_plan
from tomesd.segments import cut_grid, plan_segments
from tomesd.selectors import bipartite, removable
from tomesd.state import Patch

SIDES = (32, 64, 128, 256, 512)
CHANNELS = (3072, 5120)
FRAMES = 16
"""Of videos with as many tokens as squares of these sides."""


@dataclass
class Ready:
    """A way to run the model, warm."""

    model: Any
    call: Callable[[], Any]
    row: Row


@torch.no_grad()
def measure(
    setting: Setting, mode: str, model: Any, effort: Effort, device: torch.device
) -> Iterator[Row]:
    """A row for each way to run the model."""
    options = [{"start": 0.0, "end": 1.0, **setting.options, "ratio": r} for r in RATIOS]
    contenders: list[tuple[str, dict[str, Any] | None]] = [(UNPATCHED, None)]
    contenders += [(kind, chosen) for chosen in options for kind in (OURS, FREE)]
    inputs, patched = setting.inputs(model), None
    ready: dict[int, Ready] = {}
    results: list[Row] = []
    for number, (kind, chosen) in enumerate(contenders):
        work = partial(prepare, setting, mode, model, inputs, kind, chosen, patched, device)
        outcome = attempt(work, device)
        failed = isinstance(outcome, str)
        results.append({"seconds": None, "error": outcome} if failed else outcome.row)
        if not failed:
            ready[number] = outcome
        if kind == OURS:
            patched = None if failed else outcome.model
    timings = attempt(partial(time_all, ready, setting.once, effort, device), device)
    for number, (kind, chosen) in enumerate(contenders):
        if number in ready:
            late = {"seconds": None, "error": timings} if isinstance(timings, str) else {}
            results[number] |= late or timings[number]
        yield {**identity(setting, mode, model, kind, chosen), **results[number]}


def identity(
    setting: Setting, mode: str, model: Any, kind: str, options: dict[str, Any] | None
) -> Row:
    label = {UNPATCHED: kind, OURS: "ratio", FREE: "bound"}[kind]
    return {
        **{"setting": setting.name, "model": setting.model, "what": "step"},
        **{"height": setting.height, "width": setting.width, "frames": setting.frames},
        **{"images": setting.images, "batch": setting.batch},
        **{"dtype": str(model.dtype).removeprefix("torch."), "attention": "default"},
        **{"mode": mode, "variant": kind, "settings": options},
        "label": label if options is None else f"{label} {options['ratio']:g}",
    }


def prepare(
    setting: Setting,
    mode: str,
    model: Any,
    inputs: dict[str, Any],
    kind: str,
    options: dict[str, Any] | None,
    patched: Any,
    device: torch.device,
) -> Ready:
    """
    Args:
        patched: a model with the same options, which the bound has to know.
    """
    probe, own = MemoryProbe(device), shared_copy(model)
    if kind == OURS:
        tomesd.apply_patch(own, **(options or {}))
    elif kind == FREE:
        if patched is None:
            raise RuntimeError("what this is the bound of could not run")
        apply_bound(own, patched)
    if mode in (BLOCKS, BLOCKS_GRAPH):
        raise_compile_limits()
        own.compile_repeated_blocks(fullgraph=True, dynamic=False)
    step, outputs = Step(own, inputs, found=find_models(own)[0]), []
    start = time.perf_counter()
    if not setting.once:
        warm_up(step, device, calls=1 if mode == EAGER else 2)
    row: Row = {"prepare_seconds": time.perf_counter() - start, "error": None}
    patch, plans = patch_of(own), []
    if patch is not None and mode == EAGER:
        patch.observer = lambda *found: plans.append(found)
    row["peak_mib"] = probe.peak_mib(lambda: outputs.append(step()))
    row["waits"] = count_waits(step, device) if mode == EAGER and not setting.once else None
    row["finite"] = _is_finite(outputs.pop())
    if patch is not None:
        patch.observer = None
        row["left_alone"] = not any(decision.merges for decision in patch.decisions)
        row |= plan_cost(patch, plans, model.dtype, device) if plans else {}
    captured = mode in (GRAPH, BLOCKS_GRAPH)
    return Ready(own, Graph(step, device) if captured else step, row)


def count_waits(call: Callable[[], Any], device: torch.device) -> int | None:
    """How often the host waits for the GPU in a call; None without a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in told)


def _is_finite(output: Any) -> bool:
    while not isinstance(output, Tensor):
        output = output[0]
    return bool(output.isfinite().all())


def plan_cost(patch: Patch, plans: list[Any], dtype: torch.dtype, device: torch.device) -> Row:
    """The plans of a call, and the seconds that one takes by itself.

    Args:
        plans: what the patch's observer was told.
    """
    scope, block, plan = plans[-1]
    [segments] = scope.decision.segments.values()
    x = torch.randn(*plan.slot.shape, patch.outline.levels[0].channels, device=device, dtype=dtype)
    call = partial(make_plan, scope, block, x, segments)
    call()
    return {
        "plans": len({id(plan) for _, _, plan in plans}),
        "tokens": plan.slot.shape[1],
        "tokens_left": plan.span.shape[1],
        "plan_seconds": time_calls(call, 5, device),
        "plan_host_seconds": time_launches(call, device),
    }


def time_all(
    ready: dict[int, Ready], once: bool, effort: Effort, device: torch.device
) -> dict[int, Row]:
    timers = {n: partial(time_calls, one.call, device=device) for n, one in ready.items()}
    if once:
        return {n: timed(Timing(1, [timer(1)])) for n, timer in timers.items()}
    timings = take_turns(timers, effort)
    return {
        n: {**timed(timings[n]), "host_seconds": time_launches(one.call, device)}
        for n, one in ready.items()
    }


@torch.no_grad()
def matching_rows(device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """Time and memory of one plan, of images and of videos with as many tokens."""
    for side in SIDES:
        for channels in CHANNELS:
            x = torch.randn(1, side * side, channels, device=device, dtype=dtype)
            for grid, st in (((1, side, side), 1), ((FRAMES, side // 4, side // 4), 2)):
                made = matching.measure(grid, x, {OURS: partial(make_volume_plan, st=st)})
                yield {
                    **{"setting": f"{'x'.join(map(str, grid))} tokens", "model": "random tokens"},
                    **{"what": "plan", "height": grid[1], "width": grid[2], "frames": grid[0]},
                    **{"images": 1, "batch": 1, "tokens": side * side, "channels": channels},
                    **{"dtype": str(dtype).removeprefix("torch."), "attention": "none"},
                    **{"mode": GRAPH if device.type == "cuda" else EAGER, "variant": OURS},
                    **{"label": f"{channels} channels", "settings": {"ratio": 0.5, "st": st}},
                    **made[OURS],
                }


def make_volume_plan(x: Tensor, grid: tuple[int, int, int], *, st: int) -> Any:
    settings = tomesd.Settings()
    remove = partial(removable, settings, ratio=0.5)
    parts = cut_grid(grid, settings.sy, settings.sx, st, settings.search, remove)
    return plan_segments(x, parts, lambda x, cells, remove, _: bipartite(x, cells, remove))


class Models:
    """Builds each model once, and keeps those that are needed again."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device, self._dtype = device, dtype
        self._built: dict[str, Any] = {}

    def get(self, setting: Setting, coming: list[Setting]) -> Any:
        names = {one.model for one in coming}
        self._built = {name: model for name, model in self._built.items() if name in names}
        free_memory(self._device)
        if setting.model not in self._built:
            cls = getattr(diffusers, setting.kind)
            model = random_model(cls, setting.config, self._device, self._dtype, 0)
            self._built[setting.model] = model
        return self._built[setting.model]


def section_rows(name: str, args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "matching":
        yield from matching_rows(device, dtype)
        return
    effort = Effort(seconds=args.seconds, min_repeats=3, sample_seconds=min(0.1, args.seconds))
    settings = [one for one in SETTINGS[name] if args.only in one.name]
    models = Models(device, dtype)
    for place, setting in enumerate(settings):
        for mode in (mode for mode in setting.modes if args.mode in ("", mode)):
            if time.perf_counter() - args.start > args.budget:
                print(f"{setting.name}, {mode}: no time left", flush=True)
                continue
            model = attempt(partial(models.get, setting, settings[place:]), device)
            if isinstance(model, str):
                print(f"{setting.name}: {model}", flush=True)
                continue
            yield from measure(setting, mode, model, effort, device)
            torch._dynamo.reset()
            free_memory(device)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sections = (*SETTINGS, "matching")
    parser.add_argument("sections", nargs="*", default=["transformers"], metavar="SECTION")
    parser.add_argument("--only", default="", help="of the settings, those with this in their name")
    parser.add_argument("--mode", default="", help="of the modes, this one")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing per setting")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds until nothing begins")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    args = parser.parse_args(arguments)
    if wrong := set(args.sections) - set(sections):
        parser.error(f"no section {wrong.pop()!r}: must be one of {', '.join(sections)}")
    args.start = time.perf_counter()
    if args.commit:
        os.environ["TOMESD_COMMIT"] = args.commit
    device = torch.device(args.device)
    file = RowFile(args.out / "dit.jsonl", device)
    for name in args.sections:
        for row in section_rows(name, args, device):
            section = name if name == "transformers" else f"transformers-{name}"
            file.add({"section": section, **row})
            print(line(row), f"[{time.perf_counter() - args.start:.0f} s]", flush=True)


def line(row: Row) -> str:
    told = row["error"] or f"{row['seconds'] * 1e3:.2f} ms"
    if row.get("host_seconds") is not None:
        told += f", host {row['host_seconds'] * 1e3:.2f} ms"
    return f"{row['setting']}, {row['mode']}, {row['label']}: {told}"


if __name__ == "__main__":
    main()
