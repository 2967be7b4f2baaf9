"""Segments: files of shared memory that are reused, as allocating fresh memory costs more than copying a version.

A process holds a flock on the segments that it uses: exclusive to write, shared to read. The kernel releases it when
the process ends, even if it is killed. A segment without a lock may be reused. Segments are created and removed under
the store's lock.
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
    """The segments under a folder: those in use in `segments/`, the free ones in `free/`.

    Args:
        root: folder on a memory file system.
        changing: returns a context manager that holds the store's lock.
    """

    def __init__(self, root: Path, changing: Callable[[], AbstractContextManager]) -> None:
        self.used = root / "segments"
        self.free = root / "free"
        self._changing = changing
        self._maps: dict[str, Tensor] = {}
        self._mapping = threading.Lock()

    @contextmanager
    def writing(self, size: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, bytes) of a segment that no other process uses within the block; the bytes are uint8 [size].

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
        """Yield the bytes of these segments by name, uint8; they are not reused within the block.

        Raises:
            FileNotFoundError: one of them is no longer in use.
        """
        files: list[int] = []
        try:
            contents = {}
            for name in names:
                # A shared lock: no writer, who needs an exclusive one, can reuse the segment.
                files.append(os.open(self.used / name, os.O_RDWR))
                if not try_lock(files[-1], fcntl.LOCK_SH):
                    raise FileNotFoundError(f"segment {name} is being written")
                contents[name] = self._map_segment(name)
            yield contents
        finally:
            for file in files:
                os.close(file)

    def is_being_written(self, name: str) -> bool:
        """Return whether any process, this one included, holds this segment to write it."""
        try:
            file = os.open(self.used / name, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(file, fcntl.LOCK_SH)
        finally:
            os.close(file)

    def reclaim(self, referenced: set[str]) -> None:
        """Free the segments that are neither referenced nor locked, and delete surplus free ones, the oldest first.

        As many bytes stay free as are in use: then every new version fits into old memory. The caller holds the store's
        lock: a writer holds it while it publishes, before it releases its segment.

        Args:
            referenced: names of the segments of published versions.
        """
        for name in set(os.listdir(self.used)) - referenced:
            file = os.open(self.used / name, os.O_RDWR)
            if try_lock(file, fcntl.LOCK_EX):
                if os.fstat(file).st_size:
                    (self.used / name).rename(self.free / name)
                else:  # its writer was killed before it allocated memory
                    (self.used / name).unlink()
            os.close(file)

        free_segments = sorted(_list_segments(self.free), key=lambda segment: segment[2])  # by time of move
        surplus = sum(size for _, size, _ in free_segments) - sum(size for _, size, _ in _list_segments(self.used))
        for path, size, _ in free_segments:
            if surplus <= 0:
                break
            path.unlink()
            surplus -= size

        self.forget()

    def forget(self, *, everything: bool = False) -> None:
        """Drop this process's mappings of removed segments, or of all: a mapping keeps the memory allocated."""
        with self._mapping:
            for name in list(self._maps):
                if everything or not ((self.used / name).exists() or (self.free / name).exists()):
                    del self._maps[name]

    def _claim_segment(self, size: int) -> tuple[str, int]:
        """Lock the smallest free segment that fits, or a new one; return its name and open file.

        A free segment fits if it has from `size` to about twice as many bytes. A new one is still empty.
        """
        fitting = [
            (length, path)
            for path, length, _ in _list_segments(self.free)
            if size <= length <= 2 * size + mmap.PAGESIZE
        ]
        for _, path in sorted(fitting):
            file = os.open(path, os.O_RDWR)
            if try_lock(file, fcntl.LOCK_EX):
                path.rename(self.used / path.name)
                return path.name, file
            os.close(file)

        name = uuid4().hex
        file = os.open(self.used / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)  # no other process knows it
        return name, file

    def _reserve_memory(self, name: str, file: int, size: int) -> None:
        """Allocate the memory of a claimed segment: at least `size` bytes.

        A sparse file would not do: writing to it on a full file system ends the process with SIGBUS.

        Raises:
            NoRoom: not enough shared memory, or the file may not be that large; the segment is removed.
        """
        length = max(size, 1)  # bytes: an empty file cannot be mapped
        if os.fstat(file).st_size >= length:
            return

        try:
            try:
                os.posix_fallocate(file, 0, length)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                # Shared memory is full. The free segments, which are of other sizes, make room.
                with self._changing():
                    for path, _, _ in _list_segments(self.free):
                        path.unlink()
                self.forget()
                os.posix_fallocate(file, 0, length)
        except OSError as error:
            (self.used / name).unlink()
            if error.errno not in FULL:
                raise
            if error.errno == errno.EFBIG:
                raise NoRoom(
                    errno.EFBIG,
                    f"{size / 1e6:.3g} MB of weights exceed the file size limit of this process: raise ulimit -f",
                ) from None

            free = shutil.disk_usage(self.used).free
            text = f"{size / 1e6:.3g} MB of weights do not fit into shared memory, {self.used} has {free / 1e6:.3g} MB "
            fix = "free: keep fewer versions, or make it larger (docker run --shm-size)"
            raise NoRoom(errno.ENOSPC, text + fix) from None

    # Return the bytes of a segment in use, uint8; the most recent MAX_MAPPED segments stay mapped.
    def _map_segment(self, name: str) -> Tensor:
        # The bytes of a segment, mapped once; mappings that were not used for long are dropped.
        self.forget()
        with self._mapping:
            if (memory := self._maps.pop(name, None)) is None:
                # The file is opened again: a mapping of the locked one would keep it open, and the lock with it.
                file = os.open(self.used / name, os.O_RDWR)
                try:
                    memory = torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
                finally:
                    os.close(file)

            # The segment becomes the newest: the oldest mappings are dropped.
            self._maps[name] = memory
            while len(self._maps) > MAX_MAPPED:
                del self._maps[next(iter(self._maps))]
            return memory


def try_lock(file: int, operation: int) -> bool:
    """Try to lock an open file, without waiting; return whether it is locked now.

    Args:
        operation: fcntl.LOCK_SH or fcntl.LOCK_EX.
    """
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def hold_lock(path: Path, timeout: float) -> Iterator[None]:
    """Within the block, hold the lock of the file `path`, which is created if it does not exist.

    Raises:
        TimeoutError: another process holds it for longer than `timeout` seconds.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + timeout
    pause = 0.0002  # seconds
    try:
        # flock has no wait with a time limit: it is tried again, soon at first.
        while not try_lock(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"waited {timeout:g} s for {path}, which another process has locked: check for a stopped process"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        yield
    finally:
        os.close(file)


def _list_segments(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Yield (path, bytes, time of its last move) for every segment in a folder."""
    for path in folder.iterdir():
        status = path.stat()
        yield path, status.st_size, status.st_ctime
