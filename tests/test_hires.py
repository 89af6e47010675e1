"""Large images in two passes, on UNet and transformer pipelines."""

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from pipelines_dit import PIPELINES
from zoo_diffusers import make_sd_pipeline, make_sdxl_pipeline

import tomesd
from tomesd.cli.run import run
from tomesd.generation import hires, load_pipeline, redraw, sample
from tomesd.generation.hires import image_to_image, second_pass
from tomesd.generation.maps import record_maps
from tomesd.patch import patch_of

PROMPT = "a penguin on a plain red background"
OPTIONS: dict[str, Any] = {"size": (128, 128), "steps": 4}


@pytest.mark.parametrize("make", [make_sd_pipeline, make_sdxl_pipeline])
def test_it_is_the_recipe_by_hand(make: Any) -> None:
    pipe = make()
    settings = tomesd.Settings(ratio=0.5, when="always", max_downsample=4)
    made = hires(pipe, "a cat", settings, strength=0.6, seed=3, guidance=4.0, **OPTIONS)
    assert (made.first.image.size, made.image.size) == ((64, 64), (128, 128))

    small = sample(pipe, "a cat", seed=3, guidance=4.0, steps=4, size=(64, 64)).image
    assert made.first.image == small
    form = getattr(diffusers, type(pipe).__name__.replace("Pipeline", "Img2ImgPipeline"))
    parts = {**pipe.components}
    if form is diffusers.StableDiffusionImg2ImgPipeline:
        parts["requires_safety_checker"] = False
    second = form(**parts)
    second.set_progress_bar_config(disable=True)
    large = small.resize((128, 128), Image.Resampling.LANCZOS)
    call = {"prompt": ["a cat"], "negative_prompt": [""], "image": large, "strength": 0.6}
    call |= {"guidance_scale": 4.0, "num_inference_steps": 4}
    images = []
    for ratio in (0.5, 0.0):
        with tomesd.patched(pipe, ratio=ratio, when="always", max_downsample=4), torch.no_grad():
            generator = [torch.Generator().manual_seed(3)]
            images += second(**call, generator=generator).images
    assert made.image == images[0] != images[1]


def test_only_the_second_pass_merges_and_the_patch_stays() -> None:
    pipe = make_sd_pipeline()
    tomesd.apply_patch(pipe, ratio=0.5, when="always")
    before = patch_of(pipe.unet)
    with record_maps(pipe) as maps:
        hires(pipe, "a cat", strength=0.5, **OPTIONS)
    assert {map.slot.shape for map in maps} == {(16, 16)}
    assert len({map.timestep for map in maps}) == 2
    assert patch_of(pipe.unet) is before
    tomesd.remove_patch(pipe)
    assert patch_of(pipe.unet) is None


def test_the_transformer_enlarges_what_it_drew() -> None:
    pipe = load_pipeline("transformer")
    done: list[int] = []
    settings = tomesd.Settings(when="always")
    made = hires(pipe, PROMPT, settings, steps=4, size=(192, 192), factor=1.5, on_step=done.append)
    assert done == [1, 2, 3, 4, 5, 6]
    assert made.second.metadata["from_size"] == (128, 128)
    assert made.second.metadata["merge"]["end"] == 0.75  # the first half of the second pass
    for asked, end in (({"end": 0.9}, 0.9), ({"start": 0.6}, None), ({}, 0.8)):
        assert second_pass(pipe, tomesd.Settings(**asked), 0.4).end == end
    assert second_pass(make_sd_pipeline(), settings, 0.4) == settings
    small, large = (
        np.asarray(image.convert("RGB").resize((16, 16), Image.Resampling.BOX), dtype=float)
        for image in (made.first.image, made.image)
    )
    assert abs(small - large).mean() < 0.5 * abs(small - large[:, ::-1]).mean()
    no_merging = tomesd.Settings(ratio=0.0)
    plain = redraw(pipe, made.first.image, PROMPT, no_merging, steps=4, size=(192, 192))
    assert plain.image != made.image


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen", "zimage", "chroma"])
def test_transformers_of_diffusers_have_their_form(name: str) -> None:
    pipe, arguments = PIPELINES[name]()
    tomesd.apply_patch(pipe)
    form = image_to_image(pipe)
    assert "Img2Img" in type(form).__name__
    assert form.transformer is pipe.transformer
    arguments = {k: v for k, v in arguments.items() if k not in ("height", "width")}
    picture = Image.effect_noise((64, 96), 50).convert("RGB")
    with torch.no_grad():
        out = form(**arguments, image=picture, strength=0.5, height=96, width=64)
    assert torch.isfinite(out.images if isinstance(out.images, torch.Tensor) else out[0]).all()


def test_what_cannot_be_done_is_said_first() -> None:
    pipe = make_sd_pipeline()
    with pytest.raises(ValueError, match=r"factor=1: must be more than 1"):
        hires(pipe, "a cat", factor=1)
    with pytest.raises(ValueError, match=r"strength=0: must be more than 0"):
        hires(pipe, "a cat", strength=0)
    with pytest.raises(ValueError, match=r"Lumina2Pipeline has no image-to-image form"):
        hires(PIPELINES["lumina2"]()[0], "a cat", **OPTIONS)


def test_the_command_makes_it(tmp_path: Path) -> None:
    words = ["generate", "--model", "unet", "--prompt", PROMPT, "--size", "64", "96"]
    words += ["--hires", "2", "--steps", "4", "--strength", "0.5", "--out", str(tmp_path)]
    assert run(words) == 0
    (path,) = tmp_path.iterdir()
    with Image.open(path) as image:
        assert image.size == (128, 192)
        metadata = json.loads(image.info["tomesd"])
    assert (metadata["strength"], metadata["from_size"]) == (0.5, [64, 96])
    assert metadata["merge"]["ratio"] == 0.5
