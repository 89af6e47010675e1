"""Loading models: single files as Stable Diffusion's own code writes them, and refusals."""

import json
import pickle
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import exact_cases
import pytest
import torch
import zoo_diffusers
import zoo_ldm
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from tomesd.cli.run import run
from tomesd.generation import LoadError, load_pipeline

AUTOENCODER = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 32,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 32,
    "ch_mult": [1, 2],
    "num_res_blocks": 1,
    "attn_resolutions": [],
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise ConnectionRefusedError("these tests run offline")

    monkeypatch.setattr(socket.socket, "connect", refuse)


class Original(nn.Module):
    """The parts of a Stable Diffusion checkpoint, with ldm's own classes and names."""

    def __init__(self) -> None:
        super().__init__()
        zoo_ldm.latent_diffusion()  # makes ldm.models importable
        from ldm.models.autoencoder import AutoencoderKL

        self.model = nn.Module()
        self.model.diffusion_model = zoo_ldm.build_ldm(context_dim=zoo_diffusers.CROSS)
        loss = {"target": "torch.nn.Identity"}
        self.first_stage_model = exact_cases.fill(AutoencoderKL(AUTOENCODER, loss, 4))
        self.cond_stage_model = nn.Module()
        self.cond_stage_model.transformer = nn.Module()
        self.cond_stage_model.transformer.text_model = zoo_diffusers.make_text_encoder(seed=9)

    def weights(self) -> dict[str, Tensor]:
        return {name: value.contiguous() for name, value in self.state_dict().items()}


@pytest.fixture(scope="module")
def original() -> Original:
    return Original()


@pytest.fixture(scope="module")
def files(original: Original, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same model as model.safetensors and as model.ckpt."""
    folder = tmp_path_factory.mktemp("files")
    save_file(original.weights(), folder / "model.safetensors")
    torch.save({"state_dict": original.weights(), "global_step": 7}, folder / "model.ckpt")
    return folder


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder of the same architecture, without any weights."""
    folder = tmp_path_factory.mktemp("config") / "sd"
    unet = zoo_diffusers.SD1_CONFIG | {"norm_num_groups": 32, "attention_head_dim": 2}
    vae = diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        scaling_factor=0.5,
    )
    pipe = zoo_diffusers.make_sd_pipeline(unet=diffusers.UNet2DConditionModel(**unet), vae=vae)
    pipe.save_pretrained(folder)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    return folder


@pytest.fixture
def changed(config: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the configuration, for a test to spoil."""
    yield Path(shutil.copytree(config, tmp_path / "changed"))


@pytest.mark.parametrize("name", ["model.safetensors", "model.ckpt"])
@torch.no_grad()
def test_a_single_file_computes_what_the_original_code_does(
    name: str, original: Original, files: Path, config: Path
) -> None:
    pipe = load_pipeline(files / name, config=config)
    x, timesteps, _ = zoo_ldm.unet_arguments(16, 16, batch=2, seed=0, timestep=500).values()
    text = zoo_diffusers.noise(2, zoo_diffusers.TEXT, zoo_diffusers.CROSS, seed=1)
    expected = original.model.diffusion_model(x, timesteps, text)
    torch.testing.assert_close(pipe.unet(x, timesteps, text).sample, expected, atol=2e-5, rtol=0)

    picture = zoo_diffusers.noise(1, 3, 32, 32, seed=2)
    expected = original.first_stage_model.encode(picture).mode()
    found = pipe.vae.encode(picture).latent_dist.mode()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    expected = original.first_stage_model.decode(x)
    torch.testing.assert_close(pipe.vae.decode(x).sample, expected, atol=2e-5, rtol=0)

    words = pipe.tokenizer("a red fox", return_tensors="pt").input_ids
    expected = original.cond_stage_model.transformer.text_model(words).last_hidden_state
    assert torch.equal(pipe.text_encoder(words).last_hidden_state, expected)
    assert pipe.vae.config.scaling_factor == 0.5  # which only the configuration tells


def test_the_command_draws_the_same_from_the_file_and_from_a_folder(
    files: Path, config: Path, tmp_path: Path
) -> None:
    file = str(files / "model.safetensors")
    load_pipeline(file, config=config).save_pretrained(tmp_path / "folder")
    words = ["generate", "--prompt", "a cat", "--size", "32", "32", "--steps", "2"]
    models = {"file": [file, "--config", str(config)], "same": [str(tmp_path / "folder")]}
    for name, model in models.items():
        assert run([*words, "--out", str(tmp_path / name), "--model", *model]) == 0
    images = [Image.open(tmp_path / name / "a-cat-0.png") for name in models]
    assert images[0].tobytes() == images[1].tobytes()
    assert len(images[0].getcolors(maxcolors=32 * 32)) > 100  # a picture, not one colour


def test_half_precision_reaches_every_part(files: Path, config: Path) -> None:
    pipe = load_pipeline(files / "model.safetensors", config=config, dtype="bfloat16")
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        assert {parameter.dtype for parameter in part.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("model.", "UNet2DConditionModel"),
        ("model.diffusion_model.middle_block.", "lacks weights"),
        ("first_stage_model.", "AutoencoderKL"),
        ("first_stage_model.decoder.mid.", "lacks weights"),
        ("cond_stage_model.", "CLIPTextModel"),
        ("cond_stage_model.transformer.text_model.encoder.layers.1.", "weights of the text_encode"),
    ],
)
def test_a_file_without_weights_that_it_needs_is_refused(
    lost: str, message: str, original: Original, changed: Path, tmp_path: Path
) -> None:
    kept = {name: v for name, v in original.weights().items() if not name.startswith(lost)}
    save_file(kept, tmp_path / "model.safetensors")
    # Weights in the folder of the configuration do not step in.
    zoo_diffusers.make_text_encoder(seed=5).save_pretrained(changed / "text_encoder")
    with pytest.raises(LoadError, match=f"could not load .*{message}"):
        load_pipeline(tmp_path / "model.safetensors", config=changed)


def test_a_configuration_of_another_model_is_refused(files: Path, tmp_path: Path) -> None:
    zoo_diffusers.make_sd_pipeline().save_pretrained(tmp_path / "other")
    with pytest.raises(LoadError, match=r"could not load .*model\.safetensors"):
        load_pipeline(files / "model.safetensors", config=tmp_path / "other")


class Trap:
    """Writes a file as soon as it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.path, "sprung")


