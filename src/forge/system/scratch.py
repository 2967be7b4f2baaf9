"""Scratch folders, which do not outlive their process, however it ends."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import xxhash

from .files import mounts_in, printable, remove_tree

log = logging.getLogger(__name__)

# Folders with these names are removed when their process has ended.
PREFIXES = ("forge-run-", "forge-weights-", "forge-trackers-", "forge-agents-")
# A folder has this name until its lock is held.
NEW = "forge-new-"
SETTLE_TIME = 60.0  # seconds after which a new folder is certainly locked, if its process lives


def _machine() -> str:
    """Return an id of this machine since its start: locks on a folder that machines share are not seen by others."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return xxhash.xxh3_64_hexdigest(name.encode())[:6]


MACHINE = _machine()


class Scratch:
    """A new folder that is removed by `close`, or when this process ends without it: kill -9 included.

    A shell waits on a pipe whose other end only this process holds; when that end closes, it removes the folder. If the
    shell was killed before, this process removes the folder at its exit. If both are killed at once, as with a control
    group, `sweep` removes the folder: this process holds a lock on it while it lives. The lock also keeps
    systemd-tmpfiles away.

    Args:
        prefix: of the folder's name, one of PREFIXES; followed by the ids of this process and of the machine.
        base: the folder that it is created in; None is the folder for temporary files.
    """

    def __init__(self, prefix: str, base: str | Path | None = None) -> None:
        assert prefix in PREFIXES, prefix
        new = Path(tempfile.mkdtemp(prefix=NEW, dir=base))
        self._lock: int | None = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Renamed once it is locked: a sweeping process must not take it for an abandoned one.
        name = f"{prefix}{os.getpid()}-{MACHINE}-{new.name.removeprefix(NEW)}"
        self.path = new.rename(new.with_name(name))
        self._watcher: subprocess.Popen | None = subprocess.Popen(
            ["/bin/sh", "-c", 'trap "" HUP INT TERM; read -r _; rm -rf -- "$1"', "sh", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of a terminal's Ctrl-C
        )
        self._owner = os.getpid()
        atexit.register(self._end)

    def _end(self) -> None:
        """Remove the folder if the shell cannot. Otherwise it waits for the process's last thread, which may use it."""
        if os.getpid() == self._owner and self._watcher is not None and self._watcher.poll() is not None:
            self.close()

    def close(self) -> None:
        """Remove the folder now."""
        atexit.unregister(self._end)
        if self._watcher is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            # Not by the end of the pipe: a fork of this process that still runs would hold it open.
            self._watcher.kill()
            self._watcher.wait()
            assert self._watcher.stdin is not None
            self._watcher.stdin.close()
            self._watcher = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def sweep() -> list[Path]:
    """Remove folders that dead processes of this user left on this host since its start; return them.

    A folder is abandoned if it is this user's and no process holds its lock. Folders of other hosts, in a shared
    TMPDIR, and those of earlier versions, which had no lock, have other names.
    """
    removed = []
    for base in {Path("/dev/shm"), Path("/tmp"), Path(tempfile.gettempdir())}:
        for pattern in (*(f"{prefix}*-{MACHINE}-*" for prefix in PREFIXES), f"{NEW}*"):
            removed += [folder for folder in base.glob(pattern) if _remove_abandoned(folder)]
    return removed


def _remove_abandoned(folder: Path) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it was removed, is a link, or another user's
        return False
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            return False
        if folder.name.startswith(NEW) and time.time() - status.st_mtime < SETTLE_TIME:
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if mounts := mounts_in(folder):
            log.warning(
                "%s was left by a process that is dead, and %s is mounted in it: unmount it, then run forge clean",
                *(printable(folder), printable(mounts[0])),
            )
            return False
        remove_tree(folder, handle)
    except (BlockingIOError, FileNotFoundError):  # its process lives, or another one removed it
        return False
    except OSError as error:
        log.warning(
            "%s was left by a process that is dead and could not be removed: %s", printable(folder), printable(error)
        )
        return False
    finally:
        os.close(handle)
    return True
