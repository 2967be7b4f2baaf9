"""Files of shared memory that are used again: fresh memory costs more to touch than a version to copy.

Who uses a segment holds a lock on it (flock), which the kernel gives back when the process ends, however it ends. A
segment is written again only when nobody holds one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

ALIGNMENT = 64
# Mappings that a process keeps of segments, most recently used last.
MAPPED = 16


class Segments:
    """The segments under a folder: those in use by name, and those that are free.

    Args:
        root: folder on a memory file system.
    """

    def __init__(self, root: Path) -> None:
        self.used, self.free = root / "segments", root / "free"
        self._maps: dict[str, Tensor] = {}

    def make(self) -> None:
        """Create the folders."""
        self.used.mkdir()
        self.free.mkdir()

    @contextmanager
    def writing(self, size: int) -> Iterator[tuple[str, Tensor]]:
        """A segment of at least `size` bytes for this process alone: its name and its bytes, uint8 [size].

        Raises:
            OSError: there is not enough shared memory; says how much there is.
        """
        name, lock = self._again(size) or self._new(size)
        try:
            yield name, self._mapped(name)[:size]
        finally:
            os.close(lock)

    @contextmanager
    def reading(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """The bytes of these segments, which are not written as long as the block lasts.

        Raises:
            FileNotFoundError: one of them is not in use any more.
        """
        locks: list[int] = []
        try:
            found = {}
            for name in names:
                locks.append(os.open(self.used / name, os.O_RDWR))
                if not _lock(locks[-1], fcntl.LOCK_SH):
                    raise FileNotFoundError(f"segment {name} is being written")
                found[name] = self._mapped(name)
            yield found
        finally:
            for lock in locks:
                os.close(lock)

    def reclaim(self, referenced: Callable[[], set[str]]) -> None:
        """Free every segment that is not referenced and that nobody holds, and give back what is free beyond as much
        as is in use."""
        held: dict[str, int] = {}
        try:
            keep = referenced()
            for name in set(os.listdir(self.used)) - keep:
                if (lock := _open(self.used / name)) is not None:
                    held[name] = lock
                    if not _lock(lock, fcntl.LOCK_EX):
                        os.close(held.pop(name))
            # Again, now that they are locked: a writer publishes before it lets go.
            for name in held.keys() - referenced():
                (self.used / name).rename(self.free / name)
        finally:
            for lock in held.values():
                os.close(lock)
        spare = sorted(_sizes(self.free), key=lambda entry: entry[2])
        surplus = sum(size for _, size, _ in spare) - sum(size for _, size, _ in _sizes(self.used))
        for path, size, _ in spare:
            if surplus <= 0:
                break
            if (lock := _open(path)) is not None:
                if _lock(lock, fcntl.LOCK_EX) and path.exists():
                    path.unlink()
                    surplus -= size
                os.close(lock)

    def _again(self, size: int) -> tuple[str, int] | None:
        """The smallest free segment that fits without wasting as much again: its name and lock, now in use."""
        fits = [(length, path) for path, length, _ in _sizes(self.free) if size <= length <= 2 * size + mmap.PAGESIZE]
        for _, path in sorted(fits):
            lock = _open(path)
            if lock is None:
                continue
            # Once locked it may have been taken, written and given back by another: only its place says that it is
            # still free.
            if _lock(lock, fcntl.LOCK_EX) and path.exists():
                path.rename(self.used / path.name)
                return path.name, lock
            os.close(lock)
        return None

    def _new(self, size: int) -> tuple[str, int]:
        name = uuid4().hex
        path = self.used / name
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        _lock(lock, fcntl.LOCK_EX)
        try:
            # Reserved now: memory that turns out not to be there when it is written ends the process with SIGBUS.
            os.posix_fallocate(lock, 0, max(size, 1))
        except OSError as error:
            path.unlink()
            os.close(lock)
            if error.errno != errno.ENOSPC:
                raise
            there = shutil.disk_usage(self.used).free
            raise OSError(
                errno.ENOSPC,
                f"{size / 1e6:.0f} MB of weights do not fit into shared memory, {self.used} has {there / 1e6:.0f} MB "
                "free: keep fewer versions, or make it larger (docker run --shm-size)",
            ) from None
        return name, lock

    def _mapped(self, name: str) -> Tensor:
        found = self._maps.pop(name, None)
        if found is None:
            # A file of its own: the mapping keeps it open, and with it any lock on it.
            file = os.open(self.used / name, os.O_RDWR)
            try:
                found = torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
            finally:
                os.close(file)
        self._maps[name] = found
        while len(self._maps) > MAPPED:
            del self._maps[next(iter(self._maps))]
        return found


def _lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None


def _sizes(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Path, bytes and time of the last move of every segment in a folder."""
    for path in folder.iterdir():
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        yield path, status.st_size, status.st_ctime
