"""Scratch folders, which do not outlive their process for longer than until the next start of a run."""

import atexit
import fcntl
import logging
import os
import platform
import shutil
import tempfile
from pathlib import Path

import xxhash

from .files import escape_controls

log = logging.getLogger(__name__)

# Folders with these names are removed when their process has ended.
PREFIXES = ("forge-run-", "forge-weights-", "forge-trackers-", "forge-agents-")


def _machine_id() -> str:
    """Return an id of this machine since its start: locks on a folder that machines share are not seen by others."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = platform.node()
    return xxhash.xxh3_64_hexdigest(name.encode())[:6]


MACHINE = _machine_id()


class Scratch:
    """A new folder that is removed by `close`, or when this process exits. If it is killed, `sweep` removes the folder
    at the next start of a run: the process holds a lock on it while it lives, which also keeps systemd-tmpfiles away.

    Args:
        prefix: of the folder's name, one of PREFIXES; followed by the ids of this process and of the machine.
        base: the folder that it is created in; None is the folder for temporary files.
    """

    def __init__(self, prefix: str, base: str | Path | None = None) -> None:
        assert prefix in PREFIXES, prefix
        new = Path(tempfile.mkdtemp(prefix="forge-new-", dir=base))
        self._lock: int | None = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Renamed once it is locked: a sweeping process must not take it for an abandoned one.
        self.path = new.rename(new.with_name(f"{prefix}{os.getpid()}-{MACHINE}-{new.name.removeprefix('forge-new-')}"))
        self._owner = os.getpid()
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the folder now. A fork of the process that made it leaves it as it is."""
        if self._lock is None or os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def sweep_folders() -> list[Path]:
    """Remove folders that dead processes of this user left on this host since its start; return them.

    A folder is abandoned if it is this user's and no process holds its lock. Folders of other hosts, in a shared
    TMPDIR, have other names.
    """
    bases = {Path("/dev/shm"), Path("/tmp"), Path(tempfile.gettempdir())}
    folders = (folder for base in bases for prefix in PREFIXES for folder in base.glob(f"{prefix}*-{MACHINE}-*"))
    return [folder for folder in folders if _remove_abandoned(folder)]


def _remove_abandoned(folder: Path) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it was removed, is a link, or another user's
        return False

    try:
        if os.fstat(handle).st_uid != os.geteuid():
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another program may have mounted a folder of the user's in it, whose files are not ours.
        mounts = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()]
        if any(mount.startswith(os.path.realpath(folder)) for mount in mounts):
            log.warning("%s was left by a process that is dead, and something is mounted in it: unmount it", folder)
            return False
        shutil.rmtree(folder)
    except (BlockingIOError, FileNotFoundError):  # its process lives, or another one removed it
        return False
    except OSError as error:
        name = escape_controls(folder)
        log.warning("%s was left by a process that is dead and could not be removed: %s", name, escape_controls(error))
        return False
    finally:
        os.close(handle)

    return True
