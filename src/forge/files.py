"""Files that are there whole or not at all, and text in UTF-8."""

from __future__ import annotations

import codecs
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


def make_private(folder: Path) -> None:
    """Make a folder that only this user may enter, or close one of this user's to others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (status := folder.stat()).st_uid == os.geteuid() and status.st_mode & 0o077:
        folder.chmod(0o700)


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, without a byte order mark. ValueError: it has another encoding; names the line."""
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        fault = "it is in UTF-16" if wide else f"the byte 0x{content[error.start]:02x} is not UTF-8"
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: {fault}: save the file as UTF-8") from None


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
