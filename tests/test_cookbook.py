"""Every program in docs/cookbook.md runs, and merges.

What is changed: the models are small random ones of the same classes, in folders that have the
names of the real ones; "cuda" is "cpu" and half precision is float32; sizes are an eighth, videos
have 9 frames, and images take 4 steps; what is compiled is traced, but not made into machine code.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from pipelines_dit import make_vae, make_wan_vae
from transformers import T5Config, T5EncoderModel
from zoo_diffusers import (
    SDXL_CONFIG,
    make_controlnet,
    make_sdxl_pipeline,
    make_text_encoder,
    make_tokenizer,
)
from zoo_dit import DITS, seeded

PAGE = (Path(__file__).parent.parent / "docs" / "cookbook.md").read_text(encoding="utf-8")
PROGRAMS = {
    part.split("\n")[0]: re.findall(r"```python\n(.*?)```", part, re.DOTALL)
    for part in PAGE.split("\n## ")[1:]
}
CHANGES = {
    '"cuda"': '"cpu"',
    r"torch\.(bfloat16|float16)": "torch.float32",
    r"num_frames=\d+": "num_frames=9",
    r"num_inference_steps=\d+": "num_inference_steps=8",
    "fullgraph=True": 'fullgraph=True, backend="eager"',
}


def changed(program: str) -> str:
    for pattern, text in CHANGES.items():
        program = re.sub(pattern, text, program)
    return re.sub(r"\b(480|832|1024|2048)\b", lambda found: str(pixels(int(found[0]))), program)


def pixels(size: int) -> int:
    """About an eighth, in multiples of what all models can make."""
    return 32 * round(size / 8 / 32)


def t5(width: int) -> Any:
    """A text encoder for texts of any length."""
    config = {"d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 256}
    return seeded(T5EncoderModel, T5Config(d_model=width, **config))


def flux() -> Any:
    return diffusers.FluxPipeline(
        transformer=DITS["flux"].build(),
        vae=make_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=make_text_encoder(width=24),
        tokenizer=make_tokenizer(),
        text_encoder_2=t5(32),
        tokenizer_2=make_tokenizer(),
    )


def wan() -> Any:
    return diffusers.WanPipeline(
        transformer=DITS["wan"].build(),
        vae=make_wan_vae(diffusers.AutoencoderKLWan),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=t5(32),
        tokenizer=make_tokenizer(),
    )


class FluxLora:
    @staticmethod
    def save_pretrained(folder: str) -> None:
        model = DITS["flux"].build()
        config = LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v"])
        model.add_adapter(config)
        layers = get_peft_model_state_dict(model)
        diffusers.FluxPipeline.save_lora_weights(folder, transformer_lora_layers=layers)


MODELS: dict[str, Callable[[], Any]] = {
    "stabilityai/stable-diffusion-xl-base-1.0": make_sdxl_pipeline,
    "diffusers/controlnet-canny-sdxl-1.0": lambda: make_controlnet(SDXL_CONFIG),
    "black-forest-labs/FLUX.1-dev": flux,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": wan,
    "path/to/lora": FluxLora,
}


def run(program: str) -> dict[str, bytes]:
    """The images that a program makes."""
    exec(compile(program, "docs/cookbook.md", "exec"), {"__name__": "__main__"})
    images = {}
    for path in sorted([*Path().glob("*.*"), *Path("images").glob("*.png")]):
        if path.suffix in (".png", ".webp") and path.name != "edges.png":
            with Image.open(path) as image:
                images[path.name] = image.convert("RGB").tobytes()
            path.unlink()
    return images


def test_every_recipe_is_one_program() -> None:
    assert len(PROGRAMS) == 9
    assert all(len(found) == 1 for found in PROGRAMS.values())
    assert all(name in PAGE for name in MODELS)


@pytest.mark.parametrize("title", PROGRAMS)
@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
def test_recipe(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [program] = PROGRAMS[title]
    for name, make in MODELS.items():
        if name in program:
            make().save_pretrained(name)
    Image.effect_noise((64, 64), 50).convert("RGB").save("edges.png")
    Path("prompts.txt").write_text("a cat\n\na dog\n" * 3)
    torch._dynamo.reset()
    merged = run(changed(program))
    assert merged
    unmerged = re.sub(r"preset=\"fast\"|ratio=0\.5", "ratio=0", changed(program))
    assert unmerged != changed(program)
    plain = run(unmerged)
    assert plain.keys() == merged.keys()
    assert all(plain[name] != merged[name] for name in merged)
