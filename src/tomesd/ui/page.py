"""What is on the page."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import gradio as gr

from .. import presets
from ..settings import Settings
from .events import DEFAULTS, Events, Inputs, Outputs
from .form import FIRST, OPTIONS
from .job import Request, Studio

__all__ = ["CSS", "THEME", "build_page"]

THEME = gr.themes.Default(primary_hue="indigo", spacing_size="md", radius_size="md")

CSS = """
.gradio-container { max-width: 1280px !important; margin: 0 auto !important; }
.note { padding: 8px 12px; border-left: 4px solid #94a3b8; border-radius: 4px; margin-bottom: 6px;
  background: var(--background-fill-secondary); overflow-wrap: anywhere; }
.note.good { border-color: #16a34a; }
.note.warning { border-color: #d97706; }
.note.error { border-color: #dc2626; }
#numbers table { display: table; width: 100%; }
#numbers td, #numbers th { white-space: normal; }
"""

_PROMPTS = (
    "a fox and two pears on a green gradient background",
    "a penguin on an orange and yellow striped background",
    "a whale and two red apples on a sky blue background",
)
"""What the embedded models know how to draw."""


def build_page(
    studio: Studio, models: Sequence[str], start: Request, options: dict[str, Any]
) -> gr.Blocks:
    """The page, not yet served.

    Args:
        models: names to choose from.
        start: what the form shows at first.
        options: of the model, for the command that makes an image again.
    """
    with gr.Blocks(title="tomesd", analytics_enabled=False, delete_cache=(3600, 86400)) as page:
        gr.Markdown("# tomesd\nThe same image without and with merged tokens.")
        with gr.Row(equal_height=False):
            with gr.Column(scale=4, min_width=320):
                image = _image_inputs(models, start)
                with gr.Row():
                    generate = gr.Button("Generate", variant="primary", elem_id="generate")
                    stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="stop")
                gr.Markdown("## Merging")
                preset = gr.Dropdown(
                    [DEFAULTS, *presets.PRESETS],
                    label="Begin with",
                    info="Fills in the options below.",
                    elem_id="preset",
                )
                settings = _option_inputs(start.settings)
                with gr.Row():
                    load = gr.UploadButton("Load settings", file_types=[".json"], elem_id="load")
                    save = gr.Button("Save settings", elem_id="save")
                file = gr.DownloadButton(visible="hidden", elem_id="file")
            with gr.Column(scale=6, min_width=320):
                outputs = _outputs()
                again = gr.Button("Put these settings into the form", size="sm", elem_id="again")
        outputs.gallery.render()
        events = Events(studio, Inputs(image, settings), outputs, options)
        events.connect_job(generate, stop)
        events.connect_settings(preset, load, save, file, again)
        events.connect_views(page)
    return page


def _image_inputs(models: Sequence[str], start: Request) -> dict[str, Any]:
    """What an image is made of, by field of `Request`; its size as `width` and `height`."""
    values = asdict(start)
    width, height = start.size or ("", "")

    def number(name: str, value: Any, **more: Any) -> gr.Number:
        return gr.Number(value, label=name.capitalize(), elem_id=name, min_width=90, **more)

    made: dict[str, Any] = {}
    made["model"] = gr.Dropdown(
        list(models), value=start.model, label="Model", visible=len(models) > 1, elem_id="model"
    )
    made["prompt"] = gr.Textbox(
        start.prompt or _PROMPTS[0], label="Prompt", lines=2, elem_id="prompt"
    )
    gr.Examples([[prompt] for prompt in _PROMPTS], made["prompt"], label="For the embedded models")
    made["negative"] = gr.Textbox(start.negative, label="Negative prompt", elem_id="negative")
    with gr.Row():
        for name in ("seed", "steps"):
            made[name] = number(name, values[name])
        made["guidance"] = number("guidance", start.guidance, step=0.5)
    with gr.Row():
        for name, value in (("width", width), ("height", height)):
            made[name] = gr.Textbox(
                value,
                label=name.capitalize(),
                placeholder="the model's own",
                min_width=90,
                elem_id=name,
            )
    return made


def _option_inputs(settings: Settings) -> dict[str, Any]:
    """Every option of merging, by name."""
    others = (name for name in OPTIONS if name not in FIRST)
    made = {name: OPTIONS[name].component(settings) for name in FIRST}
    with gr.Accordion("All other options", open=False, elem_id="others"):
        made |= {name: OPTIONS[name].component(settings) for name in others}
    return made


def _outputs() -> Outputs:
    status = gr.HTML(padding=False, elem_id="status")
    slider = gr.ImageSlider(
        label="Unmerged | merged", interactive=False, max_height=640, elem_id="slider"
    )
    with gr.Column(visible=False) as details:
        numbers = gr.Markdown(elem_id="numbers")
        with gr.Accordion("What was merged", elem_id="merged"):
            step = gr.Slider(1, 2, 1, step=1, label="Step", interactive=True, elem_id="step")
            map = gr.Image(label="Map", interactive=False, height=420, elem_id="map")
            map_words = gr.Markdown(elem_id="map-words")
        with gr.Accordion("Make it again", open=False, elem_id="lines"):
            python = _code("python", "Python")
            command = _code("shell", "Command")
    gallery = gr.Gallery(
        label="Made so far",
        columns=6,
        object_fit="contain",
        allow_preview=False,
        interactive=False,
        visible=False,
        render=False,
        elem_id="gallery",
    )
    return Outputs(
        status,
        slider,
        numbers,
        step,
        map,
        map_words,
        python,
        command,
        details,
        gallery,
        shown=gr.State(0),
    )


def _code(language: str, label: str) -> gr.Code:
    return gr.Code(
        language=language,
        label=label,
        lines=1,
        wrap_lines=True,
        show_line_numbers=False,
        interactive=False,
        buttons=["copy"],
        elem_id=label.lower(),
    )
