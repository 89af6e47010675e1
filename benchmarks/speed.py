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

import torch
from common import RESULTS, ROOT, Arguments

from tomesd import Settings
from tomesd.bench import Case, Contender, Effort, RowFile, Subjects, run_cases
from tomesd.bench.rows import SETTING, Row, read_rows
from tomesd.bench.tables import HEADER, Comparison, failures, markdown, result_table
from tomesd.presets import PRESETS, numbered

BEFORE = ", before"
DEVICES = {"gpu": "cuda", "compiled": "cuda", "cpu": "cpu"}
"""By the stem of a file, where what is in it was measured."""
MEASURED = {
    stem: [
        row
        for row in read_rows(RESULTS / f"{stem}.jsonl")
        if row["what"] != "plan" and not row["section"].endswith(BEFORE)
    ]
    for stem in DEVICES
}
SECTIONS = {row["section"]: stem for stem, rows in MEASURED.items() for row in rows}


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
    return Case(**known, device=DEVICES[SECTIONS[known["section"]]], contenders=chosen)


def contender_of(row: Row, original: str | None) -> Contender:
    options = row["settings"]
    settings = None if options is None else Settings(**{k: numbered(v) for k, v in options.items()})
    folder = original if row["variant"] == "original" else None
    return Contender(row["variant"], settings, row["label"], folder)


def with_before(case: Case, folder: str) -> Case:
    """The same setting with an earlier version of this library."""
    base, *others = [one for one in case.contenders if one.kind in ("unpatched", "tomesd")]
    merged = [one for one in others if one.settings and one.settings.share != "steps"]
    earlier = {"kind": "original", "folder": folder}
    before = [replace(one, **earlier, label=f"{one}{BEFORE}") for one in merged]
    return replace(case, section=case.section + BEFORE, contenders=(base, *merged, *before))


def main(arguments: list[str] | None = None) -> None:
    parser = Arguments(__doc__, seconds=2.0)
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS))
    parser.add_argument("--original", help="folder with tomesd 0.1.3")
    parser.add_argument("--before", help="folder with an earlier version, to compare with alone")
    parser.add_argument("--no-check", action="store_true", help="the kernels have been checked")
    args = parser.read(arguments)
    check = [sys.executable, ROOT / "tests" / "gpu_checks.py"]
    if args.sections != ["cpu"] and not args.no_check and subprocess.run(check).returncode:
        raise SystemExit("the kernels do not do what they should: nothing is measured")
    effort, subjects = Effort(seconds=args.seconds, min_repeats=4), Subjects(keep=4)
    stems = {SECTIONS[section] for section in args.sections}
    files = {s: RowFile(args.out / f"{s}.jsonl", torch.device(DEVICES[s])) for s in stems}
    rows: list[Row] = []
    for section in args.sections:
        for case in cases(section, args.original):
            if args.only in case.setting:
                case = with_before(case, args.before) if args.before else case
                print(f"{section}: {case.setting}, {case.mode}", flush=True)
                rows += run_cases([case], files[SECTIONS[section]], effort, subjects=subjects)
    print(markdown(HEADER, result_table(rows)))
    print("\n".join(failures(rows)))


if __name__ == "__main__":
    main()
