"""The benchmark of quality makes what the pipeline makes; its document says what its rows say."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quality
import quality_jobs as work
import quality_sampling as sampling
import quality_settings as settings
import torch
import update_quality
from quality_bench import Bench

import tomesd
from tomesd.generation import load_pipeline

ROOT = Path(__file__).parent.parent
CAPTIONS = ["a whale on a blue background", "two red apples", "a cat on a plain white background"]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return load_pipeline("demo", device="cpu")


# The images


def by_pipeline(pipe: Any, seeds: range, steps: int) -> np.ndarray:
    images = pipe(
        [CAPTIONS[seed % 3] for seed in seeds],
        height=64,
        width=64,
        num_inference_steps=steps,
        guidance_scale=5.0,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
    ).images
    return np.stack([np.asarray(image) for image in images]).astype(int)


@pytest.mark.parametrize("scheduler", ["ddim", "plms"])
def test_it_makes_what_the_pipeline_makes(pipe: Any, scheduler: str) -> None:
    sampler = sampling.Sampler(pipe, CAPTIONS, size=64, batch=2)
    made = sampler.images(pipe.unet, 4, 3, scheduler).pixels.permute(0, 2, 3, 1).numpy()
    own = pipe.scheduler
    with sampling.scheduled(pipe, scheduler) as solver:
        pipe.scheduler = solver
        wanted = by_pipeline(pipe, range(4), 3)
    pipe.scheduler = own
    assert made.shape == wanted.shape == (4, 64, 64, 3)
    assert np.abs(made - wanted).max() <= 1
    assert np.abs(made[0].astype(int) - made[1]).max() > 50  # they do not all look the same


def test_a_candidate_patches_a_copy(pipe: Any) -> None:
    sampler = sampling.Sampler(pipe, CAPTIONS, size=64, batch=2)
    base = sampler.images(pipe.unet, 2, 2, "ddim").pixels
    candidate = settings.ours("half", ratio=0.5)
    made = sampler.images(candidate.apply(pipe, pipe.unet), 2, 2, "ddim").pixels
    tomesd.apply_patch(pipe, ratio=0.5, when="always")
    try:
        wanted = by_pipeline(pipe, range(2), 2)
    finally:
        tomesd.remove_patch(pipe)
    assert np.abs(made.permute(0, 2, 3, 1).numpy() - wanted).max() <= 1
    assert not torch.equal(made, base)
    assert torch.equal(sampler.images(pipe.unet, 2, 2, "ddim").pixels, base)  # it is as it was
    settings.ours("a threshold", ratio=0.5, tau=0.5).apply(pipe, pipe.unet)  # asks the scheduler


def test_models_take_turns_at_every_step(pipe: Any) -> None:
    sampler = sampling.Sampler(pipe, CAPTIONS, size=64, batch=2)
    calls = []

    def model(name: str) -> Any:
        def call(latents: torch.Tensor, t: torch.Tensor, **_: Any) -> None:
            calls.append((name, int(t)))

        return call

    times = sampler.step_times({"a": model("a"), "b": model("b")}, 1, 4, repeats=2)
    warm_up, rest = calls[:6], calls[6:]
    assert [name for name, _ in calls] == ["a", "b"] * 11
    assert rest[:8] == rest[8:]
    assert warm_up == rest[:2] + rest[4:6] + rest[6:8]  # the first, the middle and the last step
    steps = [t for name, t in rest[:8] if name == "a"]
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == 4
    assert len(times["a"]) == len(times["b"]) == 2


def test_whole_batches_make_the_same_images(pipe: Any) -> None:
    sampler = sampling.Sampler(pipe, CAPTIONS, size=64, batch=2)
    calls = []

    def unet(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(latents))
        return pipe.unet(latents, *args, **kwargs)

    wanted = sampler.images(pipe.unet, 3, 1, "ddim").pixels.int()
    made = sampler.images(unet, 3, 1, "ddim", whole_batches=True).pixels.int()
    assert set(calls) == {4}  # two images, each with and without text
    assert made.shape == wanted.shape and (made - wanted).abs().max() <= 1


def test_repeats_share_the_steps_out(pipe: Any) -> None:
    sampler = sampling.Sampler(pipe, CAPTIONS, size=64, batch=2)
    seen: list[int] = []

    def model(latents: torch.Tensor, t: torch.Tensor, **_: Any) -> None:
        seen.append(int(t))

    times = sampler.step_times({"a": model}, 1, 6, repeats=3, spread=True)
    warm_up, timed = seen[:3], seen[3:]
    assert sorted(timed, reverse=True) == sampler.timesteps(6).tolist()
    assert len(times["a"]) == 3 and timed[0] > timed[1] and timed[2] > timed[3]
    assert warm_up[0] == max(timed) and warm_up[-1] == min(timed)
    seen.clear()
    sampler.step_times({"a": model}, 1, 6, repeats=3, spread=True, every_step_first=True)
    assert seen[:6] == sampler.timesteps(6).tolist() and sorted(seen[6:]) == sorted(seen[:6])


def test_the_ratios_that_would_be_compiled(pipe: Any) -> None:
    def ratios(**options: Any) -> set[float]:
        return settings.ours("", **options).ratios(pipe)

    assert ratios(ratio=0.3) == settings.original(0.3).ratios(pipe) == {0.3}
    assert settings.unmerged().ratios(pipe) == {0.0}
    assert ratios(ratio=0.5, end=0.7) == ratios(ratio=0.5, tau=0.2) == {0.0, 0.5}
    assert ratios(ratio=0.6, ratio_end=0.4, schedule="linear") == {0.4, 0.45, 0.5, 0.55, 0.6}


def test_parts_are_compiled_once_for_all(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_module = torch.nn.Module.compile

    def quickly(module: torch.nn.Module, **options: Any) -> None:
        compile_module(module, backend="aot_eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", quickly)
    torch._dynamo.reset()
    latents, texts = torch.randn(1, 4, 16, 16), torch.randn(1, 77, 256)
    graphs, outputs = [], []
    for candidate in (settings.unmerged(), settings.ours("", ratio=0.5)):
        unet = candidate.apply(pipe, pipe.unet)
        outputs += [
            make(unet)(latents, 500, encoder_hidden_states=texts, return_dict=False)[0]
            for make in (lambda model: model, sampling.compiled_in_parts)
        ]
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert 0 < graphs[0] == graphs[1]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[2], outputs[3])
    assert not torch.allclose(outputs[1], outputs[3])


# The work and its parts


def two_sections() -> list[Any]:
    few = work.Section("ablations", 2, 50, "plms", settings.ablations())
    return [work.Section("paper", 4, 50, "plms", settings.paper()), few]


def test_images_are_made_once() -> None:
    sections = two_sections()
    found = work.jobs([*sections, work.Section("seed", 2, 50, "plms", settings.seed(0.5))])
    labels = [{named.label for _, named in job.rows} for job in found]
    assert {"random in 2x2", "everything", "levels 1-4", "flat 50 %"} in labels
    assert {"this library 0.5", "bipartite 0.5"} in labels
    shared = next(job for job in found if job.candidate.label == "this library 0.5")
    assert shared.largest.images == 4
    other_solver = work.Section("search", 2, 30, "ddim", settings.paper())
    assert len(work.jobs([sections[0], other_solver])) == 2 * len(work.jobs(sections[:1]))


@pytest.mark.parametrize("parts", [1, 2, 3, 40])
def test_parts_make_everything_once(parts: int) -> None:
    found = work.jobs(two_sections())
    shares = [work.of_part(found, (k, parts)) for k in range(1, parts + 1)]
    assert sorted(id(job) for share in shares for job in share) == sorted(map(id, found))
    bases = [any(job.candidate.variant == "unmerged" for job in share) for share in shares]
    assert bases == [True, *[False] * (parts - 1)]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/2/3"])
def test_parts_are_checked(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert quality.parsed(["--part", "2/3"]).part == (2, 3)
    with pytest.raises(SystemExit):
        quality.parsed(["--part", text])
    assert "must be K/N with K from 1 to N" in capsys.readouterr().err


def test_processes_wait_for_the_one_that_makes_images(tmp_path: Path) -> None:
    made = []

    def make() -> Any:
        made.append(1)
        time.sleep(0.3)
        return sampling.Images(torch.full((4, 3, 2, 2), 7, dtype=torch.uint8), 1.5, None)

    def ask(count: int) -> Any:
        return work.made_once(tmp_path / "cache", "base", count, "cpu", make)

    with ThreadPoolExecutor(3) as pool:  # file locks are of open files, so threads will do
        found = list(pool.map(ask, [4, 4, 4]))
    assert len(made) == 1
    assert all(one.pixels.eq(7).all() and one.seconds == 1.5 for one in found)
    before = len(made)
    assert len(ask(3).pixels) == 4 and len(made) == before
    ask(5)
    assert len(made) == before + 1  # there were too few


def test_rows_are_taken_over_once(tmp_path: Path) -> None:
    one, two = (
        made_up("front", "tomesd", name, lpips=0.1, group="front") for name in ("one", "two")
    )
    newer = {**one, "lpips": 0.2}
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, rows in zip(files, ([one, two], [two, newer]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out" / "quality.jsonl"
    assert [work.take_over(out, files), work.take_over(out, files)] == [2, 0]
    assert [json.loads(line) for line in out.read_text().splitlines()] == [newer, two]
    with pytest.raises(ValueError, match=r"done='.*none.jsonl': no such file"):
        work.take_over(out, [tmp_path / "none.jsonl"])


def test_images_of_another_table_are_not_made_again(tmp_path: Path) -> None:
    args = quality.parsed(["--device", "cpu", "--images", "2", "--out", str(tmp_path)])
    bench = Bench(args)
    candidate = settings.original(0.5)
    paper, front = (work.Section(name, 2, 50, "plms", [candidate]) for name in ("paper", "front"))
    assert bench.adopt(front, candidate) is None
    made = bench.identity(paper, candidate, "compiled")
    made |= {"lpips": 0.5, "unmerged_set": "same seeds", "commit": "abc", "date": "2025-01-01"}
    bench.add(made)
    found = bench.adopt(front, candidate)
    assert found is not None and found["section"] == "quality-front"
    told = {name: found[name] for name in ("lpips", "mode", "commit", "date")}
    assert told == {"lpips": 0.5, "mode": "compiled", "commit": "abc", "date": "2025-01-01"}
    assert bench.find(front, candidate) == found
    fewer = work.Section("front", 1, 50, "plms", [candidate])
    assert bench.adopt(fewer, candidate) is None


@pytest.mark.parametrize("name", ["paper", "windows", "far", "ablations", "search"])
def test_every_candidate_has_valid_settings(name: str) -> None:
    candidates = getattr(settings, name)()
    names = [(c.variant, c.group, c.label) for c in candidates]
    assert len(set(names)) == len(names)
    for candidate in candidates:
        if candidate.variant == "tomesd":
            json.dumps(candidate.settings)  # a row can hold them
            tomesd.Settings(**candidate.settings)


def test_forty_percent_of_the_steps_lie_below_the_threshold(pipe: Any) -> None:
    tau = work.threshold(pipe, 0.4)
    noise = 1 - pipe.scheduler.alphas_cumprod
    assert (noise < tau).float().mean().item() == pytest.approx(0.4, abs=0.002)
    assert any(c.settings.get("tau") == tau for c in settings.seed(tau))


def test_the_front_is_what_nothing_beats() -> None:
    points = [(1.0, 0.10), (1.2, 0.05), (1.5, 0.20), (1.4, 0.30), (1.1, 0.01)]
    rows = [{"speedup": speed, "lpips": lpips} for speed, lpips in points]
    best = [(row["speedup"], row["lpips"]) for row in quality.pareto(rows, "speedup")]
    assert best == [(1.1, 0.01), (1.2, 0.05), (1.5, 0.20)]


# The document


def made_up(section: str, variant: str, label: str, **values: Any) -> dict[str, Any]:
    """A row; of a value, the interval is as wide as the value's tenth, each way."""
    row: dict[str, Any] = {
        "run": "1",
        "date": "2025-01-01T00:00:00",
        "section": f"quality-{section}",
        "setting": values.pop("group", ""),
        "variant": variant,
        "label": label,
        "settings": values.pop("settings", {"ratio": 0.5} if variant != "unmerged" else {}),
        "images": 2000,
        "steps": 50,
        "height": 256,
        "batch": 250,
        "scheduler": "plms",
        "mode": "eager",
        "guidance": 5.0,
        "seconds_per_image": 0.02,
        "peak_mib": 2500.0,
        "unmerged_set": "other seeds",
        "reference_scenes": 2000,
        "hardware": "a GPU",
        "dtype": "float16",
        "torch": "9.9",
        "commit": "abc",
    }
    for name, value in values.items():
        row |= {name: value, f"{name}_low": 0.9 * value, f"{name}_high": 1.1 * value}
    return row


