"""The page in the browser: what it makes and what it says, in a real browser."""

import io
import json
import os
import re
import shlex
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diffusers import ScoreSdeVeScheduler
from PIL import Image, ImageChops
from pipelines_dit import PIPELINES
from rich.console import Console
from zoo_diffusers import make_sd_pipeline

import tomesd
from tomesd import machine, presets
from tomesd.cli.run import parse, run
from tomesd.generation import hires, sample
from tomesd.generation.lines import arguments, command_line, python_line
from tomesd.settings import Settings
from tomesd.ui.events import DEFAULTS, Events, Inputs
from tomesd.ui.form import FIRST, OPTIONS, read_form, shown_values
from tomesd.ui.job import Request, StoppedError, Studio
from tomesd.ui.views import numbers, summary

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ALWAYS = Settings(when="always")
SETTINGS = [
    Settings(),
    Settings(ratio=0.6, target="kv", proportional=True, seed=3),
    Settings(use_rand=False, window=0, sx=3, share="steps", refresh=2, when="always"),
    Settings(schedule="cosine", ratio_end=0.1, end=0.75, protect="guidance"),
    Settings(schedule=[0.5, 0.25, 0.0], level_ratios={1: 0.5, 2: 0.25}, max_downsample=2),
    Settings(schedule=[("grid", 0.75), 0.5], reuse=2, reuse_start=0.25, extrapolate=True),
    Settings(depth=(0.25, 0.75), target="stack", start=0.1, tau=0.9),
    Settings(kind_ratios={"attn": 0.5, "mlp": 0.25}, merge_mlp=True),
]


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    return Studio(lambda name: make_sd_pipeline(), tmp_path)


def request(**options: Any) -> Request:
    return Request(
        **{"model": "tiny", "prompt": "a cat", "steps": 2, "size": (128, 128), **options}
    )


def same(one: Image.Image, other: Image.Image) -> bool:
    return ImageChops.difference(one.convert("RGB"), other.convert("RGB")).getbbox() is None


def plain(settings: Settings) -> Any:
    """What a settings file would have."""
    return json.loads(json.dumps(presets.changed(settings)))


def test_a_job_makes_what_sample_makes(studio: Studio) -> None:
    asked = request(seed=5, negative="a dog", settings=replace(ALWAYS, seed=5))
    told: list[tuple[str, float, int]] = []
    made = studio.make(asked, on_progress=lambda *words: told.append(words))
    for settings, one in ((None, made.unmerged), (asked.settings, made.merged)):
        expected = sample(make_sd_pipeline(), "a cat", settings, **asked.arguments())
        assert same(one.image, expected.image)
        assert one.metadata == expected.metadata
    assert not same(made.unmerged.image, made.merged.image)
    assert [words for words, done, total in told][-2:] == [
        "Merged image: step 1 of 2",
        "Merged image: step 2 of 2",
    ]
    assert told[-1][1:] == (4, 4)
    for path, one in zip(made.files, (made.unmerged, made.merged), strict=True):
        with Image.open(path) as image:
            assert json.loads(image.info["tomesd"])["merge"] == json.loads(
                json.dumps(one.metadata["merge"])
            )


def test_two_passes_draw_the_same_small_image_again_larger(studio: Studio) -> None:
    made = studio.make(request(steps=4, settings=ALWAYS, hires=True))
    expected = hires(
        make_sd_pipeline(), "a cat", ALWAYS, size=(256, 256), steps=4, negative_prompt=""
    )
    assert made.merged.image.size == made.unmerged.image.size == (256, 256)
    assert same(made.merged.image, expected.image)
    assert not same(made.merged.image, made.unmerged.image)
    assert len(made.steps) == 2 and all(
        step.maps for step in made.steps
    )  # half of the steps are the second pass
    larger = studio.make(request(steps=4, settings=replace(ALWAYS, ratio=0.25), hires=True))
    assert larger.reused and not same(larger.merged.image, made.merged.image)


def test_the_unmerged_image_is_made_once_for_several_settings(studio: Studio) -> None:
    first = studio.make(request(settings=ALWAYS))
    again = studio.make(request(settings=replace(ALWAYS, ratio=0.25)))
    other = studio.make(request(settings=ALWAYS, steps=1))
    assert [made.reused for made in (first, again, other)] == [False, True, False]
    assert again.unmerged is first.unmerged
    assert [made.number for made in studio.results.values()] == [1, 2, 3]
    assert "those of the image before" in summary(again)


