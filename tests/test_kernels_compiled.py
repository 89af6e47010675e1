"""What a compiled model launches, found without a GPU.

PyTorch's compiler writes its code on a CPU as it does for a GPU, with Triton told of a GPU that is
not there; only the launches cannot be carried out, and are recorded instead. Triton must not
interpret its kernels for that, so that all of this runs in a process of its own: this file, as a
script, prints what the tests compare.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tomesd import kernels
from tomesd.kernels import Cells, Clock, Draw, Request
from tomesd.plan import MergePlan

CPU = torch.device("cpu")
SMALL = ["_best_in_window", "_choose", "_list_window"]
LARGE = ["_inverse_norm", "_best_match", "_choose", "_list_members"]
CASES = {  # grid, window, tokens to remove, channels, whether the plan is kept over calls
    "odd grid": (17, 19, 0, 40, 80, False),
    "large, kept": (16, 16, 0, 128, 32, True),
    "odd window": (9, 11, 0, 40, 80, False),
    "small, kept": (16, 16, 8, 128, 32, True),
    "all of each cell, kept": (16, 16, 2, 192, 32, True),
}
MATCHING = {"odd grid": LARGE, "large, kept": LARGE, "odd window": SMALL, "small, kept": SMALL}
MATCHING["all of each cell, kept"] = ["_list_window"]
MODELS = [("steps", False), ("block", True)]
KINDS = {  # of GPUs: Triton's name, threads of a warp, dtype, KiB that a program can have
    "Turing": ("cuda", 75, 32, torch.float16, 64),
    "RTX 50": ("cuda", 120, 32, torch.float32, 99),
    "RDNA 3": ("hip", "gfx1100", 32, torch.float16, 64),
    "MI300": ("hip", "gfx942", 64, torch.float32, 64),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_program_launches_what_eager_mode_launches(found: Any, case: str) -> None:
    """The same kernels, programs, numbers, blocks and warps, in the same order."""
    compiled, eager = found["operators"][case]["compiled"], found["operators"][case]["eager"]
    expected = (["_tick"] if "kept" in case else []) + MATCHING[case] + ["_slot_mean"]
    assert [launch["kernel"] for launch in compiled] == expected
    assert compiled == eager


@pytest.mark.parametrize("case", CASES)
def test_besides_the_launches_there_is_one_fused_kernel(found: Any, case: str) -> None:
    """Putting tokens back is fused with the layer before, and nothing is copied for the kernels."""
    code = found["operators"][case]["code"]
    assert "tomesd" not in re.sub(r"#.*", "", code)  # but in paths of files
    assert len(re.findall(r"^\s+cpp_fused\w*\(", code, re.MULTILINE)) == 1
    assert "aten." not in code


def test_a_gradient_comes_back_through_the_compiled_mean(found: Any) -> None:
    forward, backward = found["gradient"]
    assert forward.count("= torch.ops.higher_order.triton_kernel_wrapper_functional(") == 1
    assert "aten.gather" in backward and "aten.div" in backward
    assert "tomesd" not in re.sub(r"#.*", "", forward + backward)


@pytest.mark.parametrize(("share", "dynamic"), MODELS)
def test_a_whole_model_is_one_graph_without_opaque_operators(
    found: Any, share: str, dynamic: bool
) -> None:
    graphs = found["models"][f"{share}_{dynamic}"]
    assert len(graphs) == 1
    assert not [target for target in graphs[0] if target.startswith("tomesd")]
    launches = graphs[0].count("triton_kernel_wrapper_functional")
    blocks = 2
    matching = {"block": blocks * len(SMALL), "steps": len([*SMALL, "_tick"])}
    assert launches == matching[share] + blocks


@pytest.mark.parametrize("case", CASES)
def test_pytorch_knows_that_inputs_are_not_written_to(found: Any, case: str) -> None:
    """A model that writes to its inputs is not replayed from CUDA graphs."""
    written = {name for names in found["written"][case].values() for name in names}
    assert {"slot", "order", "span"} <= written
    assert not written & {"x", "timestep"}


def test_pytorch_knows_which_kernels_its_cached_code_was_made_from(found: Any) -> None:
    assert sorted(found["known"]["match_tokens_triton"]) == sorted({*SMALL, *LARGE, "_tick"})
    assert found["known"]["slot_mean_triton"] == ["_slot_mean"]


def test_a_timestep_may_be_anywhere_in_the_list_of_a_sampler(found: Any) -> None:
    """Every other one is not aligned: kernels that were compiled for both would be at step 2."""
    assert set(found["aligned_only"]) == {*SMALL, *LARGE, "_tick"} - {"_choose", "_inverse_norm"}
    assert not any(found["aligned_only"].values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_fits_every_kind_of_gpu(found: Any, kind: str) -> None:
    """Triton compiles it, and a program does not need more memory than it can have."""
    memory = found["memory"][kind]
    assert set(memory) == {"_best_in_window", "_best_match"}
    assert max(memory.values()) <= KINDS[kind][-1] * 1024


# From here on: what the script does.


class _GPUThatIsNotThere:
    """What Triton asks for when it translates a kernel."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_benchmarker(self) -> None: ...