def documents(folder: Path, rows: list[dict[str, Any]]) -> str:
    """The text that comes of the rows; checked."""
    results = folder / "quality.jsonl"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    docs = folder / "docs"
    docs.mkdir(exist_ok=True)
    where = ["--results", str(results), "--docs", str(docs)]
    update_quality.main(where)
    update_quality.main([*where, "--check"])
    text = (docs / "quality.md").read_text()
    figures = set(re.findall(r"figures/quality/(\w+\.svg)", text))
    assert {path.name for path in (docs / "figures" / "quality").glob("*")} == figures
    assert max(len(line) for line in text.splitlines() if not line.startswith(("|", "- "))) < 140
    return text


def test_the_table_of_the_paper(tmp_path: Path) -> None:
    rows = [made_up("paper", "unmerged", "unmerged", fid=30.0, fid_unmerged=10.0)]
    for ratio, theirs, mine in ((0.1, 0.1, 0.05), (0.5, 0.2, 0.21)):
        common = {"settings": {"ratio": ratio}, "fid": 40.0, "psnr": 25.0, "speedup": 0.9}
        rows.append(made_up("paper", "original", f"0.1.3 {ratio}", lpips=theirs, **common))
        rows.append(made_up("paper", "tomesd", f"{ratio}", lpips=mine, **common))
    text = documents(tmp_path, rows)
    assert "| 0 | unmerged | 30.00 ± 3.00 | 10.00 ± 1.00 | - |" in text
    line = next(line for line in text.splitlines() if line.startswith("| 10 | this library"))
    assert line.endswith("| 0.0500 ± 0.0050 | - | - | 0.90 ± 0.09 |")
    words = " ".join(text.split())
    assert "By LPIPS, this library is lower at 10 %; the intervals overlap at 50 %." in words
    assert "By FID, the intervals overlap at 10 % and 50 %." in words
    assert text.count("Not measured yet.") == 5
    assert "a GPU: float16, torch 9.9, commit abc, 2025-01-01." in text


