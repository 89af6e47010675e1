"""The tables and figures in the documents say what the rows say, and their links lead somewhere."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import update_docs
from doc_tables import FIGURES, TABLES, Results

from tomesd import Settings

ROOT = Path(__file__).parent.parent


@pytest.fixture
def results(tmp_path: Path) -> Any:
    """Writes rows to a file of results; returns a function that makes the lines of a table."""

    def make(file: str, rows: list[dict[str, Any]], table: str) -> list[list[str]]:
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [list(line) for line in TABLES[table](Results(tmp_path)).lines]

    return make


def test_transformers_are_shown_with_the_share_of_the_bound_that_is_recovered(
    results: Any,
) -> None:
    def row(variant: str, label: str, ratio: float | None, ms: float, mib: float) -> dict[str, Any]:
        settings = None if ratio is None else {"ratio": ratio}
        return {
            **{"run": "a", "date": "2026-01-01", "section": "transformers", "setting": "Flux"},
            **{"mode": "eager", "variant": variant, "label": label, "settings": settings},
            **{"seconds": ms / 1000, "spread": 0.0, "peak_mib": mib, "error": None},
        }

    rows = [row("unpatched", "unpatched", None, 100, 400), row("tomesd", "ratio 0.5", 0.5, 62, 440)]
    assert results("dit", rows, "transformers in short")[0] == [
        "Flux",
        "100.0",
        "62.0 (1.61x)",
        "-",
    ]
    rows.append(row("free", "bound 0.5", 0.5, 60, 390))
    rows[1]["spread"] = 0.003  # the others have been measured once
    assert results("dit", rows, "transformers")[0][1:5] == [
        *("100.0", "62.0 ± 3.0 (1.61x)", "60.0", "95 %"),
    ]
    assert results("dit", rows, "transformers")[0][-1] == "440 MiB (1.10x)"
    assert len(results("dit", rows, "transformers")[0]) == 9


# The documents


def test_the_documents_are_up_to_date() -> None:
    update_docs.main(["--check"])


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("demo_model/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for link in links:
        name, _, anchor = link.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), link
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), link


def anchors(text: str) -> set[str]:
    """What the headings of a page are called in its address."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_options_of_the_readme_are_options() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", text, re.MULTILINE)
    defaults = {one.name: str(one.default) for one in dataclasses.fields(Settings)}
    assert len(rows) == 9
    assert [default for _, default in rows] == [defaults.get(name, "None") for name, _ in rows]
    assert {name for name, _ in rows} - defaults.keys() == {"preset"}


def test_every_table_and_figure_is_used() -> None:
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in update_docs.DOCUMENTS)
    assert {found["name"] for found in update_docs.MARKED.finditer(text)} == set(TABLES)
    assert all(f"figures/{name}" in text for name in FIGURES)


def test_what_is_out_of_date_is_updated(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "results").symlink_to(ROOT / "benchmarks" / "results")
    (tmp_path / "docs").mkdir()
    marked = "By hand.\n\n<!-- table: {} -->\nold\n<!-- end -->\n\nBy hand, too.\n"
    for name in update_docs.DOCUMENTS:
        (tmp_path / name).write_text(marked.format("the paper's set-up"))
    where = ["--root", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"README.md, docs/options.md.*search.svg: out of date"):
        update_docs.main([*where, "--check"])
    update_docs.main(where)
    update_docs.main([*where, "--check"])
    readme, performance = (
        (tmp_path / name).read_text() for name in ("README.md", "docs/performance.md")
    )
    assert readme.startswith("By hand.\n\n<!-- table: the paper's set-up -->\n| r % |")
    assert readme.endswith("|\n<!-- end -->\n\nBy hand, too.\n")
    assert "torch 2.11.0+cu130" in performance and "torch 2.11.0+cu130" not in readme
    drawn = {name: (tmp_path / "docs" / "figures" / name).read_bytes() for name in FIGURES}
    update_docs.main(where)
    for name, picture in drawn.items():
        assert (tmp_path / "docs" / "figures" / name).read_bytes() == picture

    (tmp_path / "README.md").write_text(marked.format("of wishes"))
    with pytest.raises(SystemExit, match="there is no table 'of wishes'"):
        update_docs.main(where)


# Speed


def timed(label: str, seconds: float | None, **more: Any) -> dict[str, Any]:
    kinds = ("unpatched", "original", "free")
    return {
        "run": "a",
        "date": "2025-01-01T00:00:00+00:00",
        "section": "graph",
        "setting": "a setting",
        "mode": "graph",
        "variant": label if label in kinds else "tomesd",
        "label": label,
        "settings": None if label == "unpatched" else {"ratio": 0.5},
        "seconds": seconds,
        "spread": 0.0001,
        "peak_mib": 1000.0,
        "error": None if seconds else "OOM",
        **more,
    }


def test_the_bound_and_what_is_recovered(results: Any) -> None:
    seconds = {"unpatched": 0.04, "original": 0.041, "free": 0.03, "plan kept": 0.031}
    rows = [timed(label, value) for label, value in seconds.items()]
    rows.append(timed("plan every step", None))
    older = [{**row, "run": "b", "date": "2024", "seconds": 1.0} for row in rows]
    lines = results("gpu", [*rows, *older], "graph")
    times = ["40.0", "41.0", "30.0", "31.0", "OOM", "-", "-"]
    assert lines == [["a setting", *times, "90 %", "-", "-", "-10 %"]]


