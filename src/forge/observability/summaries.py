"""What a list of runs says of each, without reading all of its files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from ..system.files import open_plain, read_plain
from .folder import CONFIG, ENDED, FINISHED, MARK
from .lines import numbers, parsed
from .rollouts import ROLLOUTS, count
from .runs import LARGEST, ending, settings, state

SHOWN = ("reward", "eval/accuracy")  # of which the last values are shown
BLOCK, MOST = 1 << 16, 1 << 22  # bytes of the end of metrics.jsonl that are read at once, and at all
LONGEST = 1 << 18  # bytes of a row
MOST_KEYS = 1000  # lines of a section


def summary(folder: Path) -> dict[str, Any]:
    """A run's state, last values and size.

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
    """The steps of a run's configuration, without parsing the rest of what runs write; None if it has none."""
    try:
        text = read_plain(folder / CONFIG, LARGEST).decode(errors="replace")
        lines = f"\n{text}".partition("\ntraining:\n")[2].split("\n", MOST_KEYS)
        indent = len(lines[0]) - len(lines[0].lstrip(" "))
        for line in takewhile(lambda one: one.startswith(" "), lines):
            name, _, value = line[indent:].partition(": ")
            if name == "steps" and value.isdecimal() and len(value) < 16:
                return int(value)
        steps = settings(folder).get("training.steps") if "training" in text else None
    except (ValueError, OSError):
        return None
    return numbers({"steps": steps}).get("steps")


def last_values(path: Path) -> dict[str, float | None]:
    """The step of the last row, and the last values of `SHOWN` near the end of the file."""
    values: dict[str, float | None] = dict.fromkeys(SHOWN)
    try:
        file = open_plain(path)
    except OSError:
        return values
    with file:
        for line in _backwards(file):
            wanted = [name for name, value in values.items() if value is None]
            if "step" in values and not any(f'"{name}"'.encode() in line for name in wanted):
                continue
            row = numbers(parsed(line) or {})
            if "step" not in row:
                continue
            values.setdefault("step", row["step"])
            values |= {name: row[name] for name in wanted if name in row}
            if None not in values.values():
                break
    return values


def _backwards(file: BinaryIO) -> Iterator[bytes]:
    """The whole lines at the end of a file, the last first, without those that are too long for a row."""
    at, rest = file.seek(0, 2), b""
    least, ended = max(0, at - MOST), False
    while at > least:
        start = max(least, at - BLOCK)
        file.seek(start)
        first, *lines = (file.read(at - start) + rest).split(b"\n")
        for line in reversed(lines):
            if ended and len(line) <= LONGEST:
                yield line
            ended = True  # what comes after the last newline is incomplete
        at, rest = start, first[: LONGEST + 1]
    if at == 0 and ended:
        yield rest


def signature(folder: Path) -> tuple[Any, ...]:
    """What changes when a file does that a summary is made of."""
    found: list[Any] = []
    for name in (CONFIG, MARK, ROLLOUTS, FINISHED, ENDED):
        try:
            about = (folder / name).lstat()
        except OSError:
            found.append(None)
        else:
            found.append((about.st_mtime_ns, about.st_size, about.st_ino, about.st_mode))
    return tuple(found)
