"""Time and memory: the rows of docs/performance.md, measured again.

    python benchmarks/speed.py graph eager [--original FOLDER]
    python benchmarks/speed.py eager --before FOLDER
    python benchmarks/speed.py compile --only "SDXL 1024"
    OMP_NUM_THREADS=2 python benchmarks/speed.py cpu

The rows in results/ are the list of what is measured: a section is measured again with the settings
that its rows have, and presets as they are now. FOLDER holds tomesd 0.1.3 (`pip install --no-deps
--target FOLDER tomesd==0.1.3`). With --before, this library is compared with an earlier version of
itself in FOLDER, whose operators have to have other names. Rows are added to the file that the
section is in, as they are measured. Before anything is measured on a GPU, tests/gpu_checks.py runs.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from common import RESULTS, ROOT, Arguments

from tomesd import Settings
from tomesd.bench import Case, Contender, Effort, RowFile, Subjects, run_cases
from tomesd.bench.rows import SETTING, Row, read_rows
from tomesd.bench.tables import HEADER, Comparison, failures, markdown, result_table
from tomesd.presets import PRESETS, numbered

BEFORE = ", before"
MEASURED = {
    stem: [
        row
        for row in read_rows(RESULTS / f"{stem}.jsonl")
        if row["what"] != "plan" and not row["section"].endswith(BEFORE)
    ]
    for stem in ("gpu", "compiled", "cpu")
}
"""Rows by the stem of their file."""
SECTIONS = {row["section"]: stem for stem, rows in MEASURED.items() for row in rows}


def device_of(section: str) -> str:
    return "cpu" if section == "cpu" else "cuda"


def cases(section: str, original: str | None) -> list[Case]:
    """What the rows of a section have been measured with.

    Args:
        original: folder of tomesd 0.1.3, which is left out without.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in MEASURED[SECTIONS[section]]:
        if row["section"] == section:
            groups.setdefault((row["setting"], row["mode"]), []).append(row)
    return [case_of(Comparison(rows), original) for rows in groups.values()]


def case_of(measured: Comparison, original: str | None) -> Case:
    known = {name: measured.first[name] for name in SETTING}
    known["steps"] = known["steps"] or Case.steps  # a single step has none
    presets = PRESETS["unet"] if known["section"] == "pipelines" else {}
    labels = {f"preset {name}": Settings(**options) for name, options in presets.items()}
    contenders = [
        *(contender_of(row, original) for row in measured if row["label"] not in labels),
        *(Contender("tomesd", settings, label) for label, settings in labels.items()),
    ]
    chosen = tuple(one for one in contenders if original or one.kind != "original")
    return Case(**known, device=device_of(known["section"]), contenders=chosen)


def contender_of(row: Row, original: str | None) -> Contender:
    options, settings = row["settings"], None
    if options is not None:
        settings = Settings(**{name: numbered(value) for name, value in options.items()})
    folder = original if row["variant"] == "original" else None
    return Contender(row["variant"], settings, row["label"], folder)


def with_before(case: Case, folder: str) -> Case:
    """The same setting with an earlier version of this library."""
    base, *others = [one for one in case.contenders if one.kind in ("unpatched", "tomesd")]
    merged = [one for one in others if one.settings and one.settings.share != "steps"]
    before = [
        replace(one, kind="original", label=f"{one}{BEFORE}", folder=folder) for one in merged
    ]
    return replace(case, section=case.section + BEFORE, contenders=(base, *merged, *before))


def main(arguments: list[str] | None = None) -> None:
    parser = Arguments(__doc__)
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS))
    parser.add_argument("--original", help="folder with tomesd 0.1.3")
    parser.add_argument("--before", help="folder with an earlier version, to compare with alone")
    parser.add_argument("--only", default="", help="of the settings, those with this in their name")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing per setting")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--no-check", action="store_true", help="the kernels have been checked")
    args = parser.read(arguments)
    check = [sys.executable, ROOT / "tests" / "gpu_checks.py"]
    if args.sections != ["cpu"] and not args.no_check and subprocess.run(check).returncode:
        raise SystemExit("the kernels do not what they should: nothing is measured")
    effort, subjects = Effort(seconds=args.seconds, min_repeats=4), Subjects(keep=4)
    files: dict[Path, RowFile] = {}
    rows: list[Row] = []
    for section in args.sections:
        path = args.out / f"{SECTIONS[section]}.jsonl"
        if path not in files:
            files[path] = RowFile(path, torch.device(device_of(section)))
        for case in cases(section, args.original):
            if args.only in case.setting:
                case = with_before(case, args.before) if args.before else case
                print(f"{section}: {case.setting}, {case.mode}", flush=True)
                rows += run_cases([case], files[path], effort, subjects=subjects)
    print(markdown(HEADER, result_table(rows)))
    print("\n".join(failures(rows)))


if __name__ == "__main__":
    main()
