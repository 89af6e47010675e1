"""The demo, end to end, at a small size, on the embedded model."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tomesd_demo_model
import torch
from PIL import Image

import tomesd
from tomesd.cli.demo import _table
from tomesd.cli.run import run
from tomesd.generation import (
    RatioSummary,
    comparison,
    load_pipeline,
    map_of_image,
    sample,
    sample_with_maps,
)
from tomesd.generation.maps import map_at
from tomesd.generation.progress import silent
from tomesd.generation.sampling import Sample
from tomesd.hosts.inputs import example_inputs
from tomesd.patch import patch_of

PROMPT = "a fox and two pears on a green gradient background"
UNET = ["--model", "unet"]
SMALL = ["--size", "128", "128", "--steps", "6", "--prompt", PROMPT]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    assert run(["demo", *UNET, *SMALL, "--out", str(out)]) == 0
    return out


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_it_leaves_pictures_that_open_and_a_table(demo: Path) -> None:
    for name, columns in (("comparison.png", 5), ("merged_tokens.png", 4)):
        with Image.open(demo / name) as image:
            image.load()
            assert image.width > columns * 128
    assert [row["ratio"] for row in rows(demo)] == [0, 0.25, 0.5, 0.75]
    assert [row["tokens"] for row in rows(demo)] == [1024, 768, 512, 256]


def test_titles_that_are_wider_than_the_pictures_do_not_meet() -> None:
    picture = Image.new("RGB", (64, 64), "red")
    titles = ["|unmerged - ratio 0.5, coarse 0.35| x4", "step 14: 2048 of 4096 tokens, coarse"]
    alone = [comparison.label_grid([[picture]], [words], ["fox"]).width for words in titles]
    together = comparison.label_grid([[picture, picture]], titles, ["fox"])
    assert together.width == sum(alone) - 8 > 500  # the margin between them counts once
    assert together.getpixel((alone[0], 60)) == (255, 0, 0), "a picture is below its title"


def test_merged_images_differ_but_stay_close(demo: Path) -> None:
    """Measured: 25.6, 24.9 and 21.2 dB."""
    base, *merged = rows(demo)
    assert base["psnr"] is None
    for row in merged:
        assert 16 < row["psnr"] < 60
        assert row["ssim"] < 1


def test_higher_ratios_are_not_closer(demo: Path) -> None:
    psnr = [row["psnr"] for row in rows(demo)[1:]]
    assert psnr == sorted(psnr, reverse=True)


def test_recording_one_image_is_not_counted_as_the_memory_of_merging() -> None:
    image = Image.new("RGB", (16, 16))
    recorded, plain = (Sample(image, 1.0, 0.5, peak_mib, {}) for peak_mib in (300.0, 200.0))
    row = comparison._summary(0.5, 0.5, [recorded, plain], [plain, plain], 8)
    assert row.peak_mib == 200.0


def test_the_table_says_one_thing_about_time_and_nothing_about_the_memory_of_a_cpu(
    demo: Path,
) -> None:
    found = rows(demo)
    assert all(row["peak_mib"] is None and "seconds" not in row for row in found)
    names = ("unmerged", "ratio 0.25", "ratio 0.5", "ratio 0.75")
    table = _table(tuple(RatioSummary(**row) for row in found), names)
    titles = [column.header for column in table.columns]
    assert tuple(table.columns[0].cells) == names
    assert titles == ["", "tokens", "s / step", "speed-up", "PSNR", "SSIM"]
    seconds, speedups = (list(table.columns[place].cells) for place in (2, 3))
    for step, speedup in zip(seconds, speedups, strict=True):
        assert float(seconds[0]) / float(step) == pytest.approx(float(speedup[:-1]), rel=0.05)


def test_ratios_take_turns_at_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that gets slower all the time favours nobody: each is timed once a round."""
    pipe = load_pipeline("unet")
    order: list[tuple[float, float]] = []

    def note(model, args, kwargs):
        patch = patch_of(model)
        order.append((0.0 if patch is None else patch.settings.ratio, float(args[1])))

    with comparison._call_of_step(pipe.unet, 1) as call:
        sample(pipe, PROMPT, steps=3, size=(128, 128))
    each = [tomesd.Settings(ratio=ratio) for ratio in (0.0, 0.5)]
    handle = pipe.unet.register_forward_pre_hook(note, with_kwargs=True)
    seconds = comparison._take_turns(pipe, each, call, silent, 100)
    handle.remove()
    assert [ratio for ratio, _ in order] == [0.0, 0.5] * (len(order) // 2)
    assert len({timestep for _, timestep in order}) == 1
    assert len(order) == 2 * (1 + comparison._TURNS)
    assert all(0 < step < 60 for step in seconds)


def test_a_second_run_gives_the_same_bytes(demo: Path, tmp_path: Path) -> None:
    assert run(["demo", *UNET, *SMALL, "--out", str(tmp_path)]) == 0
    for name in ("comparison.png", "merged_tokens.png"):
        assert (demo / name).read_bytes() == (tmp_path / name).read_bytes()


def test_presets_that_merge_nothing_are_compared_with_unmerged_images(tmp_path: Path) -> None:
    preset = ["--model", "transformer", "--preset", "fast", "--steps", "8"]
    assert run(["demo", *UNET, *SMALL, *preset, "--out", str(tmp_path)]) == 0
    base, fast = rows(tmp_path)
    assert base["psnr"] is None and 8 < fast["psnr"] < 40
    assert {path.name for path in tmp_path.iterdir()} == {"comparison.png", "results.jsonl"}


def test_ratio_zero_is_the_unpatched_pipeline() -> None:
    pipe = load_pipeline("unet")
    options = {"steps": 3, "size": (128, 128)}
    plain = sample(pipe, PROMPT, **options).image
    assert sample(pipe, PROMPT, tomesd.Settings(ratio=0.0), **options).image == plain
    assert sample(pipe, PROMPT, tomesd.Settings(ratio=0.5), **options).image != plain


@pytest.mark.parametrize("size", [(128, 128), (192, 256), (384, 384)])
def test_the_model_runs_at_other_sizes(size: tuple[int, int]) -> None:
    image = sample(load_pipeline("unet"), PROMPT, tomesd.Settings(), steps=1, size=size).image
    assert image.size == size


def test_the_prompt_decides_the_picture() -> None:
    """A red background is redder than a blue one: the model listens."""
    pipe = load_pipeline("unet")
    red, blue = (
        sample(pipe, f"a penguin on a plain {color} background", steps=8, size=(128, 128)).image
        for color in ("red", "blue")
    )
    corner = (2, 2)
    assert red.getpixel(corner)[0] > blue.getpixel(corner)[0] + 50
    assert blue.getpixel(corner)[2] > red.getpixel(corner)[2] + 50


def test_the_package_is_small_safe_and_complete() -> None:
    folder = tomesd_demo_model.path()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 62e6
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".txt"}
    captions = tomesd_demo_model.held_out_captions()
    assert len(captions) == len(set(captions)) >= 500


