"""The nodes, as versions of ComfyUI with `comfy_entrypoint` want them."""

from typing import Any

from comfy_api.latest import ComfyExtension, io, ui

from . import classic
from .merging import describe, merge_tokens
from .options import INPUTS, SETTINGS, fingerprint, load, options, settings_files

__all__ = ["comfy_entrypoint"]

_WIDGETS: dict[str, Any] = {"FLOAT": io.Float.Input, "INT": io.Int.Input}


def _widget(name: str, kind: Any, about: dict[str, Any], optional: bool) -> Any:
    known = {key: value for key, value in about.items() if key != "advanced"}
    if isinstance(kind, list):
        widget = io.Combo.Input(name, options=kind, optional=optional, **known)
    else:
        widget = _WIDGETS[kind](name, optional=optional, **known)
    if "advanced" in about:
        widget.extra_dict["advanced"] = True  # an argument in later versions of ComfyUI only
    return widget


class TokenMerging(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TomesdTokenMerging",
            display_name="Token Merging",
            category=classic.CATEGORY,
            description=classic.TokenMerging.DESCRIPTION,
            inputs=[
                io.Model.Input("model"),
                *(_widget(name, *value, optional=True) for name, value in INPUTS.items()),
                io.Custom(SETTINGS).Input("settings", optional=True),
                io.Mask.Input("mask", optional=True, tooltip=classic.MASK),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, **given: Any) -> io.NodeOutput:
        return io.NodeOutput(merge_tokens(model, options(**given)))


class Describe(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TomesdDescribe",
            display_name="Token Merging: describe",
            category=classic.CATEGORY,
            description=classic.Describe.DESCRIPTION,
            inputs=[
                io.Model.Input("model"),
                *(_widget(name, *value, optional=False) for name, value in classic.SIZES.items()),
            ],
            outputs=[io.String.Output(display_name="text")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, **given: Any) -> io.NodeOutput:
        text = describe(**given)
        return io.NodeOutput(text, ui=ui.PreviewText(text))


class SettingsFromFile(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TomesdSettingsFromFile",
            display_name="Token Merging: settings from file",
            category=classic.CATEGORY,
            description=classic.SettingsFromFile.DESCRIPTION,
            inputs=[io.Combo.Input("file", options=settings_files())],
            outputs=[io.Custom(SETTINGS).Output(display_name="settings")],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str) -> str:
        return fingerprint(file)

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        return io.NodeOutput(load(file))


class TokenMergingExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TokenMerging, Describe, SettingsFromFile]


async def comfy_entrypoint() -> TokenMergingExtension:
    return TokenMergingExtension()
