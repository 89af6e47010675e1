"""What is on the page."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, get_args

import gradio as gr

from .. import presets
from ..settings import Settings
from .events import DEFAULTS, Events, Inputs
from .form import FIRST, OPTIONS
from .job import Request, Studio

THEME = gr.themes.Default(primary_hue="indigo", radius_size="md").set(
    block_info_text_color="*neutral_500"
)

CSS = """
.gradio-container { width: 100%; max-width: 1280px !important; margin: 0 auto !important;
  overflow: clip !important; }
.note { padding: 8px 12px; border-left: 4px solid #94a3b8; border-radius: 4px; margin-bottom: 6px;
  background: var(--background-fill-secondary); overflow-wrap: anywhere; }
.note.good { border-color: #16a34a; }
.note.warning { border-color: #d97706; }
.note.error { border-color: #dc2626; }
#status { padding: 0 !important; }
#status:not(:has(.note)) { display: none; }
#buttons { position: sticky; bottom: 0; z-index: 100; padding: 8px 0;
  background: var(--body-background-fill); }
#numbers table { display: table; width: 100%; }
#numbers :is(table, thead, tbody, tr) { border-color: var(--border-color-primary) !important; }
#numbers :is(th, td) { padding: 6px 10px; border: 0;
  border-bottom: 1px solid var(--border-color-primary); font-family: var(--font); }
#numbers :is(th, td):not(:first-child) { white-space: nowrap; text-align: right; }
#map img { width: 100%; max-height: 480px; object-fit: contain; }
#gallery :is(.gallery-container, .grid-wrap) { height: auto; min-height: 0 !important; }
#gallery .grid-container {
  grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)) !important; }
#gallery .caption-label { max-width: 100%; white-space: normal; overflow-wrap: anywhere; }
"""

_PROMPTS = (
    "a fox and two pears on a green gradient background",
    "a penguin on an orange and yellow striped background",
    "a whale and two red apples on a sky blue background",
)
"""What the embedded models know how to draw."""


def build_page(
    studio: Studio,
    models: Sequence[str],
    start: Request,
    preset: str | None,
    options: dict[str, Any],
) -> gr.Blocks:
    """The page, not yet served.

    Args:
        models: names to choose from.
        start: what the form shows at first.
        preset: that its settings are of.
        options: of the model, for the command that makes an image again.
    """
    with gr.Blocks(title="tomesd", analytics_enabled=False) as page:
        gr.Markdown("# tomesd\nThe same image without tomesd and with it.")
        with gr.Row(equal_height=False):
            with gr.Column(scale=4, min_width=320):
                image = _image_inputs(models, start)
                gr.Markdown("## Merging")
                begin = gr.Dropdown(
                    [DEFAULTS, *get_args(presets.Preset)],
                    value=preset or DEFAULTS,
                    label="Begin with",
                    info="Fills in the options below.",
                    elem_id="preset",
                )
                settings = _option_inputs(start.settings)
                with gr.Row():
                    load = gr.UploadButton("Load settings", file_types=[".json"], **_small("load"))
                    save = gr.Button("Save settings", **_small("save"))
                file = gr.DownloadButton(visible="hidden", elem_id="file")
                with gr.Row(elem_id="buttons"):
                    generate = gr.Button("Generate", variant="primary", **_button("generate"))
                    stop = gr.Button("Stop", variant="stop", interactive=False, **_button("stop"))
            with gr.Column(scale=6, min_width=320):
                outputs, again = _outputs()
        outputs.gallery.render()
        events = Events(studio, Inputs(image, settings), outputs, options)
        events.connect_job(generate, stop)
        events.connect_settings(begin, load, save, file, again)
        events.connect_views(page)
    return page


def _image_inputs(models: Sequence[str], start: Request) -> dict[str, Any]:
    """What an image is made of, by field of `Request`; its size as `width` and `height`."""
    made: dict[str, Any] = {}
    made["model"] = gr.Dropdown(
        list(models), value=start.model, label="Model", visible=len(models) > 1, elem_id="model"
    )
    made["prompt"] = gr.Textbox(
        start.prompt or _PROMPTS[0], label="Prompt", lines=2, elem_id="prompt"
    )
    gr.Examples([[prompt] for prompt in _PROMPTS], made["prompt"], label="For the embedded models")
    made["negative"] = gr.Textbox(start.negative, label="Negative prompt", elem_id="negative")
    width, height = start.size or (None, None)
    with gr.Row():
        for name, value in (("seed", start.seed), ("steps", start.steps)):
            made[name] = gr.Number(value, label=name.capitalize(), elem_id=name, min_width=90)
    with gr.Row():
        for name, own in (("width", width), ("height", height), ("guidance", start.guidance)):
            made[name] = gr.Textbox(
                "" if own is None else f"{own:g}",
                label=name.capitalize(),
                placeholder="auto",
                min_width=90,
                elem_id=name,
            )
    made["hires"] = gr.Checkbox(
        start.hires,
        label="Twice as large, in two passes",
        info="Both images are drawn again, larger, from the same small one. Times are those of "
        "the second pass.",
        elem_id="hires",
    )
    return made


def _option_inputs(settings: Settings) -> dict[str, Any]:
    """Every option of merging, by name."""
    others = (name for name in OPTIONS if name not in FIRST)
    made = {name: OPTIONS[name].component(settings) for name in FIRST}
    with gr.Accordion("All other options", open=False, elem_id="others"):
        made |= {name: OPTIONS[name].component(settings) for name in others}
    return made


def _outputs() -> tuple[SimpleNamespace, gr.Button]:
    """What shows a result, and the button that puts its settings into the form."""
    status = gr.HTML(padding=False, elem_id="status")
    slider = gr.ImageSlider(
        label="Unmerged | merged",
        interactive=False,
        max_height=640,
        buttons=["download", "fullscreen"],
        elem_id="slider",
    )
    with gr.Column(visible=False) as details:
        numbers = gr.Markdown(elem_id="numbers")
        with gr.Accordion("What was merged", elem_id="merged"):
            step = gr.Slider(1, 2, 1, step=1, label="Step", interactive=True, elem_id="step")
            map = gr.Image(
                label="Map", interactive=False, buttons=["download", "fullscreen"], elem_id="map"
            )
            map_words = gr.Markdown(elem_id="map-words")
        with gr.Accordion("Make it again", open=False, elem_id="lines"):
            python = _code("python", "Python")
            command = _code("shell", "Command")
            again = gr.Button("Put its settings into the form", **_small("again"))
    gallery = gr.Gallery(
        label="Made so far",
        columns=6,
        height="auto",
        object_fit="contain",
        allow_preview=False,
        interactive=False,
        fit_columns=False,
        buttons=[],
        visible=False,
        render=False,
        elem_id="gallery",
    )
    outputs = SimpleNamespace(
        **{"status": status, "slider": slider, "numbers": numbers, "gallery": gallery},
        **{"step": step, "map": map, "map_words": map_words, "python": python, "command": command},
        details=details,  # all but the images; hidden while there is no result
        shown=gr.State(0),  # the number of the result; 0 if there is none
    )
    return outputs, again


def _button(name: str) -> dict[str, Any]:
    return {"elem_id": name, "min_width": 120}


def _small(name: str) -> dict[str, Any]:
    return {**_button(name), "size": "sm"}


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
