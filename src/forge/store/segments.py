"""Files of shared memory that are used again: fresh memory costs more to touch than a version to copy.

Who uses a segment holds a lock on it (flock), which the kernel gives back when the process ends, however it ends. A
segment is written again only when nobody holds one. Segments come and go under the store's own lock.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import threading
import time
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
        changing: the lock under which segments come and go.
    """

    def __init__(self, root: Path, changing: Callable[[], object]) -> None:
        self.used, self.free = root / "segments", root / "free"
        self._changing = changing
        self._maps: dict[str, Tensor] = {}
        self._mapping = threading.Lock()

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
        with self._changing():  # type: ignore[attr-defined]
            name, lock = self._again(size) or self._new()
        try:
            self._reserve(name, lock, size)
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
                if not lock(locks[-1], fcntl.LOCK_SH):
                    raise FileNotFoundError(f"segment {name} is being written")
                found[name] = self._mapped(name)
            yield found
        finally:
            for held in locks:
                os.close(held)

    def held(self, name: str) -> bool:
        """Whether somebody is writing this segment, this process included."""
        try:
            file = os.open(self.used / name, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not lock(file, fcntl.LOCK_SH)
        finally:
            os.close(file)

    def reclaim(self, referenced: set[str]) -> None:
        """Free every segment that is not referenced and that nobody holds, and give back what is free beyond as much
        as is in use. The store is locked: a writer publishes under that lock before it lets go."""
        for name in set(os.listdir(self.used)) - referenced:
            file = os.open(self.used / name, os.O_RDWR)
            if lock(file, fcntl.LOCK_EX):
                (self.used / name).rename(self.free / name)
            os.close(file)
        spare = sorted(_sizes(self.free), key=lambda entry: entry[2])
        surplus = sum(size for _, size, _ in spare) - sum(size for _, size, _ in _sizes(self.used))
        for path, size, _ in spare:
            if surplus <= 0:
                break
            path.unlink()
            surplus -= size
        self.forget()

    def forget(self, *, everything: bool = False) -> None:
        """Give up this process's mappings of segments that are gone: each keeps its memory."""
        with self._mapping:
            for name in list(self._maps):
                if everything or not ((self.used / name).exists() or (self.free / name).exists()):
                    del self._maps[name]

    def _again(self, size: int) -> tuple[str, int] | None:
        """The smallest free segment that fits without wasting as much again: its name and lock, now in use."""
        fits = [(length, path) for path, length, _ in _sizes(self.free) if size <= length <= 2 * size + mmap.PAGESIZE]
        for _, path in sorted(fits):
            file = os.open(path, os.O_RDWR)
            if lock(file, fcntl.LOCK_EX):
                path.rename(self.used / path.name)
                return path.name, file
            os.close(file)
        return None

    def _new(self) -> tuple[str, int]:
        name = uuid4().hex
        file = os.open(self.used / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if not lock(file, fcntl.LOCK_EX):
            raise RuntimeError(f"the new segment {self.used / name} is locked by another process")
        return name, file

    def _reserve(self, name: str, file: int, size: int) -> None:
        """Memory that turns out not to be there when it is written ends the process with SIGBUS: have it now."""
        if os.fstat(file).st_size >= max(size, 1):
            return
        try:
            try:
                os.posix_fallocate(file, 0, max(size, 1))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                with self._changing():  # type: ignore[attr-defined]
                    for path, _, _ in _sizes(self.free):
                        path.unlink()
                self.forget()
                os.posix_fallocate(file, 0, max(size, 1))
        except OSError as error:
            (self.used / name).unlink()
            if error.errno != errno.ENOSPC:
                raise
            there = shutil.disk_usage(self.used).free
            raise OSError(
                errno.ENOSPC,
                f"{size / 1e6:.0f} MB of weights do not fit into shared memory, {self.used} has {there / 1e6:.0f} MB "
                "free: keep fewer versions, or make it larger (docker run --shm-size)",
            ) from None

    def _mapped(self, name: str) -> Tensor:
        self.forget()
        with self._mapping:
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


def lock(file: int, how: int) -> bool:
    """Lock an open file if that is possible now."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock file `path` within the block.

    Raises:
        TimeoutError: another process holds it for longer than `timeout` seconds.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    end, pause = time.monotonic() + timeout, 0.0002
    try:
        while not lock(file, fcntl.LOCK_EX):
            if time.monotonic() > end:
                raise TimeoutError(f"waited {timeout:g} s for {path}, which another process holds: is one stopped?")
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        yield
    finally:
        os.close(file)


def _sizes(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Path, bytes and time of the last move of every segment in a folder."""
    for path in folder.iterdir():
        status = path.stat()
        yield path, status.st_size, status.st_ctime
