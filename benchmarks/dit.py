"""Speed of diffusion transformers: one call of the model, unpatched, merged, and at the bound.

    python benchmarks/dit.py [transformers attention images time matching] [--only Flux]

Architectures as published, with random weights: time does not depend on their values. Each way to
run a setting takes turns with the unpatched model, and its row is added to dit.jsonl as soon as it
is measured, those of the most important settings first: a run that is cut short, or that --budget
ends, loses nothing. On a machine without git, --commit says what is measured.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import diffusers
import torch
from bound import apply_bound
from common import Arguments
from dit_settings import BLOCKS, BLOCKS_GRAPH, RATIOS, SETTINGS, Setting
from torch import nn

import tomesd
from tomesd import Settings
from tomesd.bench import Effort, RowFile
from tomesd.bench.calls import Step
from tomesd.bench.contenders import FREE, OURS, UNPATCHED
from tomesd.bench.measure import attempt, free_memory, time_calls, time_launches
from tomesd.bench.models import random_model, shared_copy
from tomesd.bench.modes import EAGER, GRAPH, raise_compile_limits, replayed
from tomesd.bench.rows import Row
from tomesd.bench.tables import milliseconds
from tomesd.bench.together import Prepared, make_ready, measure_together
from tomesd.generation.memory import MemoryProbe
from tomesd.hosts import find_models
from tomesd.patch import patch_of
from tomesd.planning import make_plan
from tomesd.presets import PRESETS
from tomesd.segments import cut_grid, plan_segments
from tomesd.selectors import bipartite, removable

NO_TIME = "no time left"
SIDES, CHANNELS, FRAMES = (32, 64, 128, 256, 512), (3072, 5120), 16
"""Of plans that are measured alone: squares of tokens, and videos with as many."""


def ways_to_run(setting: Setting) -> dict[str, tuple[str, dict[str, Any] | None]]:
    """By label, the kind of each way and the arguments of `apply_patch`."""
    ways: dict[str, tuple[str, dict[str, Any] | None]] = {UNPATCHED: (UNPATCHED, None)}
    if setting.steps:
        presets = PRESETS["transformer"].items()
        return ways | {f"preset {name}": (OURS, options) for name, options in presets}
    for ratio in RATIOS:
        options = {"start": 0.0, "end": 1.0, **setting.options, "ratio": ratio}
        ways |= {f"ratio {ratio:g}": (OURS, options), f"bound {ratio:g}": (FREE, options)}
    return ways


class Runner:
    """Makes the ways ready to run a setting in a mode."""

    def __init__(self, setting: Setting, mode: str, model: Any):
        self.setting, self.mode, self.model = setting, mode, model
        self.inputs = setting.inputs(model)
        self.patched: Any = None
        """The last model that was patched, which the bound has to know."""
        self.unpatched: Prepared | None = None
        """What the others take turns with."""

    def rows(self, effort: Effort, has_time: Callable[[], bool]) -> Iterator[Row]:
        """A row for each way to run the model, while there is time to begin another."""
        ways = ways_to_run(self.setting)
        effort = replace(effort, seconds=effort.seconds / len(ways))
        for label, (kind, options) in ways.items():
            if not has_time():
                print(f"{self.setting.name}, {self.mode}, {label}: {NO_TIME}", flush=True)
                return
            makers = {label: partial(self.prepare, kind, options)}
            if self.unpatched is not None:
                makers[UNPATCHED] = partial(replace, self.unpatched, launches=False)
            measured = measure_together(makers, self.model.device, effort)
            found = measured.pop(label)
            if measured:
                found["unpatched_seconds"] = measured[UNPATCHED]["seconds"]
            names = {"mode": self.mode, "variant": kind, "label": label, "settings": options}
            dtype = str(self.model.dtype).removeprefix("torch.")
            yield {**self.setting.row(), "dtype": dtype, **names, **found}

    def prepare(self, kind: str, options: dict[str, Any] | None) -> Prepared:
        device, once = self.model.device, self.setting.once
        probe, own, start = MemoryProbe(device), shared_copy(self.model), time.perf_counter()
        if self.mode in (BLOCKS, BLOCKS_GRAPH):
            compile_blocks(own)
        if kind == OURS:
            self.patched = None
            tomesd.apply_patch(own, **(options or {}))
        elif kind == FREE:
            if self.patched is None:
                raise RuntimeError("what this is the bound of could not run")
            apply_bound(own, self.patched)
        step: Any = Step(own, self.inputs, found=find_models(own)[0])
        if self.setting.steps:
            step = whole_image(step, self.setting.steps)
        captured = self.mode in (GRAPH, BLOCKS_GRAPH)
        ready = make_ready(step, own, self.mode, probe, device, captured=captured, warm=not once)
        ready.launches = not once
        ready.more = {"prepare_seconds": time.perf_counter() - start}
        if self.mode == EAGER and not once:
            ready.more |= {"waits": count_waits(step, device), **plan_cost(step, own)}
        if kind == OURS:
            self.patched = own
        elif kind == UNPATCHED and not once:
            self.unpatched = ready
        return ready


def compile_blocks(model: nn.Module) -> None:
    """As `compile_repeated_blocks` does, which not all models have."""
    raise_compile_limits()
    for blocks in model.children():
        for block in blocks if isinstance(blocks, nn.ModuleList) else ():
            block.compile(fullgraph=True, dynamic=False)


def whole_image(step: Step, steps: int) -> Callable[[], Any]:
    """All calls of an image, at noise levels shifted by 3 as flow models have them."""
    left = torch.linspace(1, 1 / steps, steps)
    step.timesteps = (3 * left / (1 + 2 * left)).to(step.timesteps) * step.timesteps.max()
    return lambda: [step() for _ in range(steps)][-1]


def count_waits(call: Callable[[], Any], device: torch.device) -> int | None:
    """How often the host waits for a GPU in a call."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in told)


