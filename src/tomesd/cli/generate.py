"""tomesd generate: images from prompts, with merged tokens."""

import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..generation import Sample, sample, save_image
from ..settings import Settings
from .options import ImageOptions, MergeOptions, ModelOptions
from .progress import progress_bar


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
    out: Path = Path("images")
    """Folder for the images."""
    sampling: ImageOptions = field(default_factory=ImageOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    merge: MergeOptions = field(default_factory=MergeOptions)

    def run(self, console: Console) -> None:
        merge = self.merge.checked()
        prompts = self._prompts()
        if self.images < 1:
            raise ValueError(f"images={self.images}: must be at least 1")
        merge.warn_if_capped()
        pipe = self.model.load()
        for prompt in prompts:
            for seed in range(merge.seed, merge.seed + self.images):
                made = self._make(console, pipe, prompt, replace(merge, seed=seed))
                path = self.out / f"{_slug(prompt)}-{seed}.png"
                save_image(made.image, path, {"model": self.model.model, **made.metadata})
                console.print(f"{path}  {made.seconds:.1f} s")

    def _make(self, console: Console, pipe: Any, prompt: str, merge: Settings) -> Sample:
        with progress_bar(console) as on_progress:
            return sample(
                pipe,
                prompt,
                merge,
                negative_prompt=self.negative,
                seed=merge.seed,
                on_step=lambda done: on_progress(prompt, done, self.sampling.steps),
                **asdict(self.sampling),
            )

    def _prompts(self) -> list[str]:
        prompts = list(self.prompt)
        if self.prompt_file is not None:
            if not self.prompt_file.is_file():
                raise ValueError(f"prompt_file={str(self.prompt_file)!r}: no such file")
            lines = self.prompt_file.read_text(encoding="utf-8").splitlines()
            prompts += [line.strip() for line in lines if line.strip()]
        if not prompts:
            raise ValueError("no prompt: give --prompt or --prompt-file")
        return prompts


def _slug(prompt: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")
    return words[:60].rstrip("-") or "image"
