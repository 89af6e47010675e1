"""describe() against what the model really does: token counts seen by its layers, FLOPs counted."""

from typing import Any

import pytest
import torch
from merging_dit import SUPPORTED, at_steps_left
from torch.utils.flop_counter import FlopCounterMode
from zoo_diffusers import (
    HOSTS,
    Host,
    make_controlnet_pipeline,
    make_sd_pipeline,
    module_state,
    tokens_into,
)

import tomesd
from tomesd import kernels, selectors
from tomesd.generation import load_pipeline
from tomesd.kernels import reference


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_the_tokens_it_tells_are_those_the_layers_get(host: Host) -> None:
    model = tomesd.apply_patch(host.build(), ratio=0.4, max_downsample=2)
    levels = tomesd.describe(model, height=16 * 8, width=16 * 8).parts[0].levels
    with tokens_into(model) as seen:
        host.run(model, height=16, width=16)
    assert {level.merged_tokens for level in levels} <= {tokens for _, tokens, _ in seen.values()}
    assert any(level.merged_tokens == level.tokens - int(level.tokens * 0.4) for level in levels)
    assert levels[0].downsample == host.finest


@pytest.mark.filterwarnings("error::tomesd.MergeWarning")
def test_a_coarse_step_is_no_reason_for_a_warning() -> None:
    """Nothing merges in it, whatever the ratio."""
    pipe = tomesd.apply_patch(load_pipeline("transformer"), ratio=0.5, coarse=0.4, when="always")
    (part,) = tomesd.describe(pipe, 128, 128).parts
    assert part.coarse_tokens == 64 and part.levels[0].merged_tokens == 128


