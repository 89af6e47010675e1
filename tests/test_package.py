"""The package as users install it."""

import ast
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
import zoo_ldm
from omegaconf import OmegaConf
from PIL import Image
from torch import nn
from zoo_diffusers import make_sd_pipeline

import tomesd

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution of this tree, built offline."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def build(tree: Path, folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder), *options]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as archive:
        names = set(archive.namelist())
        (about,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        points = archive.read(f"{about}/entry_points.txt").decode()
    files = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    source = (path for path in (ROOT / "src" / "tomesd").rglob("*") if path.is_file())
    package = {f"tomesd/{path.relative_to(ROOT / 'src' / 'tomesd').as_posix()}" for path in source}
    package = {name for name in package if "__pycache__" not in name}
    assert {"tomesd/py.typed", "tomesd/evaluation/templates/report.html"} < package
    assert names == package | {f"{about}/{name}" for name in files}
    assert points.split() == ["[console_scripts]", "tomesd", "=", "tomesd.cli:main"]


def test_the_metadata_says_what_is_needed(built: tuple[Path, Path]) -> None:
    about = metadata_of(built[0])
    assert (about["Name"], about["Version"]) == ("tomesd", tomesd.__version__)
    assert (about["License-Expression"], about["Requires-Python"]) == ("MIT", ">=3.10")
    assert set(about.get_all("Provides-Extra", [])) == {
        *("diffusers", "cli", "eval", "ui", "all", "dev")
    }
    requirements = [r for r in about.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert [re.split(r"[<>=!~ ]", r)[0] for r in requirements] == ["torch"]
    python = "Programming Language :: Python :: 3."
    versions = [c.removeprefix(python) for c in about.get_all("Classifier", []) if python in c]
    assert versions == ["10", "11", "12", "13"]


def test_the_extras_name_all_that_is_imported(built: tuple[Path, Path]) -> None:
    """Of other packages: Triton comes with PyTorch, and some are tried and done without."""
    modules = {
        name.split(".")[0]
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    installed = packages_distributions()
    needed = {installed[m][0] for m in modules - sys.stdlib_module_names if m in installed}
    declared = metadata_of(built[0]).get_all("Requires-Dist", [])
    extras = [r for r in declared if "extra == 'dev'" not in r]
    named = {canonical(re.split(r"[\[<>=!~; ]", r)[0]) for r in extras}
    optional = {"tomesd", "tomesd-demo-model", "triton"}
    assert {"torch", "diffusers", "pillow"} <= {canonical(name) for name in needed}
    assert {canonical(name) for name in needed} - named - optional == set()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_a_wheel_of_the_source_distribution_is_the_same(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    assert {"src", "tests", "examples", "README.md", "CHANGELOG.md", "LICENSE"} <= {
        path.name for path in tree.iterdir()
    }
    build(tree, tmp_path / "dist", "--target", "wheel")
    contents = []
    for one in (built[0], *(tmp_path / "dist").glob("*.whl")):
        with zipfile.ZipFile(one) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist()})
    assert contents[0] == contents[1]


def test_twine_finds_nothing_wrong(built: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, built)]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    assert out.stdout.count("PASSED") == 2


def test_an_installed_copy_works_with_nothing_but_torch(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path), str(built[0])], check=True)
    program = f"""
import sys
for name in ("diffusers", "transformers", "accelerate", "peft", "triton"):
    sys.modules[name] = None  # as if it were not installed
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


class Text(nn.Module):
    """A text encoder of few words: what a prompt means is how long it is."""

    def encode(self, prompts: list[str]) -> torch.Tensor:
        return torch.stack(
            [torch.full((7, zoo_ldm.CONTEXT_DIM), 0.1 * len(prompt)) for prompt in prompts]
        )


def test_the_ldm_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real LatentDiffusion, from a config and a checkpoint as the repositories have them."""
    zoo_ldm.latent_diffusion()
    config = {
        "target": "ldm.models.diffusion.ddpm.LatentDiffusion",
        "params": {
            "unet_config": {
                "target": "ldm.modules.diffusionmodules.openaimodel.UNetModel",
                "params": {**zoo_ldm.UNET, "use_checkpoint": False},
            },
            "first_stage_config": {"target": "ldm.models.autoencoder.IdentityFirstStage"},
            "cond_stage_config": {"target": f"{__name__}.Text"},
            "conditioning_key": "crossattn",
            "timesteps": 1000,
            "channels": 4,
            "use_ema": False,
        },
    }
    OmegaConf.save({"model": config}, tmp_path / "config.yaml")
    weights = zoo_ldm.build_ldm().state_dict()
    weights = {f"model.diffusion_model.{name}": value for name, value in weights.items()}
    torch.save({"state_dict": weights}, tmp_path / "model.ckpt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ldm_txt2img.py", "config.yaml", "model.ckpt", "a cat"])
    seen = runpy.run_path(str(ROOT / "examples" / "ldm_txt2img.py"))
    assert "merged at ratio 0.5" in str(tomesd.describe(seen["model"], 512, 512))
    with Image.open("image.png") as image:
        assert image.size == (64, 64)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 30
