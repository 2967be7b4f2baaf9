"""The lock on the folder of a run, which allows one controller."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from ..system.files import room_for


class RunLock:
    """Locks a run's folder, created if missing, for as long as a process of this run lives.

    Child processes inherit the lock: after a kill -9 of the controller it is released once the last of them has ended,
    so that none of them still writes into the folder.

    Args:
        patience: seconds to wait for the processes of a dead controller.

    Raises:
        BlockingIOError: another process holds it; names the process.
        OSError: the folder cannot be created or written; names the setting.
    """

    def __init__(self, folder: str | Path, patience: float = 20.0) -> None:
        self.path = Path(folder) / "lock"
        self._new = not self.path.parent.exists()
        deadline = time.monotonic() + patience
        while (handle := self._acquire()) is None:
            try:
                owner = self.path.read_text()
            except FileNotFoundError:  # released meanwhile
                continue
            # The processes of a dead controller, or a fork of this one, end soon; a living owner does not.
            dead = owner in ("", str(os.getpid())) or not _runs(owner)
            if not dead or time.monotonic() > deadline:
                holder = f"process {owner}" if owner else "another process"
                raise BlockingIOError(f"{folder} is being run by {holder}: wait for it, or stop it first")
            time.sleep(0.1)
        self._handle = handle
        number = str(os.getpid()).encode()
        os.set_inheritable(handle, True)
        try:
            with room_for(self.path, len(number)):
                os.ftruncate(handle, 0)
                os.pwrite(handle, number, 0)
        except OSError:
            self.close()
            raise

    def _acquire(self) -> int | None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OSError(
                f"a run cannot be written to {self.path.parent} ({error.strerror}): set run.root to a folder that can "
                "be written"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have been removed, with its folder, between its opening and its locking.
            if self.path.exists() and os.path.samestat(os.fstat(handle), self.path.stat()):
                return handle
        except BlockingIOError:
            pass
        os.close(handle)
        return None

    def close(self) -> None:
        """Release the lock, and remove the folder if this lock created it and it stayed empty."""
        with suppress(FileNotFoundError):  # the folder was removed
            if self._new and [path.name for path in self.path.parent.iterdir()] == [self.path.name]:
                self.path.unlink()
                self.path.parent.rmdir()
        # Also for processes that a reward has forked and left running: they hold the same lock.
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        os.close(self._handle)


def _runs(pid: str) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