@pytest.mark.parametrize("written_by", ["torch", "pickle"])
@pytest.mark.parametrize("configured", [True, False])
def test_a_checkpoint_that_holds_code_is_refused(
    written_by: str, configured: bool, original: Original, config: Path, tmp_path: Path
) -> None:
    sprung, file = tmp_path / "sprung", tmp_path / "model.ckpt"
    content = {"state_dict": original.weights(), "extra": Trap(sprung)}
    if written_by == "torch":
        torch.save(content, file)
        torch.load(file, weights_only=False)
    else:
        file.write_bytes(pickle.dumps({"extra": Trap(sprung)}, protocol=2))
        pickle.loads(file.read_bytes())
    sprung.unlink()  # the trap works where nobody is careful

    with pytest.raises(LoadError, match=r"model\.ckpt: it holds more than weights"):
        load_pipeline(file, config=config if configured else None)
    assert not sprung.exists()


def test_a_single_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.ckpt"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(LoadError, match=f"could not load .*{name}"):
            load_pipeline(tmp_path / name)


def test_a_single_file_without_a_configuration_needs_the_hub(files: Path, monkeypatch) -> None:
    # Else it would ask several times, with pauses.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match=r"the hub did not answer; give a local folder as config"):
        load_pipeline(files / "model.safetensors")


def test_a_folder_that_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no model_index\.json"):
        load_pipeline(tmp_path)


def test_only_a_single_file_takes_a_configuration(config: Path) -> None:
    for model in ("unet", "nobody/nothing", config):
        with pytest.raises(LoadError, match=r"config='.*': only a single .* takes one"):
            load_pipeline(model, config=config)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "no model_index.json"),
        ("{", "names no pipeline"),
        ("{}", "names no pipeline"),
        (json.dumps({"_class_name": "NoSuchPipeline"}), "NoSuchPipeline cannot be loaded"),
        (json.dumps({"_class_name": "DDPMPipeline"}), "DDPMPipeline cannot be loaded"),
    ],
)
def test_a_configuration_that_is_none_is_one_line(
    index: str | None, message: str, files: Path, changed: Path, capsys
) -> None:
    (changed / "model_index.json").unlink()
    if index is not None:
        (changed / "model_index.json").write_text(index)
    words = ["describe", "--model", str(files / "model.safetensors"), "--config", str(changed)]
    assert run(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tomesd: config='{changed}': ")
    assert message in error
    assert error.count("\n") == 1
