"""The package as users install it."""

import re
import runpy
import subprocess
import sys
from importlib import metadata
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