def test_compiled_settings_stand_in_the_order_of_the_others(results: Any) -> None:
    results("gpu", [timed("unpatched", 0.04, setting=name) for name in "bac"], "graph")
    rows = []
    for mode in ("compile-autotune", "compile"):
        common = {"section": "compile", "mode": mode}
        rows += [timed("unpatched", 0.04, setting=name, **common) for name in "abc"]
        rows += [timed("whole stacks", 0.02, setting=name, **common) for name in "abc"]
    lines = results("compiled", rows, "compiled")
    names = [(name, mode) for mode in ("default", "autotune") for name in "bac"]
    cells = ["40.0 ± 0.1", "-", "-", "20.0 ± 0.1 (2.00x)"]
    assert lines == [[*name, *cells] for name in names]


def test_what_was_left_alone_is_marked(results: Any) -> None:
    common = {"section": "pipelines", "mode": "eager"}
    rows = [timed("unpatched", 1.0, **common), timed("preset fast", 0.8, **common)]
    rows.append(timed("tomesd", 1.0, **common, left_alone=True))
    [line] = results("gpu", rows, "whole images")
    assert line[1:3] == ["1,000 ± 0.1", "1,000 ± 0.1 (1.00x, left alone)"]
    assert line[3:] == ["-", "-", "800.0 ± 0.1 (1.25x)"]


def test_time_and_memory_of_the_paper_are_per_image(results: Any) -> None:
    common = {"section": "paper", "mode": "eager", "images": 8}
    rows = [timed("unpatched", 0.08, **common, peak_mib=8192.0)]
    rows.append(timed("tomesd", 0.04, **common, peak_mib=2048.0))
    rows.append(timed("original", None, **common))
    lines = results("gpu", rows, "the paper's set-up")
    assert lines[0] == ["unpatched", "0.50", "1.00", "-", "-"]
    assert lines[1] == ["50", "OOM", "-", "0.25 (2.00x)", "0.25 (0.25x)"]


# Quality


def judged(section: str, variant: str, label: str, **values: Any) -> dict[str, Any]:
    """A row; of a value, the interval is as wide as the value's tenth, each way."""
    row: dict[str, Any] = {
        "section": f"quality-{section}",
        "setting": values.pop("group", ""),
        "variant": variant,
        "label": label,
        "settings": values.pop("settings", {"ratio": 0.5} if variant != "unmerged" else {}),
        "place": values.pop("place", 0),
        "commit": "abc",
    }
    for name, value in values.items():
        row |= {name: value, f"{name}_low": 0.9 * value, f"{name}_high": 1.1 * value}
    return row


def test_speeds_are_joined_to_images(results: Any) -> None:
    rows = []
    for place, variant in enumerate(("unmerged", "original", "tomesd")):
        rows.append(judged("paper", variant, variant, fid=30.0, lpips=0.1, place=place))
        speed = {"speedup": 1 + place / 2, "speedup_unfused": 1 + place / 2} if place else {}
        row = judged("speed", variant, "another name", step_ms_unfused=2.0, **speed)
        rows.append({**row, "mib_unfused": 40.0 / (1 + place)})
    lines = results("quality", [*reversed(rows)], "the paper's ratios")
    assert [line[:2] for line in lines] == [
        ["0", "unmerged"],
        ["50", "tomesd 0.1.3"],
        ["50", "this library"],
    ]
    assert lines[0][2:5] == ["30.00 ± 3.00", "-", "-"]
    assert lines[0][-3:] == ["2.00 ms", "40.0 MiB", "1"]
    assert lines[1][-3:] == ["2.00 ms (67 %)", "20.0 MiB (50 %)", "1.50 ± 0.15"]
    assert lines[2][-3:] == ["2.00 ms (50 %)", "13.3 MiB (33 %)", "2.00 ± 0.20"]


def test_the_last_of_equal_rows_counts(results: Any) -> None:
    rows = [judged("front", "tomesd", "a", lpips=v, speedup=1.1) for v in (0.3, 0.4)]
    [line] = results("quality", rows, "quality against speed")
    assert line[:2] == ["a", "0.4000 ± 0.0400"]


def test_settings_are_sorted_by_library_and_closeness(results: Any) -> None:
    scores = {"a": 0.3, "b": 0.1}
    rows = [judged("front", "tomesd", name, lpips=v, speedup=1.1) for name, v in scores.items()]
    rows.append(judged("front", "original", "0.1.3 0.5", lpips=0.5, speedup=1.1))
    rows += [judged("front", "unmerged", "unmerged"), judged("front", "tomesd", "untimed")]
    lines = results("quality", rows, "quality against speed")
    assert [line[0] for line in lines] == ["unmerged", "tomesd 0.1.3: 0.5", "b", "a"]
    assert [line[-2:] for line in lines] == [["1", "1"], *[["1.10x", "-"]] * 3]


def test_the_search_shows_its_front(results: Any) -> None:
    points = {"a": (1.1, 1.4, 0.1), "b": (1.3, 1.2, 0.2), "c": (1.2, 1.3, 0.3)}
    rows = [
        judged("search", "tomesd", name, speedup=fused, speedup_unfused=unfused, lpips=lpips)
        for name, (fused, unfused, lpips) in points.items()
    ]
    lines = results("quality", rows, "search")
    assert [[line[0], *line[-2:]] for line in lines] == [
        ["a", "**1.10x**", "**1.40x**"],
        ["b", "**1.30x**", "1.20x"],
    ]


def test_ablations_stand_beside_the_papers(results: Any) -> None:
    labels = ("self-attention", "+ cross-attention")
    rows = [judged("ablations", "tomesd", label, fid=30.0, group="layers") for label in labels]
    rows.append(judged("ablations", "tomesd", "level 1", fid=30.0, group="levels"))
    lines = results("quality", rows, "layers")
    assert [line[:3] for line in lines] == [
        ["self-attention", "33.73", "30.00 ± 3.00"],
        ["+ cross-attention", "-", "30.00 ± 3.00"],
    ]
