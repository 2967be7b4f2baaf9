"""The lines of a growing file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def appended_lines(path: Path, start: int) -> Iterator[tuple[int, bytes]]:
    """The whole lines from a byte on, each with the byte after it; an incomplete last line is left out."""
    if not path.is_file():  # also a pipe, which would never end
        return
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            yield start, line
