"""The lock on a run directory, which allows one controller.

`filelock` would do the locking; it closes its descriptor in children, and a run's processes must keep the lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path


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
        self._is_new = not self.path.parent.exists()
        deadline = time.monotonic() + patience
        while (handle := self._acquire()) is None:
            owner = self.path.read_text()
            is_alive = owner not in ("", str(os.getpid())) and Path(f"/proc/{owner}").exists()
            # The processes of a dead controller end soon; a living owner does not.
            if is_alive or time.monotonic() > deadline:
                raise BlockingIOError(f"{folder} is being run by process {owner}: wait for it, or stop it first")
            time.sleep(0.1)
        self._handle = handle
        os.set_inheritable(handle, True)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)

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
        except BlockingIOError:
            os.close(handle)
            return None
        return handle

    def close(self) -> None:
        """Release the lock, and remove the folder if this lock created it and it stayed empty."""
        with suppress(FileNotFoundError):  # the folder was removed
            if self._is_new and [path.name for path in self.path.parent.iterdir()] == [self.path.name]:
                self.path.unlink()
                self.path.parent.rmdir()
        # Also for processes that a reward has forked and left running: they hold the same lock.
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        os.close(self._handle)
