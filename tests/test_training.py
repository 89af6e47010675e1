"""The training of the embedded models: what shows without training them."""

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tomesd_demo_model
import torch
from tomesd_demo_model.captions import PATTERNS, Background, Scene, sample_scenes

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


def test_the_judge_finds_objects_where_their_centers_are(training, scenes: dict) -> None:
    judge = training("judge")
    scenes = {key: value.clone() for key, value in scenes.items()}
    scenes["sprite"] = torch.arange(160).view(40, 4)  # no two of a picture are of one kind
    truth = judge.targets(scenes, "cpu")
    logits = {"centers": 20 * truth["centers"] - 10}
    wanted = torch.zeros(40, judge.HEADS["objects"], dtype=torch.long)
    wanted.scatter_(1, scenes["sprite"], scenes["visible"].long())
    assert torch.equal(judge.numbers(logits["centers"]), wanted)
    assert judge.right(logits, wanted).all()
    missing = wanted.clone()
    missing[0, scenes["sprite"][0, 0]] = 0
    assert judge.right(logits, missing).tolist() == [False] + 39 * [True]
    # What might be an object, too, is a doubt, but one that is next to a surer one is not.
    row, column = truth["centers"][1].amax(0).nonzero()[0].tolist()
    logits["centers"][1, 182, -1 - row, -1 - column] = 0.0
    logits["centers"][2, scenes["sprite"][2, 0]].add_(0.5)
    assert judge.right(logits, wanted).tolist() == [True, False] + 38 * [True]


def test_two_violins_and_a_clover_are_not_a_violin_and_two_clovers(training) -> None:
    judge = training("judge")
    centers = torch.full((2, judge.HEADS["objects"], judge.CELLS, judge.CELLS), -10.0)
    for picture, (two, one) in enumerate([(5, 9), (9, 5)]):
        for kind, row, column in ((two, 2, 3), (two, 12, 3), (one, 8, 12)):
            centers[picture, kind, row, column] = 10.0
    scene = Scene(((5, 2), (9, 1)), Background("plain", ("red",)), "")
    wanted = judge.wanted([scene, scene])
    assert judge.right({"centers": centers}, wanted).tolist() == [True, False]


@pytest.fixture
def learner(training, sprites: Path, tmp_path: Path):
    """Of small pictures, with a judge that has learnt nothing."""
    judge, config = training("judge"), training("config")
    training("models").save_tensors(judge.Judge().state_dict(), tmp_path / "judge.safetensors")
    sides = {"small_latent": 4, "middle_latent": 8, "full_latent": 16}
    batches = {"middle_batch": 4, "full_batch": 4, "captions": 3, "tries": 2, "judged": 2}
    run = config.NumbersRun(**sides, **batches, composed_share=0.5, scenes_at_once=8)
    args = Namespace(sprites=sprites, pipeline=PIPELINE, device="cpu", workers=0, compile=False)
    args.judge = tmp_path / "judge.safetensors"
    made = training("train_numbers").NumbersTrainer(run, args)
    pool = made.composer

    def discs(scenes: dict, side: int) -> torch.Tensor:
        return pool({**scenes, "sprite": scenes["sprite"] % 2}, side)

    made.composer = discs
    made.renew()
    return made


def test_predictions_move_towards_what_is_better_and_away_from_what_is_worse(
    learner, training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By as much, and by nothing where a picture is as good as its likes."""
    flow = training("flow")
    monkeypatch.setattr(flow.torch, "autocast", lambda *_: nullcontext())
    latents, tokens = torch.randn(2, 4, 8, 8), learner.empty.expand(2, -1)
    learner.pools.draw(8, 2)

    def gradient(better: float) -> torch.Tensor:
        learner.model.zero_grad()
        torch.manual_seed(3)
        learner.learn(latents, tokens, torch.full((2,), better))
        return learner.model.transformer.proj_out.weight.grad.clone()

    up, none, down = gradient(0.5), gradient(0.0), gradient(-0.5)
    torch.testing.assert_close(up - none, none - down, atol=1e-5, rtol=1e-3)
    assert (up - none).norm() > 0.1 * none.norm()

    # A step along the difference makes the pictures likelier, as the loss of the flow tells.
    clean, noise = flow.pack(latents), torch.randn(2, 16, 16)
    level = torch.full((2,), 0.8)
    noisy = torch.lerp(clean, noise, level.view(-1, 1, 1))

    @torch.no_grad()
    def loss() -> float:
        text = learner.text(tokens)
        v = flow.predict(learner.model.transformer, noisy, level, text)
        return (v - (noise - clean)).square().mean().item()

    before = loss()
    with torch.no_grad():
        learner.model.transformer.proj_out.weight -= 0.05 * (up - none) / (up - none).norm()
    assert loss() < before


def test_captions_that_are_always_or_never_right_teach_nothing(
    learner, training, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = training("train_numbers")
    fine = iter(torch.tensor([[True, True], [True, False], [False, False]]))
    monkeypatch.setattr(numbers, "right", lambda *_: next(fine))
    monkeypatch.setattr(numbers, "KEPT", (0,))
    latents, tokens, better, share = learner.draw(8)
    assert share == 0.5 and better.tolist() == [0.5, -0.5]
    assert latents.shape == (2, 4, 8, 8) and torch.equal(tokens[0], tokens[1])


def test_samplers_may_leave_steps_out(training) -> None:
    flow = training("flow")
    asked: list[float] = []

    def direction(x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        asked.append(level[0].item())
        return 2 * x

    x = torch.ones(1, 3)
    all_steps = flow.euler(direction, x, 256, 4)
    levels, asked[:] = [*asked], []
    assert torch.equal(flow.euler(direction, x, 256, 4, range(4)), all_steps)
    assert asked == levels
    asked.clear()
    some = flow.euler(direction, x, 256, 4, (0, 3))
    assert asked == [levels[0], levels[3]]
    expected = (1 - 2 * (levels[0] - levels[3])) * (1 - 2 * levels[3])
    torch.testing.assert_close(some, torch.full((1, 3), expected))
