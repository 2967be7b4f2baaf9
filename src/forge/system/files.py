"""Files that are there whole or not at all, and text in UTF-8."""

from __future__ import annotations

import codecs
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

REMOVED = ".forge-removed-"  # folders on their way
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's share of it, the size of a file (ulimit -f)
_KEEP_SIZE = 1  # of fallocate
_libc = ctypes.CDLL(None)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class NoRoom(OSError):
    """A disk is full: one line with the path, the bytes that it needs and those that are free."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def room_for(path: Path, size: int) -> Iterator[None]:
    """Writing `size` bytes to a path. NoRoom: the disk is full."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NoRoom) or not is_full(error):
            raise
        text = f"{path} needs {size:,} bytes, and its disk has {free_bytes(path):,} free: "
        code = error.errno if isinstance(error, OSError) and error.errno is not None else errno.ENOSPC
        raise NoRoom(code, text + os.strerror(code)) from error


def reserve(path: Path, size: int) -> None:
    """Have a disk keep so many bytes for what will be appended to a file, as far as it can; 0 gives them back."""
    with path.open("ab") as file:
        end = os.fstat(file.fileno()).st_size
        if size:
            _libc.fallocate(file.fileno(), _KEEP_SIZE, end, size)
        else:
            os.ftruncate(file.fileno(), end)


@contextmanager
def removed_on_error(folder: Path) -> Iterator[None]:
    """A folder that is being written: if that fails, it does not keep its part of the disk."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def is_full(error: BaseException) -> bool:
    """Whether an exception says that there is no room, for one of the reasons of `FULL`."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    return any(os.strerror(code) in str(error) for code in FULL)  # of a library in Rust, or of a checkpoint


def free_bytes(path: Path) -> int:
    """What is free on the disk of a path, whether or not that exists."""
    return shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.exists())).free


def fill_standard_files() -> None:
    """Open standard input, output and errors as /dev/null where they are closed, as after `>&-`.

    Otherwise a socket takes their number, and a process that is started closes it or prints into it.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the program ends


def cache_folder() -> Path:
    """Where this user keeps what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchforge"


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path to write to, renamed to `path` at the end: a killed process leaves the old file or the new one."""
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
        aside.unlink(missing_ok=True)  # of a killed process that had this number, perhaps with another mode
        with open(aside, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
    if durable:
        sync(path.parent)


def printable(text: object) -> str:
    """A name or a text of others for a terminal: control characters, which it would obey, are escaped."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in str(text))


def remove_tree(folder: str | Path, handle: int) -> None:
    """Remove a folder that is open as `handle`, however deep it is. Links are removed, and not followed.

    Raises:
        OSError: something cannot be removed, or something is mounted in it, which stays.
    """
    mount = _mount_of(handle)
    left: list[str] = []
    _empty(handle, handle, left)
    while left:
        name = left.pop()
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
        try:
            if _mount_of(inner) != mount:
                raise OSError(errno.EBUSY, "something is mounted there", f"{folder}/{name}")
            os.fchmod(inner, 0o700)
            _empty(inner, handle, left)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=handle)
    os.rmdir(folder)


def _empty(folder: int, top: int, left: list[str]) -> None:
    """Remove the files of a folder, and move the folders in it up to `top`, where no path is too long."""
    with os.scandir(folder) as entries:
        children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in children:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
        elif folder == top:
            left.append(name)
        else:
            aside = f"{REMOVED}{secrets.token_hex(8)}"
            os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=top)
            left.append(aside)


def _mount_of(handle: int) -> str:
    """The mount that an open folder is on: a bind mount has the device of where it is mounted."""
    about = Path(f"/proc/self/fdinfo/{handle}").read_text()
    return next(line for line in about.splitlines() if line.startswith("mnt_id:"))


def mounts_in(folder: Path) -> list[str]:
    """What is mounted in a folder, or on it."""
    real = os.path.realpath(folder)
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    places = [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split(" ")[4]) for line in lines]
    return [place for place in places if place == real or place.startswith(f"{real}/")]


def make_private(folder: Path) -> None:
    """Make a folder that only this user may enter, or close one of this user's to others."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (status := folder.stat()).st_uid == os.geteuid() and status.st_mode & 0o077:
        folder.chmod(0o700)


def open_plain(path: Path) -> BinaryIO:
    """Open a file of a folder that somebody else may have written: never waits, and never leaves the folder.

    Raises:
        FileNotFoundError: there is none. OSError: it is no plain file but a link, a pipe, a device or a folder.
    """
    if not stat.S_ISREG(path.lstat().st_mode):  # to open a device may do something
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):  # it was replaced
        file.close()
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return file


def is_plain(path: Path) -> bool:
    """Whether there is a plain file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def read_plain(path: Path, most: int) -> bytes:
    """The content of a file of a folder that somebody else may have written.

    Raises:
        OSError: as of `open_plain`. ValueError: it has more than `most` bytes.
    """
    with open_plain(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most} bytes")
    return content


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, without a byte order mark. ValueError: it has another encoding; names the line."""
    return decoded(path.read_bytes(), path)


def decoded(content: bytes, path: Path) -> str:
    """The same of the content of a file."""
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