def test_the_table_of_windows(tmp_path: Path) -> None:
    rows = [
        made_up("windows", "tomesd", label, fid=fid, settings={"ratio": 0.3, "window": window})
        for label, window, fid in (("whole image", 0, 40.0), ("windows of 8x8", 8, 50.0))
    ]
    text = documents(tmp_path, rows)
    assert "| the whole image | 40.00 ± 4.00 | - | - | - | - | - |" in text
    assert "| windows of 8x8 | 50.00 ± 5.00 | - | - | - | - | - |" in text
    assert "At the cap" not in text
    far = {"ratio": 0.75, "window": 64}
    rows.append(made_up("far", "tomesd", "windows of 64x64", lpips=0.1, settings=far))
    text = documents(tmp_path, rows)
    assert "| windows of 64x64 | - | - | - | - | - | 0.1000 ± 0.0100 |" in text


def test_speeds_are_joined_to_images(tmp_path: Path) -> None:
    rows = []
    for place, (variant, options) in enumerate(
        {"unmerged": {}, "original": {"ratio": 0.5}, "tomesd": {"ratio": 0.5}}.items()
    ):
        common: dict[str, Any] = {"settings": options}
        row = made_up("paper", variant, variant, fid=30.0, lpips=0.1, **common)
        rows.append({**row, "mode": "compiled", "base_mode": "compiled", "place": place})
        if variant != "unmerged":
            common |= {"speedup_unfused": 1.0 + place / 2, "speedup": 1.0 + place / 2}
        timed = made_up("speed", variant, "another name", step_ms_unfused=2.0, **common)
        rows.append({**timed, "mib_unfused": 40.0 / (1 + place), "commit": "def"})
    text = documents(tmp_path, [*reversed(rows)])
    lines = {line.split(" | ")[1]: line for line in text.splitlines() if line.count(" | ") > 9}
    assert lines["unmerged"].endswith("| 2.00 ms | 40.0 MiB | 1 |")
    assert lines["tomesd 0.1.3"].endswith("| 2.00 ms (67 %) | 20.0 MiB (50 %) | 1.50 ± 0.15 |")
    assert lines["this library"].endswith("| 2.00 ms (50 %) | 13.3 MiB (33 %) | 2.00 ± 0.20 |")
    assert [name for name in lines if name][-3:] == ["unmerged", "tomesd 0.1.3", "this library"]
    words = " ".join(text.split())
    assert "By speed with unfused attention, this library is faster at 50 %." in words
    assert "For the images, the model is compiled." in words
    assert "commits abc, def, 2025-01-01" in words


