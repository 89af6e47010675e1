"""Files that are whole or not there, and files of JSON lines that survive a crash."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to; what is written there becomes `path` when the block ends.

    An interruption or an error leaves the old file or none, never half of one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def check_writable(path: Path, name: str = "out", *, folder: bool) -> None:
    """Refuses a place that cannot be written to, before the work is done and lost.

    Args:
        name: of the argument that says it.
        folder: whether it is to be a folder, or a file.
    """
    wrong = f"{name}={str(path)!r}: "
    if path.is_dir() != folder and path.exists():
        raise ValueError(wrong + (f"is {'a file' if folder else 'a folder'} already"))
    there = path if folder else path.parent
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ValueError(wrong + f"{there} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(wrong + f"cannot be written ({there}: {reason})") from error


def unused(path: Path, *, overwrite: bool = False) -> Path:
    """The path itself, or with the first number that makes it a new one: `fox-2.png`."""
    if overwrite:
        return path
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
    return next(free for free in chain([path], numbered) if not free.exists())


def read_text(path: Path, name: str) -> str:
    """The text in a file; `name` is the argument that says which."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{name}={str(path)!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}={str(path)!r}: is not UTF-8 text") from error


def write_text(path: Path, text: str) -> None:
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def json_lines(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file. A last line that was cut short is left out."""
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not a row of results") from error
    return rows


def append_json_line(path: Path, row: Any) -> None:
    """Adds a line, and first removes what a crash in the middle of the last one has left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(row).encode() + b"\n")
