"""Segments: reusable files of shared memory. Allocating fresh memory costs more than copying a version.

A process holds a flock on the segments it uses, which the kernel releases when it ends, even if it is killed. A segment
without a lock may be reused. Segments are created and removed under the store's lock.
"""

import errno
import fcntl
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from ...system.files import FULL, NoRoom

ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs
MAX_MAPPED = 16  # segments that a process keeps mapped: more than it reads and writes at a time


class Segments:
    """The segments under a folder: those in use by name, and the free ones.

    Args:
        root: folder on a memory file system.
        changing: context manager of the store's lock.
    """

    def __init__(self, root: Path, changing: Callable[[], AbstractContextManager]) -> None:
        self.used = root / "segments"
        self.free = root / "free"
        self._changing = changing
        self._maps: dict[str, Tensor] = {}
        self._mapping = threading.Lock()

    @contextmanager
    def writing(self, size: int) -> Iterator[tuple[str, Tensor]]:
        """Yield a locked segment of at least `size` bytes: its name and its bytes, uint8 [size].

        Raises:
            NoRoom: not enough shared memory; names the free amount.
        """
        with self._changing():
            name, file = self._claim_segment(size)
        try:
            self._reserve_memory(name, file, size)
            yield name, self._map_segment(name)[:size]
        finally:
            os.close(file)

    @contextmanager
    def reading(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """Yield the bytes of these segments, which are not reused within the block.

        Raises:
            FileNotFoundError: one of them is no longer in use.
        """
        locks: list[int] = []
        try:
            contents = {}
            for name in names:
                # A writer holds the lock exclusively: a segment that is shared cannot be reused.
                locks.append(os.open(self.used / name, os.O_RDWR))
                if not try_lock(locks[-1], fcntl.LOCK_SH):
                    raise FileNotFoundError(f"segment {name} is being written")
                contents[name] = self._map_segment(name)
            yield contents
        finally:
            for file in locks:
                os.close(file)

    def is_being_written(self, name: str) -> bool:
        """Return whether a process writes this segment, this one included."""
        try:
            file = os.open(self.used / name, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(file, fcntl.LOCK_SH)
        finally:
            os.close(file)

    def reclaim(self, referenced: set[str]) -> None:
        """Free unlocked segments that are not referenced, and unlink the oldest free ones beyond as many bytes as are
        in use. The caller holds the store's lock: a writer publishes under it before it releases its segment."""
        for name in set(os.listdir(self.used)) - referenced:
            file = os.open(self.used / name, os.O_RDWR)
            if try_lock(file, fcntl.LOCK_EX):
                if os.fstat(file).st_size:
                    (self.used / name).rename(self.free / name)
                else:  # its writer was killed before it allocated memory
                    (self.used / name).unlink()
            os.close(file)

        # As many free bytes as used ones let every version be written into old memory.
        spare = sorted(_list_segments(self.free), key=lambda entry: entry[2])
        surplus = sum(size for _, size, _ in spare) - sum(size for _, size, _ in _list_segments(self.used))
        for path, size, _ in spare:
            if surplus <= 0:
                break
            path.unlink()
            surplus -= size

        self.forget()

    def forget(self, *, everything: bool = False) -> None:
        """Drop this process's mappings of removed segments: a mapping keeps the memory allocated."""
        with self._mapping:
            for name in list(self._maps):
                if everything or not ((self.used / name).exists() or (self.free / name).exists()):
                    del self._maps[name]

    def _claim_segment(self, size: int) -> tuple[str, int]:
        """Lock the smallest free segment of up to twice the size, or a new one; return its name and file."""
        fits = [
            (length, path)
            for path, length, _ in _list_segments(self.free)
            if size <= length <= 2 * size + mmap.PAGESIZE
        ]
        for _, path in sorted(fits):
            file = os.open(path, os.O_RDWR)
            if try_lock(file, fcntl.LOCK_EX):
                path.rename(self.used / path.name)
                return path.name, file
            os.close(file)

        name = uuid4().hex
        file = os.open(self.used / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if not try_lock(file, fcntl.LOCK_EX):
            raise RuntimeError(f"the new segment {self.used / name} is locked by another process")

        return name, file

    def _reserve_memory(self, name: str, file: int, size: int) -> None:
        """Allocate the memory: writing to a sparse file on a full file system would end the process with SIGBUS."""
        if os.fstat(file).st_size >= max(size, 1):
            return
        try:
            try:
                os.posix_fallocate(file, 0, max(size, 1))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                # The disk is full: the free segments are of the wrong size, and may go.
                with self._changing():
                    for path, _, _ in _list_segments(self.free):
                        path.unlink()
                self.forget()
                os.posix_fallocate(file, 0, max(size, 1))
        except OSError as error:
            (self.used / name).unlink()
            if error.errno not in FULL:
                raise
            if error.errno == errno.EFBIG:
                raise NoRoom(
                    errno.EFBIG, f"{size / 1e6:.3g} MB of weights are more than a file may have here: raise ulimit -f"
                ) from None

            free = shutil.disk_usage(self.used).free
            text = f"{size / 1e6:.3g} MB of weights do not fit into shared memory, {self.used} has {free / 1e6:.3g} MB "
            fix = "free: keep fewer versions, or make it larger (docker run --shm-size)"
            raise NoRoom(errno.ENOSPC, text + fix) from None

    def _map_segment(self, name: str) -> Tensor:
        self.forget()
        with self._mapping:
            memory = self._maps.pop(name, None)
            if memory is None:
                # Opened again: a mapping of the locked file would keep it open, and the lock with it.
                file = os.open(self.used / name, os.O_RDWR)
                try:
                    memory = torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
                finally:
                    os.close(file)
            self._maps[name] = memory
            while len(self._maps) > MAX_MAPPED:
                del self._maps[next(iter(self._maps))]
            return memory


def try_lock(file: int, operation: int) -> bool:
    """Try to lock an open file; return whether it succeeded."""
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def hold_lock(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock file `path` within the block.

    Raises:
        TimeoutError: another process holds it for longer than `timeout` seconds.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + timeout
    pause = 0.0002
    try:
        # The lock of a file has no queue: it is tried again, soon at first.
        while not try_lock(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout:g} s for {path}, which another process holds: is one stopped?")
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        yield
    finally:
        os.close(file)


def _list_segments(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Yield path, bytes and time of the last move of every segment in a folder."""
    for path in folder.iterdir():
        status = path.stat()
        yield path, status.st_size, status.st_ctime
