"""How well images show what their prompts say, as a CLIP model sees it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ..generation import LoadError

__all__ = ["ClipScore"]


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