def plan_cost(call: Callable[[], Any], model: Any) -> Row:
    """The plans that a patched model makes in a call, and the seconds of one by itself."""
    patch, plans = patch_of(model), []
    if patch is None:
        return {}
    patch.observer = lambda *found: plans.append(found)
    call()
    patch.observer = None
    if not plans:
        return {}
    scope, block, plan = plans[-1]
    [segments] = scope.decision.segments.values()
    shape = (*plan.slot.shape, patch.outline.levels[0].channels)
    x = torch.randn(shape, device=model.device, dtype=model.dtype)
    make = partial(make_plan, scope, block, x, segments)
    make()
    return {
        "plans": len({id(plan) for _, _, plan in plans}),
        "tokens": plan.slot.shape[1],
        "tokens_left": plan.span.shape[1],
        "plan_seconds": time_calls(make, 5, model.device),
        "plan_host_seconds": time_launches(make, model.device),
    }


def model_rows(name: str, args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Calls of the models in a section."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    several = Effort(seconds=args.seconds, min_repeats=3, sample_seconds=min(0.1, args.seconds))
    once = Effort(seconds=0, min_repeats=1, max_repeats=1)
    settings = [one for one in SETTINGS[name] if args.only in one.name]
    chosen = [(one, mode) for one in settings for mode in one.modes if args.mode in ("", mode)]

    def has_time() -> bool:
        return bool(args.spent() < args.budget)

    for setting, mode in chosen:
        cls = getattr(diffusers, setting.kind)
        make = partial(random_model, cls, setting.config, device, dtype, seed=0)
        model = attempt(make, device) if has_time() else NO_TIME
        if isinstance(model, str):
            print(f"{setting.name}, {mode}: {model}", flush=True)
            continue
        yield from Runner(setting, mode, model).rows(once if setting.once else several, has_time)
        torch._dynamo.reset()
        del model
        free_memory(device)


def plan_rows(device: torch.device) -> Iterator[Row]:
    """Plans alone, of random tokens; on a GPU, replayed as CUDA graphs."""
    cuda, ratio = device.type == "cuda", RATIOS[0]
    dtype = torch.bfloat16 if cuda else torch.float32
    settings = Settings(ratio=ratio)
    remove = partial(removable, settings, ratio=ratio)
    effort = Effort(seconds=0.5, min_repeats=3, sample_seconds=0.02)
    for side, channels, frames in product(SIDES, CHANNELS, (1, FRAMES)):
        grid, st = ((1, side, side), 1) if frames == 1 else ((frames, side // 4, side // 4), 2)
        parts = cut_grid(grid, settings.sy, settings.sx, st, settings.search, remove)
        x = torch.randn(1, side * side, channels, device=device, dtype=dtype)
        make = partial(plan_segments, x, parts, lambda x, cells, n, _: bipartite(x, cells, n))
        label = f"{channels} channels"
        yield {
            **{"model": "random tokens", "what": "plan", "attention": "none"},
            "setting": f"{'x'.join(map(str, grid[frames == 1 :]))} tokens",
            **{"frames": frames, "height": grid[1], "width": grid[2], "images": 1, "batch": 1},
            **{"tokens": x.shape[1], "channels": channels},
            "dtype": str(dtype).removeprefix("torch."),
            **{"mode": GRAPH if cuda else EAGER, "variant": OURS, "label": label},
            **{"settings": {"ratio": ratio, "st": st}},
            **measure_together({label: partial(prepare_plan, make, device)}, device, effort)[label],
        }


def prepare_plan(make: Callable[[], Any], device: torch.device) -> Prepared:
    make()
    peak = MemoryProbe(device).peak_mib(make)
    return Prepared(replayed(make, device), device, peak)


def main(arguments: list[str] | None = None) -> None:
    parser = Arguments(__doc__, device="cuda", seconds=8.0)
    sections = (*SETTINGS, "matching")
    parser.add_argument("sections", nargs="*", default=["transformers"], metavar="SECTION")
    parser.add_argument("--mode", default="", help="of the modes, this one")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds, then no way is begun")
    args = parser.read(arguments)
    if wrong := set(args.sections) - set(sections):
        parser.error(f"no section {wrong.pop()!r}: must be one of {', '.join(sections)}")
    device = torch.device(args.device)
    file = RowFile(args.out / "dit.jsonl", device)
    for name in args.sections:
        section = name if name == "transformers" else f"transformers-{name}"
        rows = plan_rows(device) if name == "matching" else model_rows(name, args, device)
        for row in rows:
            file.add({**row, "section": section})
            told = row["error"] or f"{milliseconds(row['seconds'])} ms"
            print(
                f"{args.spent():4.0f} s  {row['setting']}, {row['mode']}, {row['label']}: {told}",
                flush=True,
            )


if __name__ == "__main__":
    main()