def test_a_speed_that_was_disturbed_is_not_shown(tmp_path: Path) -> None:
    options: dict[str, Any] = {"settings": {"ratio": 0.5}}
    image = made_up("front", "tomesd", "half", lpips=0.1, fid=30.0, **options)
    timed = made_up("speed", "tomesd", "half", speedup=0.4, speedup_unfused=1.3, **options)
    steady = documents(tmp_path, [image, timed])
    assert "| 0.40x | 1.30x |" in steady
    disturbed = {**timed, "speedup_low": 0.17, "speedup_high": 1.0}
    assert "| - | 1.30x |" in documents(tmp_path, [image, disturbed])


@pytest.mark.parametrize(
    ("all_layers", "words"),
    [
        (50.0, "the same order as the paper**."),
        (31.0, "the same order as the paper**, but the intervals overlap."),
        (20.0, "not the order of the paper**."),
    ],
)
def test_orders_are_found_out(tmp_path: Path, all_layers: float, words: str) -> None:
    group = {"group": "layers"}
    rows = [
        made_up("ablations", "tomesd", "self-attention", fid=30.0, **group),
        made_up("ablations", "tomesd", "+ cross-attention", fid=1.0, **group),
        made_up("ablations", "tomesd", "everything", fid=all_layers, **group),
    ]
    text = documents(tmp_path, rows)
    assert f"By FID: **{words}" in text
    assert "| + cross-attention | - | 1.00 ± 0.10 |" in text


