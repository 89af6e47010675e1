"""Options that several commands share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from .. import presets
from ..allowed import Protect, Schedule
from ..choices import DEMO_MODEL, Dtype, Offload
from ..settings import Settings

if TYPE_CHECKING:
    from ..evaluation import Item

Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True)
class MergeOptions(Settings):
    """How tokens are merged."""

    settings: Path | None = None
    """A settings file to begin with, as tomesd tune writes it. Other options that are given here
    win over what it says."""
    preset: presets.Preset | None = None
    """Or settings by name to begin with."""
    named: tyro.conf.Suppress[frozenset[str]] = frozenset()
    """The options that the command line names."""

    def __post_init__(self) -> None:
        """Checks nothing: while the command line is parsed, an error would come out garbled."""

    def check(self) -> None:
        """Refuses what is wrong whatever the model is, before one is loaded."""
        _check_for_any_model(self.checked)

    def checked(self, **traits: Any) -> Settings:
        """The settings for a model.

        Args:
            traits: see `preset_traits`.
        """
        return Settings(**presets.combined(self.base(**traits), self.given()))

    def or_best(self, pipe: Any) -> "MergeOptions":
        """With the best preset where nothing says how to merge, as in `apply_patch`."""
        from ..api import best_preset
        from ..hosts import find_models

        # The seed is that of the image, too.
        if self.settings or self.preset or self.given().keys() - {"seed"}:
            return self
        return replace(self, preset=best_preset(pipe, find_models(pipe)[0]))

    def as_in_python(self, pipe: Any) -> Settings:
        """`checked`, or the best preset."""
        from ..generation.loading import preset_traits

        return self.or_best(pipe).checked(**preset_traits(pipe))

    def given(self) -> dict[str, Any]:
        """What the command line says, also where it is the default: it wins over a preset."""
        names = self.named | presets.changed(self).keys()
        return {f.name: getattr(self, f.name) for f in fields(Settings) if f.name in names}

    def base(self, **traits: Any) -> dict[str, Any]:
        """What the settings file or the preset says."""
        if self.settings is not None and self.preset is not None:
            raise ValueError("give either --settings or --preset")
        if self.settings is not None:
            return presets.load(self.settings)
        return {} if self.preset is None else presets.preset(self.preset, **traits)


def _check_for_any_model(make: Callable[..., Any]) -> None:
    """Makes the settings for one kind of model or the other: presets differ."""
    try:
        make(kind="unet")
    except ValueError:
        make(kind="transformer")


@dataclass(frozen=True)
class RatiosOptions(MergeOptions):
    """How tokens are merged."""

    ratio: tyro.conf.Suppress[float] = 0.5
    """What `ratios` are instead of."""
    ratios: Annotated[tuple[float, ...] | None, tyro.conf.arg(aliases=["--ratio"])] = None
    """Shares of the tokens to remove: 0.25, 0.5 and 0.75 if not given, or with --settings or
    --preset what these say."""

    def check(self) -> None:
        _check_for_any_model(self.each)

    def each(self, **traits: Any) -> list[Settings]:
        """The settings with each of the ratios."""
        merge = self.checked(**traits)
        ratios = self.ratios
        if ratios is None:
            ratios = (merge.ratio,) if self.base(**traits) else (0.25, 0.5, 0.75)
        if not ratios:
            raise ValueError("ratios: there must be at least one")
        return [replace(merge, ratio=ratio) for ratio in ratios]


def named_in(arguments: Iterable[str]) -> frozenset[str]:
    """Names of the options in the words of a command line: `--no-use-rand` names `use_rand`."""
    words = [word[2:].partition("=")[0] for word in arguments if word.startswith("--")]
    names = [word.replace("-", "_") for word in words]
    return frozenset([*names, *(name.removeprefix("no_") for name in names)])


types = ConstructorRegistry()
"""How types are given on the command line that can be functions and tensors in Python."""


@types.primitive_rule
def _in_words(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    rules: list[tuple[Any, str, Callable[[list[str]], Any]]] = [
        (Schedule, "linear|cosine|[SELECTOR:]RATIO [...]", _word_or_ratios),
        (Size | None, "SIDE|WIDTHxHEIGHT", parse_size),
        (Protect, "guidance", " ".join),
    ]
    for wanted, metavar, read in rules:
        if info.type == wanted:
            return PrimitiveConstructorSpec(
                nargs="*",
                metavar=metavar,
                instance_from_str=partial(_unless_none, read),
                is_instance=lambda value: True,
                str_from_instance=lambda value: [str(value)],
            )
    return None


def _unless_none(read: Callable[[list[str]], Any], words: list[str]) -> Any:
    return None if words == ["None"] else read(words)


def _word_or_ratios(words: list[str]) -> str | list[Any]:
    """`linear`, or ratios, each with a selector before it or not: `grid:0.75`."""
    try:
        pairs = [word.rpartition(":") for word in words]
        return [(name, float(ratio)) if name else float(ratio) for name, _, ratio in pairs]
    except ValueError:
        return " ".join(words)


def parse_size(words: Sequence[str]) -> Size:
    """`["512"]`, `["768x512"]` or `["768", "512"]`."""
    sides = [side for word in words for side in word.lower().split("x")]
    if not 1 <= len(sides) <= 2 or not all(side.isdecimal() for side in sides):
        raise ValueError("must be the side of a square, as in 512, or width x height: 768x512")
    return int(sides[0]), int(sides[-1])


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it runs."""

    model: str = DEMO_MODEL
    """`unet` or `transformer` for an embedded model, a folder in diffusers format, a single
    .safetensors or .ckpt file, or a hub id."""
    config: Path | None = None
    """For a single file: a local folder in diffusers format to take the configuration, the
    tokenizer and the scheduler from. Without it, diffusers asks the hub."""
    device: str = "auto"
    """Where to run: auto, cpu, cuda, cuda:1, mps."""
    dtype: Dtype = "auto"
    """Precision. auto: float16 on a GPU, float32 on a CPU."""
    attention: str = "default"
    """default, eager, sdpa, xformers, or an attention backend of diffusers by name."""
    compile: bool = False
    """Compile the model with torch.compile: a slow first image, then faster ones."""
    offload: Offload = "none"
    """Keep in GPU memory only what runs: whole models, or layer by layer."""

    def load(self) -> Any:
        from ..generation.loading import load_pipeline, pick_device

        warn_of_dtype(self.dtype, pick_device(self.device).type)
        return load_pipeline(**asdict(self))


