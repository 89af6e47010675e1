"""The package as users install it."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from zoo_diffusers import make_sd_pipeline

ROOT = Path(__file__).parent.parent


def test_torch_is_the_only_requirement() -> None:
    requirements = [r for r in metadata.requires("tomesd") or [] if "extra ==" not in r]
    assert [re.split(r"[<>=!~ ]", r)[0] for r in requirements] == ["torch"]


def test_an_installed_copy_works_with_nothing_but_torch(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(tmp_path), str(ROOT)], check=True)
    program = f"""
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {{"diffusers", "transformers", "accelerate", "peft", "triton"}}:
            raise ImportError(name + " is not installed")
sys.meta_path.insert(0, Block())
sys.path.insert(0, {str(tmp_path)!r})
import tomesd, torch
assert tomesd.__file__.startswith({str(tmp_path)!r}), tomesd.__file__
merge, unmerge = tomesd.merge.bipartite_soft_matching_random2d(
    torch.randn(2, 16, 4), 4, 4, 2, 2, 8, no_rand=True
)
assert unmerge(merge(torch.ones(2, 16, 4))).shape == (2, 16, 4)
try:
    tomesd.apply_patch(torch.nn.Linear(2, 2))
except tomesd.UnsupportedModelError as error:
    print("refused:", error)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "Supported: Diffusers" in out.stdout


def test_the_diffusers_example_runs(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_sd_pipeline().save_pretrained(model)
    script = ROOT / "examples" / "diffusers_txt2img.py"
    out = subprocess.run(
        [sys.executable, str(script), str(model), "a cat"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    assert "merged at ratio 0.5" in out.stdout
    images = [(tmp_path / f"ratio_{ratio}.png").read_bytes() for ratio in (0.0, 0.5)]
    assert images[0] != images[1]


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 30
