"""Which classes of diffusers are rows of the table, which are refused, and which are no concern."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType, SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import ModelMixin
from diffusers.models import controlnets, transformers
from merging_dit import ROWS, SUPPORTED
from zoo_dit import DITS

import tomesd
from tomesd.hosts import unets
from tomesd.patch import patch_of

# What they make is no image or video: sound, proteins, embeddings, and tokens of text.
OTHERS = {
    "AceStepTransformer1DModel", "LongCatAudioDiTTransformer", "MiniMaxMusic3RVQDepthDecoder",
    "MiniMaxMusic3Transformer1DModel", "PriorTransformer", "RFD4ProteinaTransformer",
    "StableAudio3DiTModel", "StableAudioDiTModel", "T5FilmDecoder",
}  # fmt: skip
# Inside UNets, over the frames of a video; and ControlNets of UNets, or of several at once.
IN_UNETS = {"TransformerTemporalModel", "DreamLiteTransformer2DModel"}
OF_UNETS = {
    "ControlNetModel", "ControlNetUnionModel", "ControlNetXSAdapter", "SparseControlNetModel",
    "UNetControlNetXSModel",
}  # fmt: skip
SEVERAL = {
    "FluxMultiControlNetModel", "HunyuanDiT2DMultiControlNetModel", "MultiControlNetModel",
    "MultiControlNetUnionModel", "QwenImageMultiControlNetModel", "SD3MultiControlNetModel",
}  # fmt: skip


def _models_in(package: ModuleType) -> dict[str, Any]:
    modules = [
        importlib.import_module(f"{package.__name__}.{info.name}")
        for info in pkgutil.iter_modules(package.__path__)
    ]
    return {
        name: cls
        for module in modules
        for name, cls in vars(module).items()
        if isinstance(cls, type)
        and issubclass(cls, ModelMixin)
        and cls.__module__ == module.__name__
    }


MODELS = _models_in(transformers) | _models_in(controlnets)
MODELS["DreamLiteUNetModel"] = diffusers.DreamLiteUNetModel


def test_every_model_of_diffusers_has_a_row_or_a_reason() -> None:
    known = ROWS.keys() | set(unets._STACKS) | OTHERS | IN_UNETS | OF_UNETS | SEVERAL
    assert MODELS.keys() - known == set()
    assert {row.name for row in ROWS.values()} <= MODELS.keys()


def test_every_row_has_a_tiny_model() -> None:
    rows = {name for name, row in ROWS.items() if not row.reason}
    assert {dit.kind for dit in SUPPORTED.values()} == rows - {
        name for name in rows if "ControlNet" in name
    }


def _empty(name: str) -> torch.nn.Module:
    """A model of a class that derives from the one of diffusers, without any layers."""
    model = torch.nn.Module()
    model.__class__ = type("Other", (MODELS[name],), {})
    return model


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.reason])
def test_what_cannot_be_done_is_said_with_the_reason(name: str) -> None:
    model = _empty(name)
    with pytest.raises(tomesd.UnsupportedModelError, match=f"{name}: {ROWS[name].reason}"):
        tomesd.apply_patch(model)


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_models_of_other_things_are_refused(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    with pytest.raises(tomesd.UnsupportedModelError, match="Supported: "):
        tomesd.apply_patch(model)


def test_a_model_that_is_refused_is_left_as_it_is() -> None:
    model = DITS["sana"].build()
    classes = [type(part) for part in model.modules()]
    with pytest.raises(tomesd.UnsupportedModelError, match=r"Sana.*convolution"):
        tomesd.apply_patch(model)
    assert [type(part) for part in model.modules()] == classes


def test_a_controlnet_that_is_refused_keeps_no_other_model_from_merging() -> None:
    model, controlnet = DITS["zimage"].build(), _empty("ZImageControlNetModel")
    pipe = SimpleNamespace(components={"controlnet": controlnet, "transformer": model})
    tomesd.apply_patch(pipe, 0.5)
    assert patch_of(model) is not None and patch_of(controlnet) is None