def _launch(kernel: Any, grid: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    numbers = {
        name: value for name, value in arguments.items() if isinstance(value, (int, float, str))
    }
    return {"kernel": kernel.__name__, "grid": [*grid, 1, 1][:3], "numbers": numbers}


def _recorder(launches: list[Any]) -> Callable[[Any], Any]:
    """Stands around kernels, as `wrap_triton` does."""

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def record(*args: Any, **named: Any) -> None:
                arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | named
                launches.append(_launch(self.kernel, grid, arguments))

            return record

    return Recorded


def _run_operators(
    h: int, w: int, window: int, remove: int, channels: int, keep: bool
) -> dict[str, Any]:
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import run_and_get_code

    from tomesd.kernels import triton_choosing, triton_matching, triton_merging, triton_search

    cells = Cells.of(h, w, 2, 2, window)
    plan = MergePlan.empty(2, h * w, h * w - remove, CPU, triton=True)
    plan.slot.zero_()
    clock = Clock(torch.full((3,), float("-inf")), 3) if keep else None
    x, time = torch.randn(2, h * w, channels), torch.tensor([500.0])
    compiled: list[Any] = []

    class Loaded:
        """A kernel in the code that the compiler wrote."""

        def __init__(self, name: str, source: str, device_str: str) -> None:
            modules = (triton_matching, triton_merging, triton_choosing, triton_search)
            self.kernel = next(getattr(m, name) for m in modules if hasattr(m, name))
            self.source = source

        def run(self, *args: Any, stream: Any) -> None:
            passed = [p.name for p in self.kernel.params if not p.is_constexpr]
            arguments = dict(zip(passed, args, strict=False))
            for name in ("flag", "chosen"):
                if not isinstance(arguments.get(name), torch.Tensor):
                    arguments.pop(name, None)  # None, which comes as a number
            fixed = [p.name for p in self.kernel.params if p.is_constexpr]
            options = re.sub("'signature': {.*?}", "", self.source)
            for name in [*fixed, "num_warps", "num_stages"]:
                value = re.search(rf"'{name}': ('\w+'|\d+)", options)
                if value:
                    arguments[name] = eval(value[1])
            compiled.append(_launch(self.kernel, args[len(passed) :], arguments))

    def request(time: torch.Tensor) -> Request:
        return Request(cells, remove, Draw(time, 5), clock)

    def merge_and_restore(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        kernels.match_tokens(x, request(time), plan.lists, triton=True)
        merged = plan.merge(x)
        return plan.restore(x, torch.sin(merged), merged)

    AsyncCompile.triton = lambda compiler, *kernel, **where: Loaded(*kernel, **where)
    AsyncCompile.cpp_pybinding = lambda *_: lambda *_: None  # takes long, and is not looked at
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(merge_and_restore, fullgraph=True), x, time)
    eager: list[Any] = []
    recorder = _recorder(eager)
    triton_matching.match_tokens(x, request(time), plan.lists, recorder)
    triton_merging.slot_mean(x, plan.lists, wrap_triton=recorder)
    return {"compiled": compiled, "eager": eager, "code": code.split("def call(")[1]}


def _written_to(
    h: int, w: int, window: int, remove: int, channels: int, keep: bool
) -> dict[str, list[str]]:
    """By kernel, the arguments that PyTorch believes it writes to."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    cells, n = Cells.of(h, w, 2, 2, window), h * w
    plan = MergePlan.empty(2, n, n - remove, CPU, triton=True)
    clock = Clock(torch.full((3,), float("-inf")), 3) if keep else None

    def match(x: torch.Tensor, time: torch.Tensor) -> None:
        request = Request(cells, remove, Draw(time, 5), clock)
        kernels.match_tokens(x, request, plan.lists, triton=True)

    (graph,) = _capture(match, False, torch.randn(2, n, channels), torch.tensor([500.0]))
    launches = [node.kwargs for node in graph.graph.nodes if "kernel_idx" in node.kwargs]
    kernels_launched = [kernel_side_table.get_kernel(one["kernel_idx"]) for one in launches]
    return {
        kernel.fn.__name__: launch["tensors_to_clone"]
        for kernel, launch in zip(kernels_launched, launches, strict=True)
    }


def _memory_needed(
    backend: str, name: Any, warp: int, dtype: torch.dtype, _: int
) -> dict[str, int]:
    """By kernel of the search, the bytes that a program of such a GPU takes."""
    from unittest import mock

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tomesd.kernels import triton_matching

    found: dict[str, int] = {}
    types = {torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}

    class Compiled:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return self.compile if self.kernel.__name__.startswith("_best") else lambda *_, **__: 0

        def compile(self, num_warps: int, num_stages: int, **arguments: Any) -> None:
            constants = {p.name: arguments[p.name] for p in self.kernel.params if p.is_constexpr}
            constants |= {name: None for name, value in arguments.items() if value is None}
            signature = {
                name: "constexpr"
                if name in constants
                else f"*{types[arguments[name].dtype]}"
                if isinstance(arguments[name], torch.Tensor)
                else "i32"
                for name in self.kernel.arg_names
            }
            made = triton.compile(
                ASTSource(self.kernel, signature, constants),
                target=GPUTarget(backend, name, warp),
                options={"num_warps": num_warps, "num_stages": num_stages},
            )
            found[self.kernel.__name__] = made.metadata.shared

    with mock.patch.object(torch.version, "hip", "6.2" if backend == "hip" else None):
        for window in (8, 0):
            cells, plan = Cells.of(32, 32, 2, 2, window), MergePlan.identity(1, 1024, CPU)
            x = torch.zeros(1, 1024, 64, dtype=dtype)
            triton_matching.match_tokens(x, Request(cells, 512, Draw()), plan.lists, Compiled)
    return found


def _zeros_like(node: Any) -> Any:
    value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
    if not isinstance(value, torch.Tensor):
        return value if value is None else int(value)
    return torch.zeros([int(n) for n in value.shape], dtype=value.dtype)


def _capture(function: Any, dynamic: bool, *args: Any, **named: Any) -> list[Any]:
    """The graphs that PyTorch makes of a call and its gradient."""
    from torch._functorch.aot_autograd import aot_module_simplified

    graphs = []

    def collect(graph: Any, _: Any) -> Callable[..., list[Any]]:
        graphs.append(graph)
        outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        return lambda *_: [_zeros_like(node) for node in outputs]

    def backend(graph: Any, inputs: Any) -> Any:
        return aot_module_simplified(graph, inputs, fw_compiler=collect)

    torch._dynamo.reset()
    out = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args, **named)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        out.sum().backward()
    return graphs


def _run_gradient() -> list[str]:
    plan = MergePlan.empty(2, 64, 32, CPU, triton=True)
    x = torch.randn(2, 64, 16, requires_grad=True)
    return [graph.print_readable(False) for graph in _capture(plan.merge, False, x)]


def _run_model(share: str, dynamic: bool) -> list[list[str]]:
    from zoo_diffusers import HOSTS, make_unet

    import tomesd

    options: dict[str, Any] = {"share": share, "when": "always", "backend": "triton"}
    two_blocks = make_unet(
        block_out_channels=(32,),
        layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D",),
        mid_block_type=None,
        up_block_types=("UpBlock2D",),
    )
    model = tomesd.apply_patch(two_blocks, 0.5, **options)
    inputs = HOSTS["sd1"].inputs(16, 16, 2, 0, 500)
    with torch.no_grad():
        graphs = _capture(model, dynamic, **inputs)
    return [[str(n.target) for n in g.graph.nodes if n.op == "call_function"] for g in graphs]


def main() -> None:
    import triton
    from torch._dynamo.device_interface import CpuInterface
    from torch._inductor.runtime.hints import DeviceProperties

    triton.runtime.driver.set_active(_GPUThatIsNotThere())
    torch._inductor.config.force_disable_caches = True
    # A CPU in the place of a GPU.
    CpuInterface.raise_if_triton_unavailable = lambda *_: None
    gpu = DeviceProperties("cuda", 0, multi_processor_count=132, cc=90, warp_size=32)
    DeviceProperties.create = lambda *_: gpu
    kernels.use_triton = lambda backend, x: backend == "triton"
    kernels._is_launched_by_compiler = lambda x: kernels._define_triton_operators()
    found: dict[str, Any] = {
        "operators": {name: _run_operators(*case) for name, case in CASES.items()},
        "written": {name: _written_to(*case) for name, case in CASES.items()},
        "memory": {kind: _memory_needed(*what) for kind, what in KINDS.items()},
        "gradient": _run_gradient(),
        "models": {f"{share}_{dynamic}": _run_model(share, dynamic) for share, dynamic in MODELS},
    }
    from torch._library.triton import get_triton_kernels_for_op

    known = {
        name: get_triton_kernels_for_op(f"tomesd::{name}")
        for name in ("match_tokens_triton", "slot_mean_triton")
    }
    found["known"] = {name: [one.__name__ for one in made] for name, made in known.items()}
    found["aligned_only"] = {
        kernel.__name__: not parameter.do_not_specialize_on_alignment
        for kernel in known["match_tokens_triton"]
        for parameter in kernel.params
        if parameter.name == "timestep"
    }
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
