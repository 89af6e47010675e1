"""The nodes, in the form for versions of ComfyUI without `comfy_entrypoint`."""

from typing import Any

from .merging import describe, merge_tokens
from .options import INPUTS, MORE_INPUTS, SETTINGS, fingerprint, load, options, settings_files

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]

CATEGORY = "model_patches/token merging"
MASK = "Tokens where the mask is not black are merged last."
SIZES: dict[str, tuple[Any, dict[str, Any]]] = {
    "width": ("INT", {"default": 1024, "min": 64, "max": 16384, "step": 8}),
    "height": ("INT", {"default": 1024, "min": 64, "max": 16384, "step": 8}),
    "frames": ("INT", {"default": 81, "min": 1, "max": 4096, "tooltip": "Frames of a video."}),
    "batch": (
        "INT",
        {"default": 2, "min": 1, "max": 64, "tooltip": "With guidance, two per image."},
    ),
}


class TokenMerging:
    DESCRIPTION = (
        "Speeds up sampling: similar tokens merge, so the model runs on fewer of them. For UNets "
        "(SD 1, 2, XL) and transformers (Flux, Chroma, SD 3, Qwen-Image, Wan, Lumina 2, Z-Image)."
    )
    CATEGORY = CATEGORY
    FUNCTION = "merge"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}, "optional": {**INPUTS, "settings": (SETTINGS,)}}

    def merge(self, model: Any, preset: str = "none", **given: Any) -> tuple[Any]:
        return (merge_tokens(model, options(**given), preset),)


class MoreOptions:
    DESCRIPTION = "All other options of Token Merging. They override connected settings."
    CATEGORY = CATEGORY
    FUNCTION = "collect"
    RETURN_TYPES = (SETTINGS,)
    RETURN_NAMES = ("settings",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        sockets = {"settings": (SETTINGS,), "mask": ("MASK", {"tooltip": MASK})}
        return {"optional": {**MORE_INPUTS, **sockets}}

    def collect(self, **given: Any) -> tuple[dict[str, Any]]:
        return (options(**given),)


class Describe:
    DESCRIPTION = "Shows what merges where at an image size, and how many operations this saves."
    CATEGORY = CATEGORY
    FUNCTION = "describe"
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("text",)
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), **SIZES}}

    def describe(self, **given: Any) -> dict[str, Any]:
        text = describe(**given)
        return {"ui": {"text": [text]}, "result": (text,)}


class SettingsFromFile:
    DESCRIPTION = (
        "Settings that `tomesd tune` or `tomesd.save` wrote, from a file in ComfyUI's input folder."
    )
    CATEGORY = CATEGORY
    FUNCTION = "load"
    RETURN_TYPES = (SETTINGS,)
    RETURN_NAMES = ("settings",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"file": (settings_files(),)}}

    @classmethod
    def IS_CHANGED(cls, file: str) -> str:
        return fingerprint(file)

    def load(self, file: str) -> tuple[dict[str, Any]]:
        return (load(file),)


NODE_CLASS_MAPPINGS = {
    "TomesdTokenMerging": TokenMerging,
    "TomesdMoreOptions": MoreOptions,
    "TomesdDescribe": Describe,
    "TomesdSettingsFromFile": SettingsFromFile,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "TomesdTokenMerging": "Token Merging",
    "TomesdMoreOptions": "Token Merging: more options",
    "TomesdDescribe": "Token Merging: describe",
    "TomesdSettingsFromFile": "Token Merging: settings from file",
}