@pytest.mark.parametrize(
    ("share", "selector"),
    [("block", "bipartite"), ("level", "bipartite"), ("level", "kmeans"), ("block", "grid")],
)
def test_flops_are_those_of_a_real_run(
    share: str, selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def matching(*args: Any) -> None:
        """Without the operator around it, the counter sees what the matching does."""
        *arguments, _ = args
        reference.match_tokens(*arguments)

    host = HOSTS["sd1"]
    model = host.build()
    kinds = {"merge_crossattn": True, "merge_mlp": True, "share": share, "selector": selector}
    counts = {}
    for ratio in (0.0, 0.5):
        tomesd.apply_patch(model, ratio=ratio, **kinds)
        # Counted with unfused attention, which the counter knows on the CPU without help.
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            inputs = tomesd.hosts.inputs.example_inputs(model, (16, 16), 2)
            with torch.no_grad(), monkeypatch.context() as patching:
                patching.setattr(kernels, "_match_tokens", matching)
                patching.setattr(selectors, "_write_clusters", selectors._cluster_tokens)
                model(**inputs)
        counts[ratio] = counter.get_total_flops()
    part = tomesd.describe(model, 128, 128).parts[0]
    assert (part.flops, part.merged_flops) == (counts[0.0], counts[0.5])
    assert 0 < part.saved < 1


@pytest.mark.parametrize(
    "options",
    [{"preset": "quality"}, {"preset": "balanced"}, {"preset": "fast"}, {"ratio": 0.5, "reuse": 2}],
    ids=lambda options: "_".join(map(str, options.values())),
)
def test_the_share_of_an_image_is_that_of_its_steps(options: dict[str, Any]) -> None:
    dit, steps = SUPPORTED["flux"], 12
    model, inputs = dit.build(), dit.inputs(size=(32, 32))
    counts = []
    for chosen in ({"ratio": 0.0}, options):
        tomesd.apply_patch(model, when="always", **chosen)
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            for step in range(steps):
                dit.run(model, at_steps_left(dit, inputs, 1 - step / steps))
        counts.append(counter.get_total_flops())
    (part,) = tomesd.describe(model, 256, 256, steps=steps, inputs=inputs).parts
    assert part.share_of_image == pytest.approx(counts[1] / counts[0], rel=0.02)
    assert f"an image of 12 steps takes {part.share_of_image:.1%}" in str(part)


def test_a_step_that_leaves_out_a_part_is_described() -> None:
    pipe = tomesd.apply_patch(make_controlnet_pipeline(), preset="fast")
    unet, controlnet = tomesd.describe(pipe, 128, 128).parts
    assert 0.05 < unet.reused_flops / unet.flops < 0.95 and unet.share_of_image is None
    assert "one step in 2 runs the whole model, from progress 0 on, and the others" in str(unet)
    assert "no step can be left out" in str(controlnet)  # the UNet needs its output


def test_an_unpatched_model_is_described_and_left_alone() -> None:
    model = HOSTS["sdxl"].build()
    before = module_state(model)
    text = str(tomesd.describe(model, 128, 128))
    assert "not patched" in text
    assert module_state(model) == before


@pytest.mark.parametrize("name", ["unet", "transformer"])
def test_describing_a_model_that_merges_warns_of_nothing(name: str, recwarn: Any) -> None:
    pipe = tomesd.apply_patch(load_pipeline(name), ratio=0.5)
    assert tomesd.describe(pipe, 128, 128).parts[0].saved > 0
    assert not [w for w in recwarn if issubclass(w.category, tomesd.MergeWarning)]


def test_a_pipeline_shows_every_model_that_is_patched() -> None:
    pipe = tomesd.apply_patch(make_controlnet_pipeline(), ratio=0.5)
    description = tomesd.describe(pipe, 128, 128)
    assert [part.name for part in description.parts] == ["unet", "controlnet"]
    assert "controlnet" in str(description)


def test_the_scale_of_the_pipelines_own_autoencoder_is_used() -> None:
    pipe = make_sd_pipeline()
    size = 16 * pipe.vae_scale_factor
    assert tomesd.describe(pipe, size, 2 * size).parts[0].latent == (16, 32)


def test_without_a_size_it_is_the_one_that_the_model_makes() -> None:
    pipe = make_sd_pipeline()
    own = pipe(prompt="a cat", num_inference_steps=1).images[0].size
    latent = tomesd.describe(pipe).parts[0].latent
    assert latent == (own[1] // pipe.vae_scale_factor, own[0] // pipe.vae_scale_factor)
    assert latent != (64, 64), "which is what would be taken of a model that says nothing"


def test_a_no_op_is_called_one() -> None:
    model = tomesd.apply_patch(HOSTS["sdxl"].build(), max_downsample=1)
    assert "nothing is merged" in str(tomesd.describe(model, 128, 128))


def test_weights_and_random_state_are_not_touched() -> None:
    model = tomesd.apply_patch(HOSTS["sd1"].build())
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    tomesd.describe(model, 128, 128)
    assert torch.equal(state, torch.get_rng_state())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])


@pytest.mark.parametrize("bad", [0, -8, 4, 12.5, "512", True])
def test_bad_sizes_are_named(bad) -> None:
    model = HOSTS["sd1"].build()
    for name in ("height", "width"):
        with pytest.raises(ValueError, match=f"{name}={bad!r}"):
            tomesd.describe(model, **{name: bad})


@pytest.mark.parametrize("name", ["num_frames", "steps", "batch"])
@pytest.mark.parametrize("bad", [0, -1, 2.0, True])
def test_bad_numbers_are_named(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={bad!r}: must be an int of at least 1"):
        tomesd.describe(HOSTS["sd1"].build(), **{name: bad})


def test_models_we_cannot_make_inputs_for_take_the_users() -> None:
    class OtherUNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = HOSTS["sd1"].build()

        def forward(self, latent, timestep, text):
            return self.inner(latent, timestep, text)

    model = tomesd.apply_patch(OtherUNet())
    with pytest.raises(tomesd.UnsupportedModelError, match="OtherUNet"):
        tomesd.describe(model, 128, 128)
    width = model.inner.config.cross_attention_dim
    inputs = {
        "latent": torch.zeros(2, 4, 16, 16),
        "timestep": torch.tensor(1),
        "text": torch.zeros(2, 77, width),
    }
    assert tomesd.describe(model, 128, 128, inputs=inputs).parts[0].saved > 0