def test_maps_have_the_tokens_of_each_step(studio: Studio) -> None:
    made = studio.make(request(settings=replace(ALWAYS, end=0.5), steps=4))
    assert [bool(step.maps) for step in made.steps] == [True, True, False, False]
    side = 128 // make_sd_pipeline().vae_scale_factor
    for map in (step.map for step in made.steps[:2]):
        assert map is not None and map.slot.shape == (side, side)
        assert map.slots == side * side // 2
    picture, words = made.map_at(1)
    assert not same(picture, made.map_at(2)[0])
    assert f"{side * side} tokens were merged into {side * side // 2}" in words
    assert same(made.map_at(3)[0], made.merged.image)
    assert "nothing was merged" in made.map_at(3)[1]
    assert f"| {side * side} | {side * side // 2} at 2 of 4 steps |" in numbers(made)


def test_steps_that_leave_a_part_out_are_named(studio: Studio) -> None:
    made = studio.make(request(settings=replace(ALWAYS, reuse=2), steps=6))
    left_out = [step.reused for step in made.steps]
    assert left_out == [False, True, False, True, False, False]
    assert ["did not run" in made.map_at(step)[1] for step in range(1, 7)] == left_out
    assert "Of 6 steps, 6 merged tokens and 2 left out a part of the model" in summary(made)


def test_steps_on_a_coarser_image_are_drawn_and_named(studio: Studio) -> None:
    made = studio.make(request(settings=Settings(ratio=0.0, coarse=0.4), steps=6))
    assert "Of 6 steps, 2 ran on a coarser image: " in summary(made)
    picture, words = made.map_at(1)
    assert words == "Step 1 of 6: the image was coarser, with 64 of 256 tokens."
    assert not same(picture, made.merged.image) and same(made.map_at(3)[0], made.merged.image)
    assert "nothing was merged" in made.map_at(3)[1]


