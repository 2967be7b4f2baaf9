"""JSON lines: the one reader of files such as metrics.jsonl, which may still grow."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = Any  # a value of JSON
Row = dict[str, Json]
MAX_LINE = 1 << 26  # bytes of a line, at most
TAIL = 1 << 20  # bytes at the end of a file that `last_rows` reads


def appended_lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (offset of its end, line) of each complete line of a file, without a last line that has no line break yet.
    A path that is not a file has no lines.

    Args:
        start: offset of the first line, in bytes.

    Raises:
        ValueError: a line has MAX_LINE bytes or more.
    """
    if not path.is_file():
        return

    with path.open("rb") as file:
        file.seek(start)
        for line in iter(lambda: file.readline(MAX_LINE), b""):
            if len(line) == MAX_LINE:
                raise ValueError(
                    f"{path}: lines must have at most {MAX_LINE >> 20} MiB, got more at byte {start}: restore the file"
                )
            if not line.endswith(b"\n"):
                return
            start += len(line)
            yield start, line


class Lines:
    """Reader of a growing file of JSON lines; each call of `read` continues where the last one ended."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0

    def read(self) -> Iterator[Row]:
        """Yield the rows that were appended since the last call; damaged lines are skipped."""
        for end, line in appended_lines(self.path, self.offset):
            self.offset = end
            if (row := parse_line(line)) is not None:
                yield row


def read_rows(path: Path) -> list[Row]:
    """Return all rows of a file, without damaged lines; none if it does not exist."""
    return list(Lines(path).read())


def last_rows(path: Path) -> Iterator[Row]:
    """Yield the rows in the last MiB of a file, the last row first; each is parsed when it is asked for."""
    size = path.stat().st_size if path.is_file() else 0
    lines = [line for _, line in appended_lines(path, max(0, size - TAIL))]
    return filter(None, map(parse_line, reversed(lines)))


def parse_line(line: bytes) -> Row | None:
    """Return the JSON object of a line, which may start with a comma; None if it is damaged.

    Example:
        >>> parse_line(b',{"step": 1}')
        {'step': 1}
    """
    try:
        value = json.loads(line.decode(errors="replace").strip().removeprefix(","))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def finite_numbers(row: Row) -> dict[str, float]:
    """Return the values of a row that are finite numbers.

    >>> finite_numbers({"reward": 0.5, "note": "x"})
    {'reward': 0.5}
    """
    return {name: value for name, value in row.items() if isinstance(value, int | float) and math.isfinite(value)}
