"""One run, one controller."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path


class RunLock:
    """Holds a run's folder, which is made if need be, for as long as a process of this run lives.

    The processes that are started inherit the lock: after a kill -9 of the controller it is free once the last of them
    is gone, and none of them can write into the folder any more.

    Args:
        patience: seconds to wait for those of a controller that is gone.

    Raises:
        BlockingIOError: another process runs it; says which.
    """

    def __init__(self, folder: str | Path, patience: float = 20.0) -> None:
        self.path = Path(folder) / "lock"
        self._new = not self.path.parent.exists()
        deadline = time.monotonic() + patience
        while (handle := self._take()) is None:
            try:
                owner = self.path.read_text()
            except FileNotFoundError:  # it was let go of in between
                continue
            gone = owner in ("", str(os.getpid())) or not _runs(owner)
            if not gone or time.monotonic() > deadline:
                who = f"process {owner}" if owner else "another process"
                raise BlockingIOError(f"{folder} is being run by {who}: wait for it, or stop it first")
            time.sleep(0.1)
        self._handle = handle
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        os.set_inheritable(handle, True)

    def _take(self) -> int | None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.path.exists() and os.path.samestat(os.fstat(handle), self.path.stat()):
                return handle
        except BlockingIOError:
            pass
        os.close(handle)
        return None

    def close(self) -> None:
        """Let go of it; a folder that was made and stayed empty goes too."""
        if self._new and [path.name for path in self.path.parent.iterdir()] == [self.path.name]:
            self.path.unlink()
            self.path.parent.rmdir()
        os.close(self._handle)


def _runs(pid: str) -> bool:
    """Whether a process is there and not just waiting for its parent to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
