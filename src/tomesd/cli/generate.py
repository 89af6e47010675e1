"""tomesd generate: images from prompts, with merged tokens."""

import math
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..files import check_writable, read_text, unused
from ..settings import Settings
from .options import ImageOptions, MergeOptions, ModelOptions
from .screen import about, progress_bar

if TYPE_CHECKING:
    from ..generation import Sample


@dataclass(frozen=True)
class Generate:
    """Generate images from prompts, with merged tokens."""

    prompt: tuple[str, ...] = ()
    """One prompt or several, each in quotes."""
    prompt_file: Path | None = None
    """A text file with one prompt a line, in addition."""
    negative: str = ""
    """What to keep out of the images."""
    images: int = 1
    """Images per prompt, from consecutive seeds."""
    hires: float | None = None
    """Make each image this many times larger than --size, in two passes: small, then enlarged and
    drawn anew on merged tokens."""
    strength: float = 0.5
    """With --hires: share of the steps that the second pass takes. More draws more anew."""
    out: Path = Path("images")
    """Folder for the images."""
    overwrite: bool = False
    """Replace images of the same names. Otherwise new ones get a number."""
    sampling: ImageOptions = field(default_factory=ImageOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    merge: MergeOptions = field(default_factory=MergeOptions)

    def run(self, console: Console) -> None:
        self.merge.check()
        prompts = self._prompts()
        if self.images < 1:
            raise ValueError(f"images={self.images}: must be at least 1")
        if self.hires is None and self.strength != Generate.strength:
            raise ValueError(f"strength={self.strength:g}: needs --hires")
        check_writable(self.out, folder=True)
        from ..generation import save_image
        from ..generation.loading import preset_traits

        pipe = self.model.load()
        if self.hires is None:
            merge = self.merge.as_in_python(pipe)
        else:  # what two passes gain, they gain by merging
            merge = self.merge.checked(**preset_traits(pipe))
        seeds = range(merge.seed, merge.seed + self.images)
        wanted = [(prompt, seed) for prompt in prompts for seed in seeds]
        written = set[Path]()
        for number, (prompt, seed) in enumerate(wanted, start=1):
            made = self._make(console, pipe, prompt, replace(merge, seed=seed))
            path = self.out / f"{_slug(prompt)}-{seed}.png"
            path = unused(path, overwrite=self.overwrite and path not in written)
            written.add(path)
            save_image(made.image, path, {"model": self.model.model, **made.metadata})
            left = len(wanted) - number
            rest = f"  ({left} more: {about(left * made.seconds)})" if left else ""
            console.print(f"{path}  {made.seconds:.1f} s{rest}")

    def _make(self, console: Console, pipe: Any, prompt: str, merge: Settings) -> "Sample":
        from ..generation import hires, sample
        from ..generation.hires import enlarged_size

        steps = self.sampling.steps
        total = steps + (0 if self.hires is None else math.ceil(steps * self.strength))
        with progress_bar(console) as on_progress:
            options: dict[str, Any] = {
                **asdict(self.sampling),
                "negative_prompt": self.negative,
                "seed": merge.seed,
                "on_step": lambda done: on_progress(prompt, done, total),
            }
            if self.hires is None:
                return sample(pipe, prompt, merge, **options)
            size = options["size"]
            options["size"] = size and enlarged_size(pipe, size, self.hires)
            options |= {"factor": self.hires, "strength": self.strength}
            made = hires(pipe, prompt, merge, **options)
            return replace(made.second, seconds=made.seconds)

    def _prompts(self) -> list[str]:
        prompts = list(self.prompt)
        if self.prompt_file is not None:
            lines = read_text(self.prompt_file, "prompt_file").splitlines()
            prompts += [line.strip() for line in lines if line.strip()]
        if not prompts:
            raise ValueError("no prompt: give --prompt or --prompt-file")
        return prompts


def _slug(prompt: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")
    return words[:60].rstrip("-") or "image"
