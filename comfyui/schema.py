"""The nodes, in the form for ComfyUI with `comfy_entrypoint`, made from the classic ones."""

from typing import Any

from comfy_api.latest import ComfyExtension, io

from .classic import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODES", "comfy_entrypoint"]

_WIDGETS: dict[str, Any] = {"FLOAT": io.Float, "INT": io.Int}


def _inputs(node: Any) -> list[Any]:
    places = node.INPUT_TYPES()
    return [
        _input(name, *kind, optional=place == "optional")
        for place in ("required", "optional")
        for name, kind in places.get(place, {}).items()
    ]


def _input(name: str, kind: Any, about: dict[str, Any] | None = None, **more: Any) -> Any:
    more |= about or {}
    if isinstance(kind, list):
        return io.Combo.Input(name, options=kind, **more)
    return (_WIDGETS.get(kind) or io.Custom(kind)).Input(name, **more)


def _outputs(node: Any) -> list[Any]:
    names = getattr(node, "RETURN_NAMES", (None,))
    return [
        io.Custom(kind).Output(display_name=name)
        for kind, name in zip(node.RETURN_TYPES, names, strict=True)
    ]


def _node(name: str, node: Any) -> type[io.ComfyNode]:
    """A classic node in the new form."""

    class Node(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(
                node_id=name,
                display_name=NODE_DISPLAY_NAME_MAPPINGS[name],
                category=node.CATEGORY,
                description=node.DESCRIPTION,
                inputs=_inputs(node),
                outputs=_outputs(node),
                is_output_node=getattr(node, "OUTPUT_NODE", False),
            )

        @classmethod
        def execute(cls, **given: Any) -> io.NodeOutput:
            made = getattr(node(), node.FUNCTION)(**given)
            if isinstance(made, dict):
                return io.NodeOutput(*made["result"], ui=made["ui"])
            return io.NodeOutput(*made)

    if hasattr(node, "IS_CHANGED"):
        Node.fingerprint_inputs = node.IS_CHANGED
    return Node


NODES = {name: _node(name, node) for name, node in NODE_CLASS_MAPPINGS.items()}


class TokenMergingExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return list(NODES.values())


async def comfy_entrypoint() -> TokenMergingExtension:
    return TokenMergingExtension()
