"""What happens when something on the page is pressed."""

import json
import logging
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import torch

from .. import presets
from ..generation import LoadError
from ..generation.lines import command_line, python_line
from ..hosts import UnsupportedModelError
from ..settings import Settings
from .form import read_form, shown_values
from .job import Request, Result, StoppedError, Studio
from .views import caption, note, numbers, summary

DEFAULTS = "the defaults"
"""What is chosen where a preset could be."""

_AT_ONCE: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
}
"""For what is done in no time, also while an image is made."""

_PROGRESS = gr.Progress()  # as a default, it tells Gradio to hand one over

_log = logging.getLogger("tomesd")


@dataclass(frozen=True)
class Inputs:
    """The components of the form, by name."""

    image: dict[str, Any]
    options: dict[str, Any]

    @property
    def all(self) -> set[Any]:
        return {*self.image.values(), *self.options.values()}

    def request(self, values: dict[Any, Any]) -> Request:
        """What the form asks for.

        Raises:
            ValueError, TypeError: what is wrong, and what is allowed.
        """
        image = {name: values[component] for name, component in self.image.items()}
        for name in ("seed", "steps", "width", "height"):
            image[name] = _number(name, image[name], whole=True)
        for name in ("seed", "steps"):
            if image[name] is None:
                raise ValueError(f"{name}: must be a whole number")
        image["guidance"] = _number("guidance", image["guidance"])
        size = image.pop("width"), image.pop("height")
        if None in size and any(size):
            raise ValueError("width, height: give both, or neither for the model's own size")
        options = {name: values[component] for name, component in self.options.items()}
        settings = read_form(options, seed=image["seed"])
        return Request(**image, size=None if None in size else size, settings=settings)

    def show(self, settings: Settings) -> dict[Any, Any]:
        shown = shown_values(settings)
        return {component: shown[name] for name, component in self.options.items()}


