"""Small disks of tests: each is a tmpfs in a mount namespace of its own, which nothing else on this machine sees."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = 'mount -t tmpfs -o "size=$1,mode=1777" none "$2" && echo mounted && exec sleep infinity'


class SmallDisk:
    """A disk that is mounted at `place` for the processes that `inside` starts."""

    def __init__(self, pid: int, place: Path) -> None:
        self.pid, self.place = pid, place
        self.path = Path(f"/proc/{pid}/root{place}")

    def inside(self, command: Sequence[str], folder: Path) -> list[str]:
        """The command line that runs a command where the disk is mounted."""
        return ["nsenter", f"--mount=/proc/{self.pid}/ns/mnt", f"--wd={folder}", "--", *command]

    @property
    def free(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self, left: int = 0) -> None:
        """Have a file take all but so many bytes, in whole pages."""
        self.empty()
        with (self.path / "fill").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free - left)

    def empty(self) -> None:
        (self.path / "fill").unlink(missing_ok=True)


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[SmallDisk]:
    """A disk of this size, such as "3m", at an empty folder; skips the test where nothing can be mounted."""
    words = ["unshare", "--mount", "--propagation=private", "sh", "-c", SCRIPT, "sh", size, str(place)]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        if holder.stdout.readline() != "mounted\n":
            pytest.skip(f"a small disk cannot be mounted here: {holder.stderr.read().strip()}")
        yield SmallDisk(holder.pid, place)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        holder.stderr.close()
