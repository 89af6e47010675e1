"""tomesd ui: the page in the browser."""

import ipaddress
import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import presets
from ..choices import EMBEDDED
from .options import ImageOptions, MergeOptions, ModelOptions


@dataclass(frozen=True)
class Ui:
    """Open a page in the browser: images with and without merging, and what was merged."""

    host: str = "127.0.0.1"
    """Address to listen at. The default is for this machine alone."""
    port: int | None = None
    """Port to listen at. If not given, the first free one from 7860 on."""
    share: bool = False
    """Ask Gradio's service for a public link, through which anyone who has it can use the page."""
    settings: Path | None = None
    """A settings file to begin with, as tomesd tune writes it."""
    preset: presets.Preset | None = None
    """Or settings by name to begin with. Without either, the best preset for the model."""
    sampling: ImageOptions = field(default_factory=lambda: ImageOptions(steps=20))
    model: ModelOptions = field(default_factory=ModelOptions)

    def run(self, console: Console) -> None:
        with tempfile.TemporaryDirectory(prefix="tomesd-") as folder:
            page = self.serve(console, Path(folder))
            with suppress(KeyboardInterrupt):  # which is how it ends
                threading.Event().wait()
            page.close(verbose=False)

    def serve(self, console: Console, folder: Path) -> Any:
        """Loads the model and opens the page.

        Args:
            folder: for the images.

        Returns:
            The page. It runs until its `close` is called.
        """
        if self.model.compile:
            raise ValueError("compile: each change of the settings would be compiled anew")
        from ..generation.loading import need

        need("gradio", extra="ui")
        # Gradio reads these when it is imported, and when the page is made.
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["GRADIO_TEMP_DIR"] = str(folder / "served")
        from ..ui.job import Request, Studio
        from ..ui.page import CSS, THEME, build_page

        begin = MergeOptions(settings=self.settings, preset=self.preset)
        begin.check()
        console.print(f"Loading the model ({self.model.model})")
        studio = Studio(lambda model: replace(self.model, model=model).load(), folder)
        begin = begin.or_best(studio.pipeline(self.model.model))
        merge = begin.checked(**studio.traits(self.model.model))
        start = Request(
            self.model.model, "", seed=merge.seed, settings=merge, **asdict(self.sampling)
        )
        models = tuple(dict.fromkeys([self.model.model, *EMBEDDED]))
        # For the command that makes an image again.
        given, defaults = asdict(self.model), asdict(ModelOptions(model=self.model.model))
        options = {name: value for name, value in given.items() if value != defaults[name]}
        page = build_page(studio, models, start, begin.preset, options)
        self.warn(console)
        _, local, public = page.queue(api_open=False).launch(
            server_name=self.host,
            server_port=self.port,
            share=self.share,
            prevent_thread_lock=True,
            quiet=True,
            footer_links=[],
            max_file_size="1mb",  # of settings files
            ssr_mode=False,
            theme=THEME,
            css=CSS,
        )
        console.print(f"The page is at {public or local} (Ctrl-C ends it)")
        return page

    def warn(self, console: Console) -> None:
        if not self.share and _is_loopback(self.host):
            return
        who = "anyone who has the link" if self.share else "anyone who can reach this address"
        console.print(
            f"Warning: {who} can make images on this machine, and sees all that are made. There is "
            "no password."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
