"""Lines of a growing file, which another user may have written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..system.files import open_plain

# Limits of what a hostile or damaged file makes its reader do; those of real runs are far below.
MAX_LINE = 1 << 24  # bytes of a line; a longer one is read in parts
TURN = 1 << 26  # bytes that are read at once, in about a second
MOST_LINES = 2_000_000  # that are kept of one file
MOST_BYTES = 1 << 29

Json = Any  # a value of JSON
Row = dict[str, Json]


def appended_lines(path: Path, start: int, limit: float = math.inf) -> Iterator[tuple[int, bytes]]:
    """Yield the complete lines from a byte on, each with the offset of its end; an incomplete last line is not one.
    About `limit` bytes are read. Anything but a plain file has no lines."""
    try:
        file = open_plain(path)
    except OSError:
        return
    with file:
        file.seek(start)
        while limit > 0:
            line = file.readline(MAX_LINE)
            # The writer has not finished this line. Lines that are too long come in pieces, which are damaged lines.
            if not line.endswith(b"\n") and len(line) < MAX_LINE:
                return
            start += len(line)
            limit -= len(line)
            yield start, line


class Lines:
    """Reader of a growing file of JSON lines, which continues where the last call ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.behind = False  # the file has more than one call reads
        self._lines = 0
        self._bytes = 0

    def read(self) -> Iterator[Row]:
        """Yield the lines that were appended since the last call, or some of them; an incomplete line waits.

        Raises:
            ValueError: the file has more lines or bytes than the limits.
        """
        before = self.offset
        for end, line in appended_lines(self.path, self.offset, TURN):
            self.offset = end
            # Damaged lines are skipped: the rest of the file is worth showing.
            value = parse_line(line)
            if value is None:
                continue
            self._lines += 1
            self._bytes += len(line)
            if self._lines > MOST_LINES or self._bytes > MOST_BYTES:
                raise ValueError(f"{self.path} has more than {MOST_LINES} lines or {MOST_BYTES >> 20} MiB")
            yield value
        # A whole turn was read, so there may be more.
        self.behind = self.offset - before >= TURN


def parse_line(line: bytes) -> Row | None:
    """Parse the JSON object of a line, which may begin with a comma; None if it is damaged."""
    try:
        value = json.loads(line.decode(errors="replace").strip().removeprefix(","))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def numbers(row: Row) -> dict[str, float]:
    """Return the values of a row that are finite numbers."""
    return {name: value for name, value in row.items() if isinstance(value, int | float) and _is_finite(value)}


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of floats
        return False
