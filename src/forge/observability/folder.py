"""The folder of a run: its lock, names of its files, and their removal when a run is resumed or repeated.

The lock allows one controller. `filelock` would do the locking; it closes its descriptor in children, and a run's
processes must keep the lock.
"""

import fcntl
import json
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from ..system.files import write_atomic
from .lines import Row

log = logging.getLogger(__name__)

MARK = "metrics.jsonl"  # its presence makes a folder a run directory
CONFIG = "config.yaml"
FINISHED = "finished"  # an empty file of a run that came to its end
LOGS = "logs.txt"
MAX_REASON = 500  # characters of the reason why a run ended
ENDED = "ended.txt"  # of an unfinished run: "failed: " or "stopped: " with the reason; then the traceback


def check_free(folder: Path, overwrite: bool) -> None:
    """Check that a new run may use a run directory.

    Raises:
        FileExistsError: it holds an earlier run that made a step, and `overwrite` is False.
    """
    if (folder / MARK).exists() and not overwrite and not made_no_step(folder):
        raise FileExistsError(
            f"{folder} holds an earlier run: resume it with --resume {folder}, choose another run.name, or set "
            "run.overwrite to true"
        )


def made_no_step(folder: Path) -> bool:
    """Return whether the run in this folder ended before its first step: it has no checkpoint, and at most the row of
    step 0, the evaluation before training."""
    if any((folder / "checkpoints").glob("*")):
        return False
    return all(row.startswith('{"step": 0.0,') for row in (folder / MARK).read_text().splitlines())


def clear_run(folder: Path) -> None:
    """Remove an earlier run from its folder, except for the lock.

    After a kill at any point the folder is either clean or still counts as a run, since MARK is removed last, and its
    checkpoints are complete, since their folder is renamed before its files are removed.
    """
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path.rename(path.with_suffix(".removed")))
    for path in folder.iterdir():
        if path.name not in (MARK, CONFIG, "lock"):
            path.unlink()
    (folder / MARK).unlink()
    (folder / CONFIG).unlink(missing_ok=True)


def cut_lines(path: Path, last: int) -> list[Row]:
    """Remove the lines of steps after `last` from a file of JSON lines, and return the rows of the remaining ones.

    Damaged lines are removed too. A truncated last line is what a killed process leaves; any other is a warning.
    """
    complete: list[tuple[str, Row]] = []
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row["step"] > last:
                break
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                log.warning("%s, line %d is damaged and skipped", path, number)
            continue
        complete.append((line, row))

    # Written as another file and renamed, so that a kill leaves either file complete.
    write_atomic(path, "".join(f"{line}\n" for line, _ in complete), durable=True)
    return [row for _, row in complete]


def last_state(folder: Path) -> str:
    """Return how a run that is not running ended: "finished", "failed" or "stopped"."""
    if (folder / FINISHED).is_file():
        return "finished"
    return "failed" if read_ending(folder).startswith("failed") else "stopped"


def read_ending(folder: Path) -> str:
    """Return why a run ended before its last step, such as "failed: KeyError: 'answer'"; "" if it is not recorded."""
    path = folder / ENDED
    return path.read_text(errors="replace").partition("\n")[0].strip()[:MAX_REASON] if path.is_file() else ""


class RunLock:
    """Lock of a run directory, which is created if missing, until `close` or until the last process of the run has
    ended.

    Child processes inherit the lock. So after a kill -9 of the controller it is free only when none of them still
    writes into the folder.

    Args:
        patience: seconds to wait for the processes of a dead controller to end.

    Raises:
        BlockingIOError: another process holds the lock; names the process.
        OSError: the folder cannot be created or written; names the setting to change.
    """

    def __init__(self, folder: str | Path, patience: float = 20.0) -> None:
        self.path = Path(folder) / "lock"
        self._is_new = not self.path.parent.exists()
        deadline = time.monotonic() + patience
        while (handle := self._acquire_lock()) is None:
            owner = self.path.read_text()  # process id of the controller that took the lock
            # A dead owner's child processes hold the lock until they end, so it is worth waiting. This process can be
            # the owner if its last run has children left.
            is_alive = owner not in ("", str(os.getpid())) and Path(f"/proc/{owner}").exists()
            if is_alive or time.monotonic() > deadline:
                raise BlockingIOError(
                    f"run {folder} is in use by process {owner}: wait until it ends, or stop it first"
                )
            time.sleep(0.1)

        self._handle = handle
        os.set_inheritable(handle, True)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)

    def _acquire_lock(self) -> int | None:
        # Returns the descriptor of the locked file, or None if another process holds the lock.
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OSError(
                f"run directory {self.path.parent} cannot be written ({error.strerror}): set run.root to a writable "
                "directory"
            ) from error

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return handle

    def close(self) -> None:
        """Release the lock, and remove the folder if this object created it and nothing else was written to it."""
        with suppress(FileNotFoundError):  # the folder was removed
            if self._is_new and [path.name for path in self.path.parent.iterdir()] == [self.path.name]:
                self.path.unlink()
                self.path.parent.rmdir()
        # Unlock explicitly: processes that a reward has forked and left running hold the same lock.
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        os.close(self._handle)
