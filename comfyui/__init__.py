"""Token merging in ComfyUI: faster sampling in UNets and diffusion transformers.

ComfyUI loads the nodes from `comfy_entrypoint`. Older versions load them from
`NODE_CLASS_MAPPINGS`, which must not exist in newer ones, because it would take precedence.
"""

try:
    from comfy_api.latest import ComfyExtension  # noqa: F401
except ImportError:
    from .classic import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
else:
    from .schema import comfy_entrypoint

    __all__ = ["comfy_entrypoint"]
