"""Summaries of runs for lists, without reading all of their files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from ..system.files import open_plain, read_plain
from .folder import CONFIG, ENDED, FINISHED, MARK
from .lines import Row, numbers, parse_line
from .rollouts import ROLLOUTS, count
from .runs import MAX_CONFIG, ending, settings, state

METRICS = ("reward", "eval/accuracy")  # whose last values are listed
BLOCK = 1 << 16  # bytes of the end of metrics.jsonl that are read at once
MAX_READ = 1 << 22  # bytes of it that are read at all: evaluations may be hundreds of rows apart
MAX_ROW = 1 << 18  # bytes of a row
MAX_KEYS = 1000  # lines of a section


def summary(folder: Path) -> Row:
    """Return a run's state, last values and size.

    Raises:
        OSError, ValueError: a file is damaged.
    """
    row = last_values(folder / MARK)
    written = (folder / MARK).lstat().st_mtime if os.path.lexists(folder / MARK) else 0.0
    return {
        "state": state(folder),
        "ending": ending(folder),
        "step": row.pop("step", 0),
        "steps": planned(folder),
        "written": written,
        "rollouts": count(folder / ROLLOUTS)[0],
        **row,
    }


def planned(folder: Path) -> float | None:
    """Return the steps of a run's configuration, without parsing all of it; None if it has none."""
    try:
        # The file is as this library writes it in most cases: a line of the section `training`.
        text = read_plain(folder / CONFIG, MAX_CONFIG).decode(errors="replace")
        lines = f"\n{text}".partition("\ntraining:\n")[2].split("\n", MAX_KEYS)
        indent = len(lines[0]) - len(lines[0].lstrip(" "))
        for line in takewhile(lambda line: line.startswith(" "), lines):
            name, _, value = line[indent:].partition(": ")
            if name == "steps" and value.isdecimal() and len(value) < 16:
                return int(value)
        steps = settings(folder).get("training.steps") if "training" in text else None
    except (ValueError, OSError):
        return None
    return numbers({"steps": steps}).get("steps")


def last_values(path: Path) -> dict[str, float | None]:
    """Return the step of the last row, and the last values of `METRICS` near the end of the file."""
    values: dict[str, float | None] = dict.fromkeys(METRICS)
    try:
        file = open_plain(path)
    except OSError:
        return values
    with file:
        for line in _backwards(file):
            # Most lines need not be parsed: they have none of the missing metrics.
            missing = [name for name, value in values.items() if value is None]
            if "step" in values and not any(f'"{name}"'.encode() in line for name in missing):
                continue
            row = numbers(parse_line(line) or {})
            if "step" not in row:
                continue
            values.setdefault("step", row["step"])
            values |= {name: row[name] for name in missing if name in row}
            if None not in values.values():
                break
    return values


def _backwards(file: BinaryIO) -> Iterator[bytes]:
    """Yield the complete lines at the end of a file, the last first, without those that are too long for a row."""
    position = file.seek(0, 2)
    first_byte = max(0, position - MAX_READ)
    rest = b""  # the beginning of a line whose end was read
    ended = False
    while position > first_byte:
        start = max(first_byte, position - BLOCK)
        file.seek(start)
        head, *lines = (file.read(position - start) + rest).split(b"\n")
        for line in reversed(lines):
            if ended and len(line) <= MAX_ROW:
                yield line
            ended = True  # the text after the last newline is incomplete
        position = start
        rest = head[: MAX_ROW + 1]
    if position == 0 and ended:
        yield rest


def signature(folder: Path) -> tuple[object, ...]:
    """Return values that change when a file changes that the summary is made of."""
    versions: list[object] = []
    for name in (CONFIG, MARK, ROLLOUTS, FINISHED, ENDED):
        try:
            status = (folder / name).lstat()
        except OSError:
            versions.append(None)
        else:
            versions.append((status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode))
    return tuple(versions)