class Events:
    """The handlers. What goes wrong in one is a sentence on the page."""

    def __init__(
        self, studio: Studio, inputs: Inputs, outputs: SimpleNamespace, options: dict[str, Any]
    ) -> None:
        """
        Args:
            outputs: the components that show a result, by name.
        """
        self._studio, self._inputs, self._outputs, self._options = studio, inputs, outputs, options
        self._all = list(vars(outputs).values())

    def connect_job(self, generate: Any, stop: Any) -> None:
        studio, status = self._studio, self._outputs.status

        def begin(request: gr.Request) -> Any:
            studio.begin(str(request.session_hash))
            return gr.Button(interactive=False), gr.Button(interactive=True), ""

        def end() -> Any:
            return gr.Button(interactive=True), gr.Button(interactive=False)

        def halt(request: gr.Request) -> None:
            studio.stop(str(request.session_hash))

        pressed = gr.on(
            [generate.click, self._inputs.image["prompt"].submit],
            begin,
            outputs=[generate, stop, status],
            **_AT_ONCE,
        )
        made = pressed.then(
            self._make,
            self._inputs.all,
            self._all,
            show_progress_on=self._outputs.slider,
            concurrency_limit=1,
            api_visibility="private",
        )
        made.then(end, outputs=[generate, stop], **_AT_ONCE)
        # The words come before the server is told: after that, they could replace the job's last.
        stopping = json.dumps(note("Stopping after this step."))
        told = stop.click(None, outputs=status, js=f"() => {stopping}", api_visibility="private")
        told.then(halt, **_AT_ONCE)

    def connect_settings(self, preset: Any, load: Any, save: Any, file: Any, again: Any) -> None:
        """
        Args:
            file: hidden; it is pressed from here to hand over the saved file.
        """
        inputs, status = self._inputs, self._outputs.status
        form = [*inputs.options.values(), inputs.image["seed"]]
        model = inputs.image["model"]
        preset.input(self.begin_with, [preset, model], [*form, status], **_AT_ONCE)
        model.input(self._follow, [preset, model], [*form, status], **_AT_ONCE)
        load.upload(self._load, load, [*form, status], **_AT_ONCE)

        saved = save.click(self._save, inputs.all, [file, status], **_AT_ONCE)
        saved.then(None, js="() => document.querySelector('#file').click()")
        again.click(self._put_back, self._outputs.shown, [*inputs.all, status], **_AT_ONCE)

    def connect_views(self, page: gr.Blocks) -> None:
        outputs = self._outputs

        def leave(request: gr.Request) -> None:
            self._studio.stop(str(request.session_hash))

        outputs.step.input(
            self._map_at,
            [outputs.shown, outputs.step],
            [outputs.map, outputs.map_words],
            trigger_mode="always_last",
            **_AT_ONCE,
        )
        outputs.gallery.select(self._pick, None, self._all, **_AT_ONCE)
        page.load(self._show_last, None, self._all, **_AT_ONCE)
        # A page that is gone cannot stop its job, which would keep the others waiting.
        page.unload(leave)

    def _make(
        self, values: dict[Any, Any], request: gr.Request, progress: Any = _PROGRESS
    ) -> dict[Any, Any]:
        def on_progress(words: str, done: float, total: int) -> None:
            progress((done, total), desc=words)

        try:
            asked = self._inputs.request(values)
            made = self._studio.make(asked, str(request.session_hash), on_progress)
        except StoppedError as stopped:
            return {self._outputs.status: note(str(stopped))}
        except Exception as error:
            return {self._outputs.status: note(_sentence(error), "error")}
        return self._show(made)

    def _show(self, result: Result) -> dict[Any, Any]:
        outputs, request = self._outputs, result.request
        middle = _middle_step(result)
        picture, words = result.map_at(middle)
        options = {
            "negative": request.negative or None,
            "model": request.model,
            **self._options,
            "hires": 2 if request.hires else None,
            "steps": request.steps,
            "guidance": request.guidance,
            "size": request.size,
        }
        return {
            outputs.status: summary(result),
            outputs.slider: result.files,
            outputs.numbers: numbers(result),
            # Gradio draws no slider with a single place on it.
            outputs.step: gr.Slider(
                value=middle, maximum=max(2, len(result.steps)), interactive=len(result.steps) > 1
            ),
            outputs.map: picture,
            outputs.map_words: words,
            outputs.python: python_line(presets.options_of(request.settings)),
            outputs.command: command_line(request.prompt, request.settings, **options),
            outputs.details: gr.Column(visible=True),
            outputs.gallery: gr.Gallery(self._pictures(), visible=True),
            outputs.shown: result.number,
        }

    def _pictures(self) -> list[tuple[str, str]]:
        """The newest first."""
        results = [*self._studio.results.values()]
        return [(str(result.files[1]), caption(result)) for result in results[::-1]]

    def _pick(self, event: gr.SelectData) -> dict[Any, Any]:
        # By its number: other pages may have made more since this one was drawn.
        result = self._studio.results.get(int(event.value["caption"].partition(".")[0]))
        if result is None:
            return {self._outputs.status: note("This image is no longer kept.", "error")}
        return self._show(result)

    def _show_last(self) -> dict[Any, Any]:
        results = [*self._studio.results.values()]
        return self._show(results[-1]) if results else {self._outputs.shown: 0}

    def _map_at(self, number: int, step: int) -> Any:
        result = self._studio.results.get(number)
        if result is None:
            return None, "This image is no longer kept."
        return result.map_at(min(max(int(step), 1), len(result.steps)))

    def begin_with(self, name: str, model: str) -> dict[Any, Any]:
        """The options of a preset, or the defaults, for the form."""
        if name == DEFAULTS:
            return self._inputs.show(Settings())
        try:
            traits = self._studio.traits(model)
        except Exception as error:
            return {self._outputs.status: note(_sentence(error), "error")}
        return self._inputs.show(Settings(**presets.preset(name, **traits)))

    def _follow(self, name: str, model: str) -> dict[Any, Any]:
        """A preset means something else on another kind of model."""
        return self.begin_with(name, model) if name != DEFAULTS else {self._outputs.status: ""}

    def _load(self, path: str) -> dict[Any, Any]:
        try:
            options = presets.load(path)
        except (ValueError, TypeError) as error:
            # The path is that of a copy on the server, which tells the user nothing.
            words = str(error).replace(repr(path), repr(Path(path).name))
            return {self._outputs.status: note(words, "error")}
        shown = self._inputs.show(Settings(**options))
        if "seed" in options:
            shown[self._inputs.image["seed"]] = options["seed"]
        return {**shown, self._outputs.status: note(f"Loaded {Path(path).name}.", "good")}

    def _save(self, values: dict[Any, Any]) -> tuple[str | None, str]:
        """The saved file, and what is wrong if there is none."""
        try:
            asked = self._inputs.request(values)
            path = Path(tempfile.mkdtemp(dir=self._studio.folder)) / "settings.json"
            presets.save(path, asked.settings, model=asked.model)
        except (ValueError, TypeError) as error:
            return None, note(str(error), "error")
        return str(path), ""

    def _put_back(self, number: int) -> dict[Any, Any]:
        """Fills the form with what a result was made of."""
        result = self._studio.results.get(number)
        if result is None:
            return {self._outputs.status: note("There is no image yet.", "error")}
        request = result.request
        width, height = request.size or ("", "")
        guidance = "" if request.guidance is None else request.guidance
        values = {**vars(request), "width": width, "height": height, "guidance": guidance}
        image = {component: values[name] for name, component in self._inputs.image.items()}
        return {**image, **self._inputs.show(request.settings)}


def _number(name: str, value: Any, *, whole: bool = False) -> Any:
    """A number that was typed; None if nothing was."""
    if value is None or str(value).strip() == "":
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (whole and not number.is_integer()):
        raise ValueError(f"{name}={value}: must be a {'whole ' if whole else ''}number")
    return int(number) if whole else number


def _middle_step(result: Result) -> int:
    """The step in the middle of those at which something was merged or left out, from 1."""
    done = [not step.plain for step in result.steps]
    steps = [step for step, any_of_it in enumerate(done, start=1) if any_of_it]
    return steps[len(steps) // 2] if steps else 1


def _sentence(error: Exception) -> str:
    """What went wrong, for the user."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "Out of memory: try a smaller size or a higher ratio."
    if not isinstance(error, LoadError | UnsupportedModelError | ValueError | TypeError):
        _log.error("the page's job failed", exc_info=error)
        return f"This failed ({type(error).__name__}: {error}). The terminal tells more."
    return str(error)