def test_the_top_level_has_as_many_tokens_as_stable_diffusion_at_512() -> None:
    levels = tomesd.describe(load_pipeline("unet"), 256, 256).parts[0].levels
    assert [level.tokens for level in levels] == [4096, 1024, 256]


def test_patching_it_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    sample(load_pipeline("unet"), PROMPT, tomesd.Settings(), steps=1, size=(128, 128))
    assert torch.equal(state, torch.get_rng_state())


# The transformer


@pytest.fixture(scope="module")
def transformer() -> Any:
    return load_pipeline("transformer")


@pytest.mark.parametrize("grid", [16, 32, 64])
def test_positions_are_those_of_the_training(
    transformer: Any, training, monkeypatch: pytest.MonkeyPatch, grid: int
) -> None:
    """At 512 px, a grid of 64, they are Flux's own; at others they span the same range."""
    ids = transformer._prepare_latent_image_ids(1, grid, grid, "cpu", torch.float32)
    monkeypatch.setattr(
        diffusers.FluxTransformer2DModel, "forward", lambda self, img_ids, **_: img_ids
    )
    found = transformer.transformer.forward(img_ids=ids)
    assert torch.equal(found, training("flow").positions(grid, "cpu"))
    assert torch.equal(found, ids) == (grid == 64)


