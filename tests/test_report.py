"""The page of `tomesd report`: what it shows, and that it needs nothing but itself."""

import base64
import io
import json
import shutil
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from zoo_diffusers import make_sd_pipeline

import tomesd
from tomesd.cli.eval import _print
from tomesd.cli.run import run as command
from tomesd.evaluation import (
    METRICS,
    Definition,
    Estimate,
    Judges,
    Result,
    Run,
    Sampling,
    Variant,
    evaluate,
    make_items,
    make_variants,
    read_results,
)
from tomesd.evaluation.estimates import speedup_estimate
from tomesd.evaluation.figures import draw_pareto, draw_spread, pareto_front
from tomesd.evaluation.metrics import Pictures, QualityMetric
from tomesd.evaluation.report import _sureness, write_report
from tomesd.evaluation.results import labels_of, methods_of
from tomesd.evaluation.runs import describe_cpu, versions

PROMPTS = [f'a <b>{animal}</b> & "friends"' for animal in ("cat", "dog", "fox", "pig")]
# On a CPU and at this size, merging does not pay, and would not be done.
ALWAYS = tomesd.Settings(when="always")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("runs") / "run")
    definition = Definition(
        model={"model": "tiny"},
        sampling=Sampling(64, 64, steps=2),
        prompts="by hand",
        items=tuple(make_items(PROMPTS)),
        batch=1,
        variants=tuple(make_variants((0.3, 0.6), ALWAYS, {"use_rand": [True, False]})),
        device="cpu",
        versions=versions(),
    )
    evaluate(make_sd_pipeline(), run, definition, Judges.load(inception=None))
    return run