def test_why_nothing_was_merged_is_said(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_to_start = machine.Machine(1e15, 1e15, 1e13, launch=1e-4, apart=False)
    monkeypatch.setattr(machine, "_measure", lambda *_: slow_to_start)
    made = studio.make(request(settings=Settings()))
    assert same(made.unmerged.image, made.merged.image)
    assert "Of 2 steps, none merged tokens: both images are the same." in summary(made)
    assert "longer than merging saves" in summary(made)
    between = studio.make(request(settings=replace(ALWAYS, start=0.2, end=0.3)))
    assert "Of 2 steps, none merged tokens: both images are the same." in summary(between)
    capped = studio.make(request(settings=replace(ALWAYS, ratio=0.9)))
    assert "merging at the cap" in summary(capped)


def test_a_stopped_job_leaves_the_model_unpatched(tmp_path: Path) -> None:
    pipe = make_sd_pipeline()
    studio = Studio(lambda name: pipe, tmp_path)

    def stop_at_two(words: str, done: float, total: int) -> None:
        if words == "Merged image: step 2 of 9":
            studio.stop("me")

    asked = request(settings=ALWAYS, steps=9)
    with pytest.raises(StoppedError, match=r"Stopped. Merged image: step 2 of 9"):
        studio.make(asked, "me", stop_at_two)
    with pytest.raises(StoppedError):
        studio.make(asked, "me")  # waiting when it was stopped
    assert not studio.results
    plain = sample(make_sd_pipeline(), "a cat", size=(128, 128), steps=1)
    assert same(sample(pipe, "a cat", size=(128, 128), steps=1).image, plain.image)
    studio.begin("me")
    assert studio.make(asked, "me").reused


def test_presets_are_those_of_the_kind_of_model(tmp_path: Path) -> None:
    pipes = {"unet": make_sd_pipeline, "transformer": lambda: PIPELINES["flux"]()[0]}
    studio = Studio(lambda name: pipes[name](), tmp_path)
    inputs = Inputs({"model": "model"}, {name: name for name in OPTIONS})
    events = Events(studio, inputs, SimpleNamespace(status="status"), {})
    for kind in pipes:
        expected = Settings(**presets.preset("fast", kind))
        assert events.begin_with("fast", kind) == shown_values(expected)


def test_jobs_take_turns(studio: Studio) -> None:
    running: list[str] = []
    order: list[str] = []

    def make(owner: str) -> None:
        def watch(words: str, done: float, total: int) -> None:
            running.append(owner)
            order.append(owner)
            assert set(running) == {owner}
            running.pop()

        studio.make(request(settings=ALWAYS, seed=len(owner)), owner, watch)

    threads = [threading.Thread(target=make, args=(owner,)) for owner in ("a", "bb")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(studio.results) == 2
    assert order == sorted(order) or order == sorted(order, reverse=True)


def test_the_form_has_every_option_with_its_documentation() -> None:
    assert set(OPTIONS) == {field.name for field in fields(Settings)} - {"seed"}
    assert list(OPTIONS)[: len(FIRST)] == list(FIRST)
    assert OPTIONS["sy"].doc == "Height of the cells, in tokens."
    assert all(option.doc.endswith(".") for option in OPTIONS.values())


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: arguments(presets.options_of(one)))
def test_forms_and_lines_give_the_settings_back(settings: Settings) -> None:
    form = read_form(shown_values(settings), seed=settings.seed)
    assert plain(form) == plain(settings)
    line = command_line("it's a cat", settings, steps=3, size=(64, 96), negative=None)
    command = parse(shlex.split(line)[1:])
    assert (command.prompt, command.sampling.steps, command.sampling.size) == (
        ("it's a cat",),
        3,
        (64, 96),
    )
    assert plain(command.merge.checked()) == plain(settings)
    patched = make_sd_pipeline()
    if settings.depth is None:  # which only transformers have
        eval(python_line(presets.options_of(settings)), {"tomesd": tomesd, "pipe": patched})
        assert tomesd.patch.patch_of(patched.unet).asked == settings


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        ({"sx": 2.5}, "sx=2.5: must be an int of at least 1"),
        ({"end": "late"}, "end='late': must be None or a number between 0 and 1"),
        ({"depth": "0.5"}, "depth=[0.5]: must be None or two numbers"),
        ({"level_ratios": "1: much"}, "level_ratios={1: 'much'}: must be None or a dict"),
        ({"schedule": "0.5, grid: much"}, "schedule=[0.5, ('grid', 'much')]: must be None or"),
        ({"schedule": "fast"}, "schedule='fast': must be None or 'linear', 'cosine'"),
    ],
)
def test_what_is_typed_wrong_is_named(shown: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        read_form({**shown_values(Settings()), **shown})


def test_the_command_refuses_and_warns(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    assert run(["ui", "--model", "no/such/model"]) == 2
    assert run(["ui", "--compile"]) == 2
    assert "compile: each change" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(["ui"]) == 2
    assert "gradio is not installed: pip install 'tomesd[ui]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "who"),
    [
        ([], None),
        (["--host", "localhost"], None),
        (["--host", "::1"], None),
        (["--host", "0.0.0.0"], "anyone who can reach this address"),
        (["--share"], "anyone who has the link"),
    ],
)
def test_a_public_page_comes_with_a_warning(words: list[str], who: str | None) -> None:
    console = Console(file=io.StringIO(), width=200)
    parse(["ui", *words]).warn(console)
    said = console.file.getvalue()
    assert said == "" if who is None else f"Warning: {who}" in said


@pytest.fixture(scope="module")
def address(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a page on a tiny model, as the command serves it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("served")
    presets.save(folder / "merged.json", ALWAYS)
    words = ["--model", model, "--size", "128", "128", "--steps", "3", "--port", str(port)]
    words += ["--settings", str(folder / "merged.json")]
    console = Console(file=io.StringIO(), width=200)
    page = parse(["ui", *words]).serve(console, folder)
    assert f"http://127.0.0.1:{port}/" in console.file.getvalue()
    yield f"http://127.0.0.1:{port}/"
    page.close(verbose=False)


@pytest.mark.parametrize(
    ("words", "preset"), [([], "fast"), (["--preset", "quality"], "quality")], ids=["best", "given"]
)
def test_the_page_begins_with_a_preset(
    words: list[str], preset: str, model: str, tmp_path: Path
) -> None:
    page = parse(["ui", "--model", model, *words]).serve(Console(file=io.StringIO()), tmp_path)
    shown = {block.elem_id: getattr(block, "value", None) for block in page.blocks.values()}
    page.close(verbose=False)
    assert shown["preset"] == preset
    assert shown["option-reuse"] == "2"
    assert shown["option-reuse_start"] == {"fast": "", "quality": "0.5"}[preset]


def test_the_page_begins_without_a_preset_where_apply_patch_takes_none(
    model: str, tmp_path: Path
) -> None:
    """As with times that do not count down, for which no step can be left out."""
    copy = shutil.copytree(model, tmp_path / "model")
    ScoreSdeVeScheduler().save_pretrained(copy / "scheduler")
    index = copy / "model_index.json"
    classes = json.loads(index.read_text())
    classes["scheduler"] = ["diffusers", "ScoreSdeVeScheduler"]
    index.write_text(json.dumps(classes))
    page = parse(["ui", "--model", str(copy)]).serve(Console(file=io.StringIO()), tmp_path)
    shown = {block.elem_id: getattr(block, "value", None) for block in page.blocks.values()}
    page.close(verbose=False)
    assert (shown["preset"], shown["option-reuse"]) == (DEFAULTS, "")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium")
    if path is None and not os.environ.get("CI"):
        pytest.skip("there is no chromium to open the page in: apt-get install chromium")
    assert path is not None, "CI needs chromium: apt-get install chromium"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page, which may ask for nothing outside of this machine and may log no error."""
    page = browser.new_page(viewport={"width": 1360, "height": 900})
    page.set_default_timeout(60_000)
    outside: list[str] = []
    problems: list[str] = []
    page.on("request", lambda asked: outside.append(asked.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    open_page(page, address)
    yield page
    page.close()
    assert [url for url in outside if not url.startswith((address, "data:", "blob:"))] == []
    assert problems == []


def open_page(page: Any, address: str) -> None:
    # What was made last is shown at once; until then, its line of status could pass for a new one.
    with page.expect_response(lambda response: "/run/" in response.url):
        page.goto(address)
    page.wait_for_selector("#generate:not([disabled])")
    page.wait_for_function("document.querySelector('#prompt textarea').value != ''")


def choose(page: Any, name: str, value: str) -> None:
    page.click(f"#{name} input")
    page.get_by_role("option", name=value, exact=True).click()


def generate(page: Any, expected: str) -> str:
    """Presses the button, and waits for a new line of status with these words."""
    page.evaluate("document.querySelectorAll('.note').forEach(note => note.dataset.old = true)")
    page.click("#generate")
    page.wait_for_selector(f"#status .note:not([data-old]):has-text('{expected}')")
    page.wait_for_selector("#generate:not([disabled])")
    return page.inner_text("#status")


def pictures(page: Any, where: str) -> list[Image.Image]:
    """The pictures in a part of the page, as the browser got them."""
    page.wait_for_selector(f"{where} img")
    addresses = page.eval_on_selector_all(f"{where} img", "all => all.map(image => image.src)")
    return [Image.open(io.BytesIO(page.request.get(url).body())) for url in addresses]


def test_both_images_are_shown_and_compared(page: Any) -> None:
    page.fill("#seed input", "11")
    said = generate(page, "Of 3 steps, 3 merged tokens")
    assert "times as fast" in said
    left, right = pictures(page, "#slider")
    assert left.size == right.size == (128, 128)
    assert not same(left, right)
    assert {json.loads(image.info["tomesd"])["seed"] for image in (left, right)} == {11}
    table = page.inner_text("#numbers")
    assert all(words in table for words in ("unmerged", "Peak memory", "Tokens"))
    page.click("#lines button")
    page.wait_for_selector("#command >> text=tomesd generate")
    line = "tomesd.apply_patch(pipe, ratio=0.5, seed=11, when='always')"
    assert line in page.inner_text("#python")
    assert "--seed 11" in page.inner_text("#command")


def test_the_switch_for_large_images(page: Any) -> None:
    page.check("#hires input")
    generate(page, "merged tokens")
    left, right = pictures(page, "#slider")
    assert left.size == right.size == (256, 256)
    page.click("#lines button")
    page.wait_for_selector("#command >> text=--hires 2")


def test_the_step_slider_changes_the_map(page: Any) -> None:
    generate(page, "Of 3 steps, 3 merged tokens")
    before, words = pictures(page, "#map")[0], page.inner_text("#map-words")
    page.focus("#step input[type=range]")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#map-words >> text=Step 3 of 3")
    assert words.startswith("Step 2 of 3")
    page.wait_for_timeout(300)
    assert not same(before, pictures(page, "#map")[0])


def test_stop_stops_between_steps(page: Any) -> None:
    page.fill("#steps input", "400")
    page.click("#generate")
    page.wait_for_selector("#slider >> text=Unmerged image: step")
    page.click("#stop")
    page.wait_for_selector("#status .note:has-text('Stopped.')")
    done = int(re.search(r"step (\d+) of 400", page.inner_text("#status")).group(1))
    assert 0 < done < 400
    page.wait_for_selector("#generate:not([disabled])")
    page.fill("#steps input", "3")
    generate(page, "erged")


def test_bad_input_is_answered_with_a_sentence(page: Any) -> None:
    for field, value, message in (
        ("#option-end textarea", "7", "end=7.0: must be None or a number between 0 and 1"),
        ("#width textarea", "100", "width=100: must be a multiple of"),
        ("#height textarea", "tall", "height=tall: must be a whole number"),
        ("#guidance textarea", "nan", "guidance=nan: must be a number"),
        ("#steps input", "0", "steps=0: must be at least 1"),
        ("#prompt textarea", " ", "prompt: must not be empty"),
    ):
        before = page.input_value(field)
        page.fill(field, value)
        assert generate(page, message).startswith(message)
        page.fill(field, before)
    generate(page, "erged")


def test_after_a_reload_the_page_works_and_shows_what_was_made(page: Any, address: str) -> None:
    page.fill("#seed input", "21")
    generate(page, "erged")
    page.fill("#steps input", "400")
    page.click("#generate")
    page.wait_for_selector("#slider >> text=image: step")
    open_page(page, address)  # the job is stopped with the page it belonged to
    page.wait_for_selector("#gallery img")
    assert json.loads(pictures(page, "#slider")[0].info["tomesd"])["seed"] == 21
    count = page.locator("#gallery img").count()
    page.fill("#seed input", "22")
    generate(page, "erged")
    page.wait_for_function(f"document.querySelectorAll('#gallery img').length > {count}")
    page.locator("#gallery button:has(img)").nth(1).click()
    page.click("#lines button")
    page.wait_for_selector("#command >> text=--seed 21")


def test_settings_are_saved_and_loaded(page: Any, tmp_path: Path) -> None:
    choose(page, "preset", "balanced")
    ratio = "document.querySelector('#option-ratio input[type=number]')"
    page.wait_for_function(f"{ratio}.value == '0'")
    page.fill("#seed input", "4")
    with page.expect_download() as download:
        page.click("#save")
    saved = tmp_path / "settings.json"
    download.value.save_as(saved)
    assert Settings(**presets.load(saved)) == Settings(**presets.preset("balanced"), seed=4)

    presets.save(saved, Settings(ratio=0.3, level_ratios={1: 0.25}, seed=9))
    page.set_input_files("input[type=file]", saved)
    page.wait_for_selector("#status .note:has-text('Loaded settings.json')")
    assert page.input_value("#option-ratio input[type=number]") == "0.3"
    assert page.input_value("#option-end textarea") == ""
    assert page.input_value("#seed input") == "9"

    bad = tmp_path / "bad.json"
    bad.write_text('{"format": 1, "settings": {"ratio": 2}}')
    page.set_input_files("input[type=file]", bad)
    page.wait_for_selector("#status .note.error:has-text('bad.json')")
    assert "ratio=2: must be a number between 0 and 1" in page.inner_text("#status")


def test_a_phone_does_not_scroll_sideways(browser: Any, address: str) -> None:
    phone = browser.new_page(viewport={"width": 390, "height": 844}, has_touch=True)
    open_page(phone, address)
    generate(phone, "erged")
    for part in ("#others", "#lines"):
        phone.click(f"{part} button")
    phone.wait_for_selector("#python >> text=tomesd.apply_patch")
    width = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
    assert phone.evaluate(width) <= 390
    # What is clipped would not scroll: nothing may reach over the edge either.
    over = """[...document.querySelectorAll('.gradio-container :is(div, img, button, table, p)')]
        .filter(one => one.offsetParent && one.getBoundingClientRect().right > 391)
        .filter(one => !one.closest('#slider, .cm-editor'))
        .map(one => one.outerHTML.slice(0, 200))"""
    assert phone.evaluate(over) == []
    phone.close()
