"""Files: write them atomically, and read text in UTF-8; folders, free space, and errors of full disks."""

import codecs
import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Errors of a full disk, an exhausted quota of the user, and the limit on the size of a file (ulimit -f).
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoRoom(OSError):
    """Error: a disk is full; the message is one line with the path, the bytes that are needed and the bytes that are
    free."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def room_for(path: Path, size: int) -> Iterator[None]:
    """Within the block, which writes `size` bytes to `path`, replace errors of a full disk by NoRoom.

    Raises:
        NoRoom: the disk is full; names the path, and how many bytes are free.
    """
    try:
        yield
    except Exception as error:  # a library may report a full disk by another class than OSError
        if isinstance(error, NoRoom) or not is_full(error):
            raise
        text = f"{path} needs {size:,} bytes, and its disk has {free_bytes(path):,} free: "
        code = error.errno if isinstance(error, OSError) and error.errno is not None else errno.ENOSPC
        raise NoRoom(code, text + os.strerror(code)) from error


@contextmanager
def removed_on_error(folder: Path) -> Iterator[None]:
    """Remove a folder if the block, which writes to it, raises: an incomplete folder must not occupy the disk."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def is_full(error: BaseException) -> bool:
    """Return whether an exception reports one of the errors in FULL, by its errno or in its text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    # Errors of Rust libraries and of checkpoints have no errno.
    return any(os.strerror(code) in str(error) for code in FULL)


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a path, which need not exist."""
    return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free


def fill_standard_files() -> None:
    """Open /dev/null as standard input, output and error if these are closed, as after `>&-` in a shell.

    Otherwise a socket could get one of their numbers, and a child process would close it or print into it.
    """
    # `open` returns the lowest free number. Numbers above 2 are none of the three.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the program ends


def cache_folder() -> Path:
    """Return torchforge's folder in this user's cache, for files that can be created again; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchforge"


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that the block writes; it is renamed to `path` at the end of the block.

    So a killed process leaves the old file or the new one. If the block raises, the temporary file is removed.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text file in UTF-8 so that readers, and a killed process, see the old file or the new one.

    Args:
        durable: let the file survive a power cut, at the price of two fsyncs.

    Raises:
        NoRoom: the disk is full.
    """
    with (
        room_for(path, len(text.encode())),
        written_aside(path) as aside,
        aside.open("w", encoding="utf-8") as file,
    ):
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        sync_path(path.parent)


def escape_controls(text: object) -> str:
    r"""Return a text with its control characters escaped: a terminal would obey those of a name from elsewhere.

    >>> escape_controls("a\nb")
    'a\\nb'
    """
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in str(text))


def make_private(folder: Path) -> None:
    """Create a folder that only this user may enter; for this user's existing folder, remove others' permissions."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        folder.chmod(0o700)


def is_plain(path: Path) -> bool:
    """Return whether a path is a regular file and not a symbolic link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, without a byte order mark.

    Raises:
        ValueError: the file has another encoding; names the line.
    """
    return decode_content(path.read_bytes(), path)


def decode_content(content: bytes, path: Path, before: int = 0) -> str:
    """Return the text of a file's content in UTF-8, without a byte order mark.

    Args:
        path: of the file, for the error.
        before: the number of its lines before the content.

    Raises:
        ValueError: the content has another encoding; names the line.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        fault = "it is in UTF-16" if is_utf16 else f"the byte 0x{content[error.start]:02x} is not UTF-8"
        line = before + content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: {fault}: save the file as UTF-8") from None


def sync_path(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk (fsync): it then survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