class Page(HTMLParser):
    """What a browser would find on a page."""

    VOID = frozenset({"img", "meta", "br", "input", "link", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.open: list[str] = []
        self.words: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.words.setdefault(self.open[-1], []).append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def images(self) -> list[dict[str, Any]]:
        return [attributes for tag, attributes in self.tags if tag == "img"]


@pytest.fixture(scope="module")
def page(run: Run) -> Page:
    path, missing = write_report(run, worst=2, typical=1)
    assert missing == []
    assert path == run.path / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert page.open == [], "everything that opens must close"
    return page


def test_the_page_needs_nothing_else(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "base")
        for name in ("src", "href", "srcset", "data"):
            if name in attributes:
                assert attributes[name].startswith("data:image/")
    style = "".join(page.words["style"])
    script = "".join(page.words["script"])
    assert "url(" not in style and "@import" not in style
    assert "http" not in style + script and "fetch" not in script
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in (
        page.tags
    )


def test_every_picture_opens_and_has_words(page: Page) -> None:
    images = page.images()
    for attributes in images:
        kind, _, data = attributes["src"].partition(";base64,")
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            image.load()
            assert image.format.lower() == kind.removeprefix("data:image/")
        assert attributes["alt"]
    # Without a script: all variants of three images, and the plots.
    assert sum(a["src"].startswith("data:image/webp;base64") for a in images) == 3 * 5


def test_the_plots_are_files_too(run: Run, page: Page) -> None:
    names = {path.name for path in (run.path / "figures").iterdir()}
    assert names == {
        "lpips_speedup.png",
        "psnr_speedup.png",
        "ssim_speedup.png",
        "lpips_spread.png",
    }
    embedded = [a["src"].partition("base64,")[2] for a in page.images() if "png" in a["src"][:20]]
    written = [base64.b64encode((run.path / "figures" / name).read_bytes()) for name in names]
    assert sorted(embedded) == sorted(data.decode() for data in written)


def test_the_table_has_the_numbers_of_the_run(run: Run, page: Page) -> None:
    head, base, *rows = page.rows
    assert head[0] == "Method" and head[-1].startswith("Time (s/step)")  # no memory of a CPU
    assert base[0].startswith("Baseline")
    assert len(rows) == 4
    results = {
        (r.variant.settings["use_rand"], r.variant.ratio): r for r in read_results(run)[0][1:]
    }
    method = ""
    column = next(i for i, words in enumerate(head) if words.startswith("LPIPS"))
    for row in rows:
        if len(row) == len(head):
            method, row = row[0], row[1:]
        result = results["True" in method, float(row[0]) / 100]
        lpips = result.metrics["lpips"]
        assert row[column - 1] == f"{lpips.value:.4f}{lpips.low:.4f} to {lpips.high:.4f}"
        assert row[-2].startswith(f"{result.seconds:.3f}")
        assert row[-1] == f"{result.step_seconds:.3f}"


def test_the_worst_come_first(run: Run, page: Page) -> None:
    worst: dict[int, float] = {}
    for row in read_results(run)[1]:
        worst[row["index"]] = max(worst.get(row["index"], 0), row.get("lpips", 0))
    order = sorted(worst, key=lambda index: -worst[index])
    assert page.words["h3"] == [PROMPTS[index] for index in order[:3]]


def test_everything_that_was_set_is_told(page: Page) -> None:
    told = " ".join(page.words["dd"])
    assert versions()["torch"] in told
    settings = " ".join(page.words["code"])
    lines = [line for line in page.words["code"] if line.startswith("tomesd.apply_patch(pipe, ")]
    assert len(lines) == 4
    assert settings.count("use_rand=False") == 2
    assert "use_rand=True" not in settings, "a line has what differs from the defaults"


def test_the_page_is_the_same_when_written_again(run: Run, page: Page) -> None:
    before = (run.path / "report.html").read_bytes()
    write_report(run, worst=2, typical=1)
    assert (run.path / "report.html").read_bytes() == before


def test_the_command(run: Run, tmp_path: Path, capsys) -> None:
    assert command(["report", str(run.path), "--worst", "1", "--typical", "0"]) == 0
    assert "report.html" in capsys.readouterr().out
    assert len(Page((run.path / "report.html").read_text()).words["h3"]) == 1
    for words, message in (
        ([str(tmp_path)], "not the folder of an evaluation"),
        ([str(run.path), "--worst", "-1"], "worst=-1"),
    ):
        assert command(["report", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_a_run_that_is_not_finished_is_refused(run: Run, tmp_path: Path, capsys) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "run.json").write_bytes((run.path / "run.json").read_bytes())
    assert command(["report", str(half)]) == 2
    assert "has tomesd eval finished?" in capsys.readouterr().err
    (half / "run.json").write_text(json.dumps({"format": 99}))
    assert command(["report", str(half)]) == 2
    assert "another version" in capsys.readouterr().err


def damage(path: Path, line: int, words: str) -> None:
    lines = path.read_text().splitlines()
    lines[line - 1] = words
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("file", "line", "words", "lost"),
    [
        ("results.jsonl", 2, "{'not': json", "the row of ratio-0.3_use_rand-True is missing"),
        ("results.jsonl", 2, "[1, 2]", "the row of ratio-0.3_use_rand-True is missing"),
        ("images.jsonl", 6, '{"variant": "ratio-0.3_use_rand-True"}', "1 of 4 images of ratio-0.3"),
        ("images.jsonl", 1, "\x00", "1 of 4 images of unmerged"),
    ],
)
def test_what_is_damaged_is_named_and_the_rest_is_shown(
    run: Run, tmp_path: Path, capsys, file: str, line: int, words: str, lost: str
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    damage(copy / file, line, words)
    assert command(["report", str(copy), "--worst", "4"]) == 0
    errors = capsys.readouterr().err
    page = Page((copy / "report.html").read_text())
    for told in (errors, " ".join(page.words["li"])):
        assert f"{file}, line {line}: damaged, left out" in told
        assert lost in told
    rows = 3 if file == "results.jsonl" else 4
    assert len(page.rows) == 2 + rows
    assert len(page.words["h3"]) == (3 if line == 1 else 4)


def test_pictures_that_are_gone_are_named(run: Run, tmp_path: Path, capsys) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    gone = copy / "images" / "ratio-0.3_use_rand-True" / "00002.png"
    gone.write_bytes(b"not a picture")
    assert command(["report", str(copy), "--worst", "4"]) == 0
    assert f"{gone} cannot be read as an image" in capsys.readouterr().err


def test_without_the_unmerged_row_there_is_no_page(run: Run, tmp_path: Path, capsys) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    damage(copy / "results.jsonl", 1, "{")
    assert command(["report", str(copy)]) == 2
    error = capsys.readouterr().err
    assert "results.jsonl, line 1: damaged" in error and error.count("\n") == 1


def test_the_worst_are_a_part_of_the_images(run: Run, page: Page) -> None:
    path, _ = write_report(run)
    few = Page(path.read_text())
    assert len(few.words["h3"]) == 2  # one of four, and one from the middle
    assert "Worst cases" in few.words["h2"]
    path, _ = write_report(run, worst=4)
    assert "All images" in Page(path.read_text()).words["h2"]


def test_the_page_tells_when_where_and_by_what(run: Run, tmp_path: Path) -> None:
    copy = Run(tmp_path / "run")
    shutil.copytree(run.path, copy.path)
    line, day = "tomesd eval --ratios 0.3", "2026-01-02 03:04 UTC"
    made = replace(copy.load(), command=line, started=day, dtype="float32", device=describe_cpu())
    copy._write(made)
    page = Page(write_report(copy)[0].read_text())
    told = " ".join([*page.words["dd"], *page.words["p"]])
    assert line in page.words["code"]
    for words in (day, "float32", describe_cpu()):
        assert words in told
    assert "[" not in told and "{" not in told, "settings in words, not as JSON"


def test_the_speed_up_is_that_of_the_seconds_beside_it(run: Run) -> None:
    base, *merged = read_results(run).results
    for result in merged:
        assert result.speedup.value == pytest.approx(base.seconds / result.seconds)


def test_few_times_have_no_interval_and_the_page_says_so() -> None:
    few = speedup_estimate(np.array([9.7, 9.8]), np.array([8.9, 8.0]))
    assert (few.low, few.high) == (None, None)
    assert "too few batches" in few.times_faster() and "too few batches" in _sureness(few)
    rng = np.random.default_rng(0)
    base, same = rng.normal(10, 1, 12), rng.normal(10, 1, 12)
    assert "may be none" in _sureness(speedup_estimate(base, same))
    assert "may be none" not in _sureness(speedup_estimate(base, same / 2))


points = st.tuples(st.integers(1, 6).map(float), st.integers(0, 6).map(float))


@given(st.lists(points, min_size=1, max_size=12), st.sampled_from(["less", "more"]))
def test_the_front_is_what_no_other_beats(points: list, better: str) -> None:
    sign = 1 if better == "less" else -1

    def beaten(point: tuple[float, float]) -> bool:
        return any(
            other != point and other[0] >= point[0] and sign * other[1] <= sign * point[1]
            for other in points
        )

    front = [points[i] for i in pareto_front(points, better)]
    assert sorted(front) == front
    assert set(front) == {point for point in points if not beaten(point)}
    assert len(set(front)) == len(front)


def test_methods_are_told_apart_by_what_differs() -> None:
    def result(name: str, kind: Any, **settings: Any) -> Result:
        return Result(Variant(name, kind, settings), 4, 1.0, 0.1, Estimate(1.2), 10.0, 0, {})

    results = [
        result("unmerged", "unmerged"),
        result("o", "original", ratio=0.5, sx=2),
        result("a", "merged", ratio=0.5, sx=2, seed=0),
        result("b", "merged", ratio=0.25, sx=2, seed=0),
        result("c", "merged", ratio=0.5, sx=4, seed=0),
    ]
    methods = {m: [r.variant.name for r in rows] for m, rows in methods_of(results).items()}
    assert methods == {"tomesd 0.1.3": ["o"], "tomesd, sx 2": ["b", "a"], "tomesd, sx 4": ["c"]}
    labels = labels_of(results)
    assert labels["unmerged"] == "unmerged"
    assert labels["b"] == "25 %, tomesd, sx 2"
    assert len(set(labels.values())) == 5
    assert list(methods_of(results[2:])) == ["sx 2", "sx 4"]
    assert labels_of([results[0], results[2]]) == {"unmerged": "unmerged", "a": "50 %"}
    nothing = result("a", "merged", ratio=0.0, coarse=0.35, reuse=6, reuse_start=0.3)
    assert labels_of([results[0], nothing])["a"] == "coarse 0.35, reuse 6"


def test_a_label_says_nothing_twice_and_no_defaults() -> None:
    def result(name: str, **settings: Any) -> Result:
        variant = Variant(name, "merged", {"coarse": None, "reuse": None} | settings)
        return Result(variant, 4, 1.0, 0.1, Estimate(1.2), 10.0, 0, {})

    results = [
        result("a", ratio=0.5),
        result("b", ratio=0.0, coarse=0.35, reuse=6),
        result("c", ratio=0.5, coarse=0.35),
    ]
    assert labels_of(results) == {
        "a": "50 %",
        "b": "coarse 0.35, reuse 6",
        "c": "50 %, coarse 0.35",
    }
    assert list(methods_of(results)) == ["coarse 0.35, reuse 6", "tomesd", "coarse 0.35"]


def test_long_labels_leave_the_plot_room() -> None:
    lpips = next(metric for metric in METRICS if metric.name == "lpips")
    label = ", ".join(f"{name} 0.5" for name in ("coarse", "end", "reuse_start", "tau") * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of matplotlib, which would cut them off
        assert draw_spread({label: [0.1, 0.2, 0.3]}, lpips) is not None


def test_there_is_no_plot_of_nothing() -> None:
    lpips = next(metric for metric in METRICS if metric.name == "lpips")
    result = Result(Variant("a", "merged", {"ratio": 0.5}), 4, None, None, None, None, 0, {})
    assert draw_pareto([result], lpips) is None


def test_a_new_metric_is_one_entry(run: Run, tmp_path: Path, capsys) -> None:
    """One that is registered is scored, stored, tabled, drawn and put on the page."""

    def brightness(pictures: Pictures, network: Any) -> Any:
        return pictures.pixels.float().mean(dim=(1, 2, 3))

    entry = QualityMetric(
        name="brightness",
        title="Brightness",
        meaning="of each image, mean",
        better="more",
        format="{:.1f}".format,
        against="prompt",
        score=brightness,
    )
    METRICS.append(entry)
    try:
        copy = Run(tmp_path / "run")
        shutil.copytree(run.path, copy.path)
        definition = copy.load()
        results = evaluate(None, copy, definition, Judges.load(inception=None))
        assert all(0 < result.metrics["brightness"].value < 255 for result in results)
        _print(Console(width=200), results, copy.path)
        assert "Brightness ↑" in capsys.readouterr().out
        page = write_report(copy, worst=1, typical=0)[0].read_text()
        assert "Brightness: of each image, mean." in page
        assert (copy.path / "figures" / "brightness_speedup.png").is_file()
    finally:
        METRICS.remove(entry)