def test_the_transformer_draws_what_its_training_sampler_draws(
    transformer: Any, training, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow, tokenizer = training("flow"), training("tokenizer")
    monkeypatch.setattr(flow.torch, "autocast", lambda *_: nullcontext())
    folder = tomesd_demo_model.path("unet")
    text = flow.TextEncoder(folder, "cpu")
    words = tokenizer.WordTokenizer(folder / "tokenizer")
    tokens = [torch.tensor([words(prompt)]) for prompt in (PROMPT, "")]
    noise = torch.randn(1, 4, 32, 32, generator=torch.Generator().manual_seed(3))
    plain = diffusers.FluxTransformer2DModel.from_pretrained(
        tomesd_demo_model.path("transformer") / "transformer"
    )
    expected = flow.sample(plain, *map(text, tokens), noise, guidance=4.0, steps=2)
    inputs = {"prompt": PROMPT, "negative_prompt": "", "true_cfg_scale": 4.0}
    size = {"height": 128, "width": 128, "num_inference_steps": 2}
    with torch.no_grad():
        found = transformer(**inputs, **size, latents=flow.pack(noise), output_type="latent").images
    torch.testing.assert_close(found, flow.pack(expected), atol=2e-4, rtol=0)


def test_example_calls_have_as_much_text_as_real_ones(transformer: Any) -> None:
    """So what is described and timed is what runs."""
    told: list[int] = []
    handle = transformer.transformer.register_forward_pre_hook(
        lambda _, args, given: told.append(given["encoder_hidden_states"].shape[1]),
        with_kwargs=True,
    )
    sample(transformer, PROMPT, steps=1, size=(128, 128), guidance=1.0)
    handle.remove()
    inputs = example_inputs(transformer.transformer, (32, 32), 2)
    assert inputs is not None and told == [inputs["encoder_hidden_states"].shape[1]]


def test_the_transformer_listens_and_merges(transformer: Any) -> None:
    red, blue = (
        sample(transformer, f"a penguin on a plain {color} background", steps=3, size=(128, 128))
        for color in ("red", "blue")
    )
    assert red.metadata["guidance"] == 4.0
    for other, one, channel in ((red, blue, 2), (blue, red, 0)):
        assert one.image.getpixel((2, 2))[channel] > other.image.getpixel((2, 2))[channel] + 50
    for ratio, same in ((0.0, True), (0.5, False)):
        settings = tomesd.Settings(ratio=ratio, when="always")
        prompt = red.metadata["prompt"]
        made = sample(transformer, prompt, settings, steps=3, size=(128, 128))
        assert (made.image == red.image) == same


def test_the_demo_on_the_transformer_says_where_nothing_was_merged(tmp_path: Path) -> None:
    words = ["demo", "--model", "transformer", "--when", "always", "--ratios", "0.5", *SMALL]
    assert run([*words, "--steps", "3", "--out", str(tmp_path)]) == 0
    assert [row["tokens"] for row in rows(tmp_path)] == [256, 128]
    with Image.open(tmp_path / "merged_tokens.png") as image:
        assert image.width > 4 * 128


def test_maps_of_each_step_end_where_merging_ends(transformer: Any) -> None:
    settings = tomesd.Settings(ratio=0.5, when="always")
    options = {"steps": 6, "size": (128, 128)}
    _, by_step = sample_with_maps(transformer, PROMPT, settings, **options)
    assert len(by_step) == 6
    early, late = map_at(by_step, 0), map_at(by_step, 5)
    assert (early.slots, late.slots) == (128, 256)
    assert early.slot.shape == late.slot.shape == (16, 16)
    picture = Image.effect_noise((128, 128), 60).convert("RGB")
    (found,) = {map.slots for map in map_of_image(transformer, picture, settings, noise=0.9).maps}
    assert found == 128
    assert map_of_image(transformer, picture, settings, noise=0.02).plain


@pytest.mark.parametrize(
    ("options", "titles"),
    [
        (
            {"preset": "fast"},
            {0: "64 of 256 tokens, coarse", 3: "all tokens computed", 4: "reused"},
        ),
        (
            {"coarse": 0.2, "reuse": 2, "end": 0.8, "when": "always"},
            {0: "64 of 256 tokens, coarse", 3: "128 of 256 tokens", 4: "reused"},
        ),
    ],
    ids=["preset", "merging too"],
)
def test_show_draws_coarse_and_reused_steps(
    options: dict[str, Any], titles: dict[int, str], tmp_path: Path, capsys: Any
) -> None:
    options = {"size": 128, "steps": 8, "model": "transformer", "prompt": PROMPT, **options}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    for step, title in titles.items():
        out = tmp_path / f"{step}.png"
        assert run(["show", *words, "--step", str(step), "--out", str(out)]) == 0
        assert f"step {step}: {title}\n" in capsys.readouterr().out
        colors = np.ptp(np.asarray(Image.open(out)).astype(int), axis=2)
        assert (colors.max() == 0) == (title == "reused")


def test_the_models_share_their_files() -> None:
    names = [path.name for path in tomesd_demo_model.path("transformer").iterdir()]
    assert sorted(names) == ["model_index.json", "scheduler", "transformer"]
    files = tomesd_demo_model.path("transformer").rglob("*")
    assert sum(path.stat().st_size for path in files if path.is_file()) < 40e6
    with pytest.raises(ValueError, match=r"model='video': must be one of unet, transformer"):
        tomesd_demo_model.path("video")


def test_the_fid_of_the_evaluation_is_the_formula(training) -> None:
    """Against the trace of the root as a nuclear norm, without any covariance matrix."""
    distances = training("distances").distances
    generator = torch.Generator().manual_seed(0)
    real = torch.rand(400, 16, generator=generator)
    fake = torch.rand(300, 16, generator=generator) ** 1.5
    a, b = (features.double().numpy() for features in (real, fake))
    means = ((a.mean(0) - b.mean(0)) ** 2).sum()
    a, b = ((x - x.mean(0)) / np.sqrt(len(x) - 1) for x in (a, b))
    spread = (a**2).sum() + (b**2).sum() - 2 * np.linalg.norm(a @ b.T, "nuc")
    found = distances(real, fake)
    assert found["fid"] == pytest.approx(means + spread, abs=0.006)
    assert found["kid_x1000"] > 3 * abs(distances(real, real.flip(0)[:300])["kid_x1000"])
    assert "fid" not in distances(real, fake[:100])  # too few to say anything


def test_the_evaluation_runs_no_network_it_does_not_know(training, tmp_path: Path) -> None:
    (tmp_path / "other.pt").write_bytes(b"a program")
    with pytest.raises(SystemExit, match=r"other\.pt is not"):
        training("distances").Inception(tmp_path / "other.pt", "cpu")


@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_samples_come_back_as_they_were_written(training, tmp_path: Path, suffix: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 20, 20, 3), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        path = tmp_path / f"{number:04d}.{suffix}"
        training("sample_held_out").save(Image.fromarray(picture), path)
    found = training("evaluate").load_folder(tmp_path)
    assert np.array_equal((found + 1).mul(127.5).round().byte().permute(0, 2, 3, 1), pixels)
