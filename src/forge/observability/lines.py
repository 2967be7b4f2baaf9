"""The lines of a growing file, which somebody else may have written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..system.files import open_plain

LONGEST = 1 << 24  # bytes of a line; of a longer one, parts are taken for lines
TURN = 1 << 26  # bytes that are read at once
MOST_LINES, MOST_BYTES = 2_000_000, 1 << 29  # that are kept of one file


def appended_lines(path: Path, start: int, most: float = math.inf) -> Iterator[tuple[int, bytes]]:
    """The whole lines from a byte on, each with the byte after it; an incomplete last line is left out. About `most`
    bytes are read. What is no plain file has no lines."""
    try:
        file = open_plain(path)
    except OSError:
        return
    with file:
        file.seek(start)
        while most > 0:
            line = file.readline(LONGEST)
            if not line.endswith(b"\n") and len(line) < LONGEST:
                return
            start += len(line)
            most -= len(line)
            yield start, line


class Lines:
    """The whole lines of a growing file of JSON, from where the last call ended."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        self.behind = False  # there was more than one call reads
        self._lines = self._bytes = 0

    def more(self) -> Iterator[dict[str, Any]]:
        """Lines that were appended since the last call, or some of them; an incomplete last line is left for the next.

        Raises:
            ValueError: the file has more than can be kept.
        """
        before = self.at
        for end, line in appended_lines(self.path, self.at, TURN):
            self.at = end
            value = parsed(line)
            if value is None:
                continue
            self._lines += 1
            self._bytes += len(line)
            if self._lines > MOST_LINES or self._bytes > MOST_BYTES:
                raise ValueError(f"{self.path} has more than {MOST_LINES} lines or {MOST_BYTES >> 20} MiB")
            yield value
        self.behind = self.at - before >= TURN


def parsed(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line, which may begin with a comma; None if it is damaged."""
    try:
        value = json.loads(line.decode(errors="replace").strip().removeprefix(","))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The values of a row that are finite numbers."""
    return {name: value for name, value in row.items() if isinstance(value, int | float) and _is_finite(value)}


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False
