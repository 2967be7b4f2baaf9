"""Scratch folders: temporary folders that are removed with their process, or else at the next start of a run."""

import atexit
import fcntl
import itertools
import logging
import os
import platform
import tempfile
from contextlib import suppress
from pathlib import Path

import xxhash

from .files import escape_controls

log = logging.getLogger(__name__)

# How the names of scratch folders start.
PREFIXES = ("forge-run-", "forge-weights-", "forge-trackers-", "forge-agents-")


try:
    _boot = Path("/proc/sys/kernel/random/boot_id").read_text()
except OSError:
    _boot = platform.node()
# An id of this machine since its last start, 6 hexadecimal digits. It is part of the folders' names, because a machine
# does not see the locks that others hold in a shared folder.
MACHINE = xxhash.xxh3_64_hexdigest(_boot.encode())[:6]


class Scratch:
    """A new folder that is removed by `close`, or when this process exits.

    The process holds a lock on the folder while it lives, which also keeps systemd-tmpfiles from cleaning it. If the
    process is killed, `sweep_folders` removes the folder at the next start of a run.

    Args:
        prefix: start of the folder's name, one of PREFIXES; the ids of this process and of the machine follow.
        base: the folder in which it is created; None is the folder for temporary files.
    """

    def __init__(self, prefix: str, base: str | Path | None = None) -> None:
        assert prefix in PREFIXES, prefix
        new = Path(tempfile.mkdtemp(prefix="forge-new-", dir=base))
        self._lock: int | None = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # It gets its final name once it is locked: before, `sweep_folders` would take it for an abandoned folder.
        self.path = new.rename(new.with_name(f"{prefix}{os.getpid()}-{MACHINE}-{new.name.removeprefix('forge-new-')}"))
        self._owner = os.getpid()
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the folder now; in a fork of the process that created it, do nothing."""
        if self._lock is None or os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        with suppress(OSError):
            remove_tree(self.path)
        os.close(self._lock)
        self._lock = None


def remove_tree(folder: Path) -> None:
    """Remove a folder if it exists, however deep folders are nested in it and whatever rights to them are missing.

    `shutil.rmtree` recurses, and holds a descriptor for each level: a program could nest more folders than it removes.

    Raises:
        OSError: a file cannot be removed.
    """
    if not folder.exists():
        return

    names = (folder / f".{os.urandom(8).hex()}-{serial}" for serial in itertools.count())
    folders = [folder]
    for path in folders:  # to which the loop adds the folders that it finds
        path.chmod(0o700)
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                # Moved up, so that no path becomes longer than the system allows; which takes the rights to the folder.
                os.chmod(entry.path, 0o700)
                folders.append(Path(entry.path).rename(next(names)))
            else:
                os.unlink(entry.path)

    for path in reversed(folders):
        path.rmdir()


def sweep_folders() -> list[Path]:
    """Remove the scratch folders that dead processes of this user left on this machine; return the removed ones.

    A folder is abandoned if it is this user's and no process holds its lock. In a folder that machines share, those of
    other machines are recognised by their names and left.
    """
    bases = {Path("/dev/shm"), Path("/tmp"), Path(tempfile.gettempdir())}
    folders = (folder for base in bases for prefix in PREFIXES for folder in base.glob(f"{prefix}*-{MACHINE}-*"))
    return [folder for folder in folders if _remove_abandoned(folder)]


# Remove a folder if it is abandoned, see `sweep_folders`; return whether it was removed.
def _remove_abandoned(folder: Path) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it was removed meanwhile, is a link, or belongs to another user
        return False

    try:
        if os.fstat(handle).st_uid != os.geteuid():
            return False
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Something may be mounted in it, such as a folder of the user's: those files must not be removed.
        mounts = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()]
        if any(mount.startswith(os.path.realpath(folder)) for mount in mounts):
            log.warning("%s was left by a dead process and has a mount in it: unmount it", folder)
            return False
        remove_tree(folder)
    except (BlockingIOError, FileNotFoundError):  # its process lives, or another process removed it
        return False
    except OSError as error:
        name = escape_controls(folder)
        log.warning("%s was left by a dead process and could not be removed: %s", name, escape_controls(error))
        return False
    finally:
        os.close(handle)

    return True
