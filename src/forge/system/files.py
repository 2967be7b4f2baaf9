"""Files: written atomically, read from folders of others; and text in UTF-8."""

import codecs
import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's quota, the size of a file (ulimit -f)


class NoRoom(OSError):
    """A disk is full: one line with the path, the bytes that are needed and those that are free."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def room_for(path: Path, size: int) -> Iterator[None]:
    """Within the block `size` bytes are written to a path. NoRoom: the disk is full."""
    try:
        yield
    except Exception as error:
        # A library may report a full disk in another way than by its errno.
        if isinstance(error, NoRoom) or not is_full(error):
            raise
        text = f"{path} needs {size:,} bytes, and its disk has {free_bytes(path):,} free: "
        code = error.errno if isinstance(error, OSError) and error.errno is not None else errno.ENOSPC
        raise NoRoom(code, text + os.strerror(code)) from error


@contextmanager
def removed_on_error(folder: Path) -> Iterator[None]:
    """Remove a folder if writing to it fails, so that it does not occupy the disk."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def is_full(error: BaseException) -> bool:
    """Return whether an exception reports a lack of space, for one of the reasons in `FULL`."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    # Errors of Rust libraries and of checkpoints have no errno.
    return any(os.strerror(code) in str(error) for code in FULL)


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a path, which need not exist."""
    return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free


def fill_standard_files() -> None:
    """Open standard input, output and errors as /dev/null if they are closed, as after `>&-`.

    Otherwise a socket would get their number, and a child process would close it or print into it.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the program ends


def cache_folder() -> Path:
    """Return this user's folder for files that can be created again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchforge"


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a path to write to, renamed to `path` at the end: a killed process leaves the old file or the new one."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_atomic(path: Path, text: str, *, durable: bool = False, secret: bool = False) -> None:
    """Write a text file aside and rename it.

    Args:
        durable: file and name survive a power cut, at the price of two fsyncs.
        secret: only this user can read it.
    """
    mode = 0o600 if secret else 0o666
    with room_for(path, len(text.encode())), written_aside(path) as aside:
        aside.unlink(missing_ok=True)  # from a killed process of this number, perhaps with another mode
        with open(aside, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
    if durable:
        sync_path(path.parent)


def escape_controls(text: object) -> str:
    r"""Escape control characters in a name or text from elsewhere, which a terminal would obey.

    >>> escape_controls("a\nb")
    'a\\nb'
    """
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in str(text))


def make_private(folder: Path) -> None:
    """Create a folder that only this user may enter, or close one of this user's to others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        folder.chmod(0o700)


def is_plain(path: Path) -> bool:
    """Return whether there is a plain file at a path, and not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def read_text(path: Path) -> str:
    """Read a file in UTF-8, without a byte order mark. ValueError: it has another encoding; names the line."""
    return decode_content(path.read_bytes(), path)


def decode_content(content: bytes, path: Path) -> str:
    """Decode the content of a file, see `read_text`."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        fault = "it is in UTF-16" if wide else f"the byte 0x{content[error.start]:02x} is not UTF-8"
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: {fault}: save the file as UTF-8") from None


def sync_path(path: Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
