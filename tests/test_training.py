"""The training of the embedded models: what shows without training them."""

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tomesd_demo_model
import torch
from tomesd_demo_model.captions import PATTERNS, sample_scenes

from tomesd.generation import load_pipeline

PIPELINE = tomesd_demo_model.path("unet")
TEACHER = tomesd_demo_model.path("transformer") / "transformer"


@pytest.fixture
def sprites(tmp_path: Path) -> Path:
    """Two discs, the file of which is smaller than that of 183 emoji."""
    pictures = np.zeros((2, 256, 256, 4), dtype=np.uint8)
    x, y = np.ogrid[-1:1:256j, -1:1:256j]
    pictures[:, x**2 + y**2 < 0.7] = [[[200, 40, 40, 255]], [[40, 40, 200, 255]]]
    np.savez(tmp_path / "sprites.npz", sprites=pictures)
    return tmp_path / "sprites.npz"


@pytest.fixture
def scenes(training) -> dict[str, torch.Tensor]:
    tokenizer = training("tokenizer").WordTokenizer(PIPELINE / "tokenizer")
    described = training("data").describe(sample_scenes(40), tokenizer, 0)
    described["sprite"] %= 2
    return training("video").with_motion(described, np.random.default_rng(0))


def test_backgrounds_pass_by_as_the_camera_pans(training, sprites: Path, scenes: dict) -> None:
    """A quarter of the picture in four frames: 4 of 64 pixels from frame to frame."""
    scenes = {key: value[: len(PATTERNS)] for key, value in scenes.items()}
    scenes["pattern"] = torch.arange(len(PATTERNS))
    scenes["visible"] = torch.zeros(len(PATTERNS), 4)
    scenes["pan"] = torch.tensor([[0.25, 0.0]]).repeat(len(PATTERNS), 1)
    clips = training("video").ClipComposer(sprites, "cpu").clips(scenes, 64, 4)
    assert clips.shape == (len(PATTERNS), 4, 3, 64, 64)
    torch.testing.assert_close(clips[:, 1:, ..., :-4], clips[:, :-1, ..., 4:], atol=2e-4, rtol=0)
    assert (clips[:, 1:] - clips[:, :-1]).abs().amax(dim=(1, 2, 3, 4)).gt(1e-3).all()


def test_objects_move_evenly_and_stay_in_the_picture(training, scenes: dict) -> None:
    rows = training("video").moments(scenes, 16)
    place = rows["place"].unflatten(0, (-1, 16))
    way = place[:, 1:, :, :2] - place[:, :-1, :, :2]
    torch.testing.assert_close(way, way[:, :1].expand_as(way), atol=1e-6, rtol=0)
    assert 0.5 < (way[:, 0].norm(dim=-1) > 0.1 / 16).float().mean() < 1
    spot, reach = place[..., :2], training("data").RADIUS * place[..., 2:]
    assert ((spot >= reach - 1e-6) & (spot <= 1 - reach + 1e-6)).all()


def test_a_run_goes_on_where_it_stopped(
    training, sprites: Path, scenes: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"num_layers": 2, "num_attention_heads": 1, "ffn_dim": 32}
    config = training("config")
    monkeypatch.setattr(config, "VIDEO", config.VIDEO | small)
    run = config.VideoRun(latent=8, frames=2, layout_block=0)
    args = Namespace(sprites=sprites, pipeline=PIPELINE, device="cpu", workers=0, compile=False)
    make = training("train_video").VideoTrainer
    first, second = make(run, args), make(run, args)

    scenes = {key: value[:8] for key, value in scenes.items()}
    latents = first.encode(scenes, 2)

    def step(trainer) -> list[float]:
        torch.manual_seed(trainer.step)
        losses = trainer.backward(latents, scenes, 0.2)
        return [value.item() for value in (*losses, trainer.update(0.1))]

    losses = [step(first), step(first)]
    assert losses[0] != losses[1]
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.step == 2
    expected = [step(first), step(first)]
    assert [step(second), step(second)] == expected
    for name, weight in first.average.weights.items():
        assert torch.equal(weight, second.average.weights[name])


def test_a_student_of_guidance_starts_as_its_teacher_and_fits_the_pipeline(
    training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of the model at each step, in the pipeline as in the sampler of the training."""
    pipe, flow = load_pipeline("transformer"), training("flow")
    student = training("distill_guidance").student_of(pipe.transformer)
    text = flow.TextEncoder(PIPELINE, "cpu")
    words = training("tokenizer").WordTokenizer(PIPELINE / "tokenizer")
    prompt, noise = "a whale on a red background", torch.randn(1, 4, 32, 32)
    states = text(torch.tensor([words(prompt)]))
    given = flow.pack(noise), torch.tensor([0.7]), states
    with torch.no_grad():
        teacher = type(student).from_pretrained(TEACHER)
        found = flow.predict(student, *given, torch.tensor([4.0]))
        expected = flow.predict(teacher, *given)
    torch.testing.assert_close(found, expected)

    torch.nn.init.normal_(student.time_text_embed.guidance_embedder.linear_2.weight, std=0.1)
    shipped = type(pipe.transformer)
    pipe.transformer = shipped.from_config(shipped.load_config(TEACHER), guidance_embeds=True)
    pipe.transformer.load_state_dict(student.state_dict())
    monkeypatch.setattr(flow.torch, "autocast", lambda *_: nullcontext())
    expected = flow.sample(student, states, None, noise, guidance=4.0, steps=2)
    inputs = {"prompt": prompt, "guidance_scale": 4.0, "num_inference_steps": 2}
    size = {"height": 128, "width": 128, "latents": flow.pack(noise), "output_type": "latent"}
    found = pipe(**inputs, **size).images
    torch.testing.assert_close(found, flow.pack(expected), atol=2e-4, rtol=0)
    other = pipe(**inputs | {"guidance_scale": 2.0}, **size).images
    assert (other - found).abs().max() > 0.01
