"""Checksums of the files of a folder, in a list alongside them; and sealed texts, which end with their own checksum.

A list has a line `<xxh3-128> <size> <name>` for each file. It may name other lists in the folder or its subfolders,
whose files are then checked as well: each rank of a trainer writes a list of its own files. A sealed text ends with a
line `# xxh3-128 <digest>` of all that precedes it.
"""

import errno
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from .files import write_atomic

# The name of a list, or its end.
CHECKSUMS = "checksums.txt"
# Starts the last line of a sealed text; the digest of all lines above follows.
SEAL = "# xxh3-128 "
CHUNK = 1 << 22  # bytes that are read at a time


class DamagedFile(OSError):
    """Error: a file differs from its checksum or is missing; the message names the file."""


def write_checksums(folder: Path, files: Iterable[str], name: str = CHECKSUMS) -> None:
    """Write a list of checksums of files, and fsync it.

    Args:
        folder: the folder of the files, and of the list.
        files: the names of the files, relative to the folder.
        name: of the list.
    """
    names = sorted(files)
    with ThreadPoolExecutor(_count_threads(names)) as pool:
        digests = list(pool.map(lambda file: _digest_file(folder / file), names))

    lines = [f"{digest} {size} {file}\n" for (digest, size), file in zip(digests, names, strict=True)]
    write_sealed(folder / name, "".join(lines))


def check_files(folder: Path, name: str = CHECKSUMS) -> None:
    """Compare all files on a list, and on the lists that it names, with their checksums.

    Args:
        folder: the folder of the list.
        name: of the list.

    Raises:
        DamagedFile: a file is missing or differs; names the first one by name.
        OSError: a file cannot be read.
    """
    rows = (line.split(" ", 2) for line in read_sealed(folder / name).splitlines())
    expected = {file: (digest, int(size)) for digest, size, file in rows}
    with ThreadPoolExecutor(_count_threads(expected)) as pool:
        digests = list(pool.map(lambda file: _digest_file(folder / file), expected))

    # The size is compared first, so that the error tells a truncated file from a changed one.
    for file, (digest, size) in zip(expected, digests, strict=True):
        expected_digest, expected_size = expected[file]
        if size != expected_size:
            raise DamagedFile(f"{folder / file} is damaged: it has {size} bytes, and {expected_size} were written")
        if digest != expected_digest:
            raise DamagedFile(f"{folder / file} is damaged: its checksum differs from what was written")

    # A list of checksums may itself be on the list: checkpoints contain folders with their own lists.
    for file in expected:
        if file.endswith(CHECKSUMS):
            check_files(folder, file)


def _count_threads(files: object) -> int:
    # xxhash is faster than a disk: reading several files at once keeps the disk busy.
    return max(1, min(8, os.cpu_count() or 1, len(files)))  # type: ignore[arg-type]


def write_sealed(path: Path, text: str) -> None:
    """Write a text, which must end with a newline, and its checksum as the last line; it survives a power cut."""
    write_atomic(path, f"{text}{SEAL}{xxhash.xxh3_128_hexdigest(text.encode())}\n", durable=True)


def read_sealed(path: Path) -> str:
    """Return the text that `write_sealed` wrote to a file, without the line of the checksum.

    Raises:
        DamagedFile: the file was changed, or is missing.
    """
    try:
        text, seal, digest = path.read_bytes().decode("utf-8", "replace").rpartition(SEAL)
    except FileNotFoundError:
        raise DamagedFile(f"{path} is missing") from None

    if not seal or digest != xxhash.xxh3_128_hexdigest(text.encode()) + "\n":
        raise DamagedFile(
            f"{path} is damaged or was edited, or an earlier version wrote it: its last line is not the checksum of "
            "the rest"
        )
    return text


def file_digest(path: Path) -> str:
    """Return the xxh3-128 of a file's content, in hexadecimal digits.

    Raises:
        DamagedFile: the file is missing, is not a regular file, or the disk cannot read it.
    """
    return _digest_file(path)[0]


def hash_file(path: Path, size: int | None = None) -> xxhash.xxh3_128:
    """Return the hash of a file's first `size` bytes (None: of all), to which more bytes may be added."""
    state = xxhash.xxh3_128()
    remaining = path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while remaining > 0 and (data := file.read(min(remaining, CHUNK))):
            state.update(data)
            remaining -= len(data)
    return state


# Return the xxh3-128 of a file's content, and its size in bytes.
def _digest_file(path: Path) -> tuple[str, int]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a FIFO would wait, and a device may have no end
            raise DamagedFile(f"{path} is damaged: it is not a regular file")
        return hash_file(path, status.st_size).hexdigest(), status.st_size
    except FileNotFoundError:
        raise DamagedFile(f"{path} is missing") from None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedFile(f"{path} is damaged: the disk cannot read it") from None
