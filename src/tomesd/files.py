"""Files that are whole or not there, and files of JSON lines that survive a crash."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["append_json_line", "json_lines", "read_json_lines", "whole_file", "write_text"]


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
