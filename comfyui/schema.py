"""The nodes, as versions of ComfyUI with `comfy_entrypoint` want them."""

from typing import Any

from comfy_api.latest import ComfyExtension, io, ui

from . import classic
from .merging import describe, merge_tokens
from .options import INPUTS, MORE_INPUTS, SETTINGS, fingerprint, load, options, settings_files

__all__ = ["comfy_entrypoint"]

_WIDGETS: dict[str, Any] = {"FLOAT": io.Float.Input, "INT": io.Int.Input}


def _widgets(inputs: dict[str, Any], optional: bool = True) -> list[Any]:
    """The inputs in the form that the schema of a node wants."""
    return [
        io.Combo.Input(name, options=kind, optional=optional, **about)
        if isinstance(kind, list)
        else _WIDGETS[kind](name, optional=optional, **about)
        for name, (kind, about) in inputs.items()
    ]


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
                *_widgets(INPUTS),
                io.Custom(SETTINGS).Input("settings", optional=True),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, preset: str = "none", **given: Any) -> io.NodeOutput:
        return io.NodeOutput(merge_tokens(model, options(**given), preset))


class MoreOptions(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TomesdMoreOptions",
            display_name="Token Merging: more options",
            category=classic.CATEGORY,
            description=classic.MoreOptions.DESCRIPTION,
            inputs=[
                *_widgets(MORE_INPUTS),
                io.Custom(SETTINGS).Input("settings", optional=True),
                io.Mask.Input("mask", optional=True, tooltip=classic.MASK),
            ],
            outputs=[io.Custom(SETTINGS).Output("made", display_name="settings")],
        )

    @classmethod
    def execute(cls, **given: Any) -> io.NodeOutput:
        return io.NodeOutput(options(**given))


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
                *_widgets(classic.SIZES, optional=False),
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
        return [TokenMerging, MoreOptions, Describe, SettingsFromFile]


async def comfy_entrypoint() -> TokenMergingExtension:
    return TokenMergingExtension()
