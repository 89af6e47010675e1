"""What AUTOMATIC1111, SD.Next and Forge do with the library, on the model code they are built on.

The web UIs themselves cannot be installed here. docs/webuis.md describes the calls made below.
"""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import zoo_ldm
from ldm.modules import attention as ldm_attention
from pipelines_dit import PIPELINES, run
from torch import Tensor, nn
from zoo_diffusers import make_sd_pipeline, module_state, run_pipeline, tokens_into

import tomesd
from tomesd.patch import patch_of
from tomesd.presets import PRESETS

pytestmark = [
    pytest.mark.filterwarnings("error::tomesd.MergeWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning"),  # ldm's sampler
    pytest.mark.filterwarnings("ignore:.*autocast.*deprecated"),  # ldm's checkpoint
]

CALL = {"use_rand": False, "merge_attn": True, "merge_crossattn": False, "merge_mlp": False}
"""What they give to `apply_patch` besides the ratio."""
SMALL, LARGE = (16, 16), (24, 32)


class Automatic:
    """Keeps the ratio of the pass that runs; patches only when it changes."""

    def __init__(self, model: nn.Module):
        self.model, self.ratio = model, 0.0

    def use(self, ratio: float) -> None:
        if self.ratio and ratio != self.ratio:
            tomesd.remove_patch(self.model)
        if ratio and ratio != self.ratio:
            tomesd.apply_patch(self.model, ratio=ratio, **CALL)
        self.ratio = ratio


def text_to_image(model: nn.Module) -> Tensor:
    arguments = zoo_ldm.unet_arguments(*SMALL, batch=1, seed=0)
    return zoo_ldm.run_ddim(model, arguments, keyword=False)


def high_res(model: nn.Module, small: Tensor) -> Tensor:
    """The second pass: the image is enlarged, half noised, and denoised."""
    sampler = zoo_ldm.latent_diffusion()[1](model)
    sampler.make_schedule(4, verbose=False)
    large = nn.functional.interpolate(small, size=LARGE)
    noisy = sampler.stochastic_encode(
        large, torch.tensor([2]), noise=zoo_ldm.noise("second pass", 0, *large.shape)
    )
    text = zoo_ldm.context(1, 0)
    return sampler.decode(noisy, text, 2, 3.0, -text)


def finest_tokens(model: nn.Module, run: Any) -> tuple[Tensor, int]:
    with tokens_into(model) as seen, torch.no_grad():
        output = run()
    return output, max(tokens for _, tokens, _ in seen.values())


def test_each_pass_has_its_ratio_and_the_model_comes_back() -> None:
    model = zoo_ldm.build_latent_diffusion()
    before = module_state(model)
    with torch.no_grad():
        plain = text_to_image(model)
    ui = Automatic(model)
    for job in range(2):
        ui.use(0.25)
        ui.use(0.25)  # told again at each batch
        first, tokens = finest_tokens(model, lambda: text_to_image(model))
        assert tokens == 192, job
        ui.use(0.5)
        second, tokens = finest_tokens(model, lambda small=first: high_res(model, small))
        assert tokens == 384, job
        ui.use(0.25)
        assert torch.equal(finest_tokens(model, lambda: text_to_image(model))[0], first)
        ui.use(0)
        assert module_state(model) == before
        assert torch.equal(finest_tokens(model, lambda: text_to_image(model))[0], plain)

    fresh = zoo_ldm.build_latent_diffusion()
    with torch.no_grad():
        tomesd.apply_patch(fresh, 0.25, **CALL)
        assert torch.equal(text_to_image(fresh), first)
        tomesd.apply_patch(fresh, 0.5, **CALL)
        assert torch.equal(high_res(fresh, first), second)
        tomesd.apply_patch(fresh, 0)
        assert (high_res(fresh, first) - second).std() > 0.01 * second.std()