def test_variants_are_compared_at_equal_time(tmp_path: Path) -> None:
    rows = [
        made_up(
            "seed",
            "tomesd",
            "bipartite 0.3",
            group="paper",
            settings={"ratio": 0.3},
            lpips=0.1,
            speedup=1.1,
        ),
        made_up("seed", "tomesd", "bipartite 0.5", group="paper", lpips=0.2, speedup=1.3),
        made_up("seed", "tomesd", "good", group="kmeans", lpips=0.1, speedup=1.2),
        made_up("seed", "tomesd", "bad", group="kmeans", lpips=0.2, speedup=1.05),
        made_up("seed", "tomesd", "slow", group="kmeans", lpips=0.01, speedup=0.9),
        made_up("seed", "tomesd", "alike", group="kmeans", lpips=0.21, speedup=1.3),
        made_up("seed", "tomesd", "fast", group="kmeans", lpips=0.9, speedup=1.5),
    ]
    text = documents(tmp_path, rows)
    found = {line.split(" | ")[0][2:]: line for line in text.splitlines() if " | " in line}
    # Half of the way from 0.1 to 0.2; and from unmerged, at speed 1, to 0.1.
    assert "| 1.20x | better: the paper's has 0.1500 ± 0.0150 |" in found["good"]
    assert "| 1.05x | worse: the paper's has 0.0500 ± 0.0050 |" in found["bad"]
    assert "| 0.90x | no gain |" in found["slow"]
    assert "| 1.30x | no clear difference: the paper's has 0.2000 ± 0.0200 |" in found["alike"]
    assert "| 1.50x | faster than all of the paper's |" in found["fast"]
    assert "| 1.10x | - | - | - |" in found["bipartite 0.3"]
    words = " ".join(text.split())
    assert "With fused attention, of 5 variants: 1 better, 1 worse, 1 no gain, 1 no clear" in words
    assert "With unfused attention, of" not in words


