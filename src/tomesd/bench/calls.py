"""What is timed: one step of the denoising model, or whole images."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..generation.loading import LoadError
from ..generation.sampling import Sampling, call_pipeline
from ..hosts import FoundModel, find_models
from ..hosts.inputs import example_inputs
from ..schedule import Timeline
from .models import ARCHITECTURES, Subject

WHATS = ("step", "pipeline")
_PROMPT = "a photo of a red fox in the snow"

Call = Callable[[], Any]


def make_call(
    subject: Subject, model: nn.Module, what: str, size: tuple[int, int], images: int, steps: int
) -> Call:
    """A call of `model`, which is a copy of the subject's, that takes no arguments.

    Args:
        what: "step" calls the model once, conditional and unconditional together; "pipeline" makes
            `images` images in `steps` steps.
        size: height and width of the images, in pixels.
    """
    if what == "pipeline":
        return Images(subject, model, size, images, steps)
    scale = subject.pixels_per_latent
    latent = (size[0] // scale, size[1] // scale)
    return Step(
        model, random_inputs(subject.model, latent, 2 * images), found=find_models(model)[0]
    )


def random_inputs(module: nn.Module, size: tuple[int, int], batch: int, **more: Any) -> Any:
    """Arguments for `module.forward` on a latent of `size`: noise, not zeros.

    Args:
        more: arguments of `example_inputs`, such as the frames of a video.
    """
    inputs = example_inputs(module, size, batch, **more)
    if inputs is None:
        raise LoadError(f"do not know what inputs a {type(module).__name__} takes")
    generator = torch.Generator().manual_seed(0)

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [fill(inner) for inner in value]
        if isinstance(value, Tensor) and value.is_floating_point():
            # Drawn on the CPU: the same whatever the device.
            return torch.randn(value.shape, generator=generator).to(value)
        return value

    return fill(inputs)


class Step:
    """Calls a denoising model again and again, at timesteps that go from noise to image.

    All that it hands over stays in its place in memory, so that a call can be captured into a CUDA
    graph; only the number in the timestep changes. From 1000 steps, what is done once per image is
    hardly ever done.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        steps: int = 1000,
        found: FoundModel | None = None,
    ):
        self._model = model
        self._name = "timesteps" if "timesteps" in inputs else "timestep"
        row = None if found is None else found.row
        if row is not None:
            self._name = row.time
        first, *rest = inputs  # the original looks for the latent among positional arguments
        self._latent = inputs[first]
        self._rest = {name: inputs[name] for name in rest if name != self._name}
        example = inputs[self._name]
        # Pipelines hand a UNet of diffusers one number for the whole batch.
        shape = () if (first, self._name) == ("sample", "timestep") else example.shape
        self.timesteps = torch.arange(steps - 1, -1, -1, device=example.device)
        if found is not None and row is not None:
            timeline = found.timeline(Timeline())
            if timeline.noise is not None:
                ends = (timeline.noise, timeline.image)
                self.timesteps = torch.linspace(*ends, steps, device=example.device)
        self._timestep = torch.zeros(shape, dtype=self.timesteps.dtype, device=example.device)
        self._done = 0

    def advance(self) -> None:
        """On to the next timestep."""
        self._timestep.copy_(self.timesteps[self._done % len(self.timesteps)])
        self._done += 1

    def run(self) -> Any:
        return self._model(self._latent, **{self._name: self._timestep}, **self._rest)

    def __call__(self) -> Any:
        self.advance()
        return self.run()


class Images:
    """Makes a batch of images: all steps, the scheduler and the decoder."""

    def __init__(
        self, subject: Subject, model: nn.Module, size: tuple[int, int], images: int, steps: int
    ):
        height, width = size
        self._pipe = subject.pipe_with(model)
        self._sampling = Sampling.of(self._pipe, (width, height), steps=steps)
        self._seeds = range(images)
        self._inputs: dict[str, Any] = {"prompt": [_PROMPT] * images}
        if subject.name in ARCHITECTURES:
            self._inputs = {**random_embeddings(subject, images)}
        self._inputs["output_type"] = "pt"  # images stay on the device, and no time goes into PNGs

    def __call__(self) -> Any:
        return call_pipeline(self._pipe, self._inputs, self._seeds, self._sampling).images


def random_embeddings(subject: Subject, images: int) -> dict[str, Tensor]:
    """Random encodings of as many prompts, and of none: there is no text encoder."""
    inputs = random_inputs(subject.model, (8, 8), 2 * images)
    text, no_text = inputs["encoder_hidden_states"].chunk(2)
    embeddings = {"prompt_embeds": text, "negative_prompt_embeds": no_text}
    if "added_cond_kwargs" in inputs:
        pooled, no_pooled = inputs["added_cond_kwargs"]["text_embeds"].chunk(2)
        embeddings |= {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": no_pooled}
    return embeddings