@pytest.mark.parametrize("first", ["patch", "hijack"])
def test_attention_and_blocks_replaced_on_their_classes(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AUTOMATIC1111 puts faster attention into ldm's classes, and blocks without checkpoints."""
    model = zoo_ldm.build_ldm()
    arguments = zoo_ldm.unet_arguments(*SMALL, 2, 0, 500)
    with torch.no_grad():
        expected = tomesd.apply_patch(model, 0.5, **CALL)(**arguments)
    tomesd.remove_patch(model)
    seen: list[int] = []

    def attention(self: Any, x: Tensor, context: Tensor | None = None, mask: Any = None) -> Tensor:
        seen.append(x.shape[1])
        source = x if context is None else context
        q, k, v = (
            layer(part).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, part in ((self.to_q, x), (self.to_k, source), (self.to_v, source))
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.to_out(out.transpose(1, 2).flatten(2))

    def hijack() -> None:
        monkeypatch.setattr(ldm_attention.CrossAttention, "forward", attention)
        block = ldm_attention.BasicTransformerBlock
        monkeypatch.setattr(
            block, "forward", lambda self, x, context=None: self._forward(x, context)
        )

    def patch() -> None:
        tomesd.apply_patch(model, 0.5, **CALL)

    for step in (patch, hijack) if first == "patch" else (hijack, patch):
        step()
    with torch.no_grad():
        torch.testing.assert_close(model(**arguments), expected, rtol=1e-4, atol=1e-4)
    assert {128, 256} <= set(seen)  # self-attention on merged tokens, cross-attention on all


def test_pipelines_are_patched_again_and_shared() -> None:
    """SD.Next: another ratio without `remove_patch`, another pipeline around the same models."""
    pipe = make_sd_pipeline()
    plain, before = run_pipeline(pipe), module_state(pipe.unet)
    results = []
    for ratio in (0.25, 0.5):
        tomesd.apply_patch(pipe, ratio=ratio, **CALL)
        pipe.applied_tome = ratio  # its note, on the pipeline
        results.append(run_pipeline(pipe))
    assert torch.equal(
        run_pipeline(tomesd.apply_patch(make_sd_pipeline(), 0.5, **CALL)), results[1]
    )
    assert not torch.equal(*results)
    other = diffusers.StableDiffusionImg2ImgPipeline(
        **pipe.components, requires_safety_checker=False
    )
    assert tomesd.remove_patch(other) is other
    assert module_state(pipe.unet) == before
    assert torch.equal(run_pipeline(pipe), plain)
    tomesd.remove_patch(pipe)  # of what is not patched any more


def test_the_same_call_merges_flux() -> None:
    pipe, arguments = PIPELINES["flux"]()
    plain = run(pipe, arguments)
    tomesd.apply_patch(pipe, ratio=0.5, **CALL)
    assert (run(pipe, arguments) - plain).std() > 0.01 * plain.std()


# The extension in docs/webuis.md


def extension(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of the page, with the two names that a web UI gives to an extension."""
    page = (Path(__file__).parent.parent / "docs" / "webuis.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    modules, scripts = ModuleType("modules"), ModuleType("modules.scripts")
    modules.scripts = scripts
    scripts.Script, scripts.AlwaysVisible = object, object()
    monkeypatch.setitem(sys.modules, "modules", modules)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/webuis.md", "exec"), names)
    return names["TokenMerging"]()


def forge_model() -> tuple[Any, nn.Module]:
    unet = zoo_ldm.build_ldm(zoo_ldm.Forge)
    model = SimpleNamespace(model=SimpleNamespace(diffusion_model=unet))
    return SimpleNamespace(forge_objects=SimpleNamespace(unet=model)), unet


def automatic_model() -> tuple[Any, nn.Module]:
    model = zoo_ldm.build_latent_diffusion()
    return model, model.model.diffusion_model


@pytest.mark.parametrize("make", [forge_model, automatic_model])
def test_the_extension_of_the_page(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import gradio

    script = extension(monkeypatch)
    with gradio.Blocks():
        first, hires = script.ui(False)
    assert set(dict(first.choices)) == {"off", *PRESETS["unet"]} and hires.value == 0
    model, unet = make()
    before, p = module_state(unet), SimpleNamespace(sd_model=model, is_hr_pass=False)
    arguments = zoo_ldm.unet_arguments(*SMALL, 2, 0, 900)

    def tokens(*choices: Any) -> int:
        script.process_before_every_sampling(p, *choices, x=None)
        return finest_tokens(unet, lambda: unet(**arguments))[1]

    assert tokens("off", 0.75) == 256
    assert patch_of(unet) is None
    assert tokens("fast", 0.75) == 256
    assert patch_of(unet).settings.reuse == 2
    p.is_hr_pass = True
    assert tokens("fast", 0.25) == 192
    assert tokens("fast", 0) == 256
    script.postprocess(p, None)
    assert module_state(unet) == before