def front_rows() -> list[dict[str, Any]]:
    theirs = {"settings": {"ratio": 0.5}, "lpips": 0.2, "fid": 40.0}
    mine = {"settings": {"ratio": 0.4}, "speedup": 1.3, "lpips": 0.1}
    return [
        made_up("front", "original", "0.1.3 0.5", speedup=1.2, speedup_unfused=0.8, **theirs),
        made_up("front", "tomesd", "kv 0.4", speedup_unfused=1.1, fid=30.0, **mine),
    ]


def test_what_is_beaten_is_found_out(tmp_path: Path) -> None:
    text = " ".join(documents(tmp_path, front_rows()).split())
    assert "compared with tomesd 0.1.3: at every speed-up that it reaches, a setting" in text
    assert "0.5: beaten (1.20x, LPIPS 0.2000 ± 0.0200) by kv 0.4, LPIPS 0.1000 ± 0.0100;" in text
    assert "it never makes the model faster, in 1 setting: the unmerged" in text  # unfused
    slow = made_up("front", "original", "0.1.3 0.1", speedup=0.9, lpips=0.1, fid=30.0)
    text = " ".join(documents(tmp_path, [*front_rows(), slow]).split())
    assert "It does not make the model faster at 0.1." in text

    rows = front_rows()
    rows[1] = made_up("front", "tomesd", "kv 0.4", speedup=1.3, lpips=0.1, fid=39.0)
    text = " ".join(documents(tmp_path, rows).split())
    assert "at 0 of 1 speed-ups that it reaches, a setting" in text
    assert "not clearly beaten" in text and "has LPIPS lower and FID not clearly lower" in text

    rows[1] = made_up("front", "tomesd", "kv 0.4", speedup=1.1, lpips=0.1, fid=10.0)
    text = " ".join(documents(tmp_path, rows).split())
    assert "not reached (1.20x, LPIPS 0.2000 ± 0.0200): none of ours is as fast" in text


def test_the_last_of_equal_rows_counts(tmp_path: Path) -> None:
    old, new = (made_up("front", "tomesd", "a", lpips=v, fid=v, speedup=1.1) for v in (0.3, 0.4))
    text = documents(tmp_path, [old, new])
    assert "| a | 0.4000" in text and "| a | 0.3000" not in text


def test_the_search_shows_its_front(tmp_path: Path) -> None:
    points = {"a": (1.1, 0.1), "b": (1.3, 0.2), "c": (1.2, 0.3)}
    rows = [
        made_up("search", "tomesd", name, group="kv", speedup=speed, lpips=lpips)
        for name, (speed, lpips) in points.items()
    ]
    text = documents(tmp_path, rows)
    assert re.findall(r"^\| this library \| (\w) ", text, re.MULTILINE) == ["a", "b"]


def test_the_search_tells_about_the_defaults(tmp_path: Path) -> None:
    rows = []
    for place, option in enumerate(
        ({}, {"proportional": True}, {"target": "kv"}, {"target": "kv", "proportional": True})
    ):
        assert "The defaults" not in (documents(tmp_path, rows) if rows else "")
        settings = {"ratio": 0.5, "when": "always", **option}
        scores: dict[str, Any] = {"lpips": 0.1 - place / 100, "speedup": 1.1 + place / 10}
        rows.append(made_up("search", "tomesd", f"{place}", settings=settings, **scores))
    text = documents(tmp_path, rows)
    assert "| default | 1.10x | - | 0.1000 ± 0.0100 | - |" in text
    assert "| `target='kv'`, `proportional=True` | 1.40x | - | 0.0700 ± 0.0070 | - |" in text


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    where = ["--results", str(tmp_path / "none.jsonl"), "--docs", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"no such file; benchmarks/quality\.py makes it"):
        update_quality.main(where)
    documents(tmp_path, front_rows())
    results, docs = tmp_path / "quality.jsonl", tmp_path / "docs"
    results.write_text(json.dumps(front_rows()[0]) + "\n")
    with pytest.raises(SystemExit, match="out of date"):
        update_quality.main(["--check", "--results", str(results), "--docs", str(docs)])
