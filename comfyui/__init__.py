"""Token merging in ComfyUI: faster sampling in UNets and diffusion transformers.

ComfyUI takes the nodes from `comfy_entrypoint`. Versions that do not know it yet take them from
`NODE_CLASS_MAPPINGS`, which must not be there otherwise, because it would win.
"""

try:
    from comfy_api.latest import ComfyExtension  # noqa: F401
except ImportError:
    from .classic import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
else:
    from .schema import comfy_entrypoint

    __all__ = ["comfy_entrypoint"]