def warn_of_dtype(dtype: str, device: str) -> None:
    """Says what would otherwise look like a program that hangs."""
    if dtype == "float16" and device == "cpu":
        warn("float16 on a CPU can be a hundred times slower than float32, which is the default")


def warn(words: str) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)
    console.print(f"tomesd: {words}")


@dataclass(frozen=True)
class ImageOptions:
    """How images are made."""

    steps: int = 30
    """Denoising steps."""
    guidance: float | None = None
    """How closely to follow the prompt. The model's own if not given."""
    size: Size | None = None
    """Pixels: the side of a square, or width x height as in 768x512. The model's own if not
    given."""


@dataclass(frozen=True)
class SamplingOptions(ImageOptions):
    """How images are made."""

    negative: str = ""
    """What to keep out of the images."""
    scheduler: Literal["own", "ddim", "plms"] = "own"
    """The model's own, DDIM, or PLMS (PNDM)."""

    def arguments(self) -> dict[str, Any]:
        """As `Sampling.of` takes them."""
        options = asdict(self)
        negative = options.pop("negative")
        return {**options, "negative_prompt": negative}


@dataclass(frozen=True)
class PromptOptions:
    """Which images are made."""

    prompts: str = "held-out"
    """held-out (captions of the embedded model), imagenet, imagenet:FILE (a class a line), a .tsv
    file with a column Prompt such as Parti-prompts, or a text file with a prompt a line."""
    count: int | None = 100
    """How many prompts. None takes all."""
    images: int = 1
    """Images per prompt, each from a seed of its own."""
    image_seed: int = 0
    """Where the seeds of the noise begin."""

    def items(self, further: int = 0) -> "list[Item]":
        """
        Args:
            further: how far the seeds are from where they would begin.
        """
        from ..evaluation import load_prompts, make_items

        prompts = load_prompts(self.prompts, self.count)
        return make_items(prompts, self.images, self.image_seed + further)
