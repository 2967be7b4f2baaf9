"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path to write to, renamed to `path` at the end: a killed process leaves the old file or the new one."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text file aside and rename it.

    Args:
        durable: file and name survive a power cut, at the price of two fsyncs.
    """
    with written_aside(path) as aside, aside.open("w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
