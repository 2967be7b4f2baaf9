"""Folders that must not outlive this process, however it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path


class Scratch:
    """A new folder that is removed by `close`, or when this process ends without it: kill -9 included.

    A shell waits on a pipe whose other end only this process holds; when that end is gone, so is the folder.

    Args:
        prefix: of the folder's name, followed by this process's id.
        base: where it is made; None is the folder for temporary files.
    """

    def __init__(self, prefix: str, base: str | Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=base))
        self._watcher: subprocess.Popen | None = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; rm -rf -- "$1"', "sh", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of a terminal's Ctrl-C
        )

    def close(self) -> None:
        """Remove the folder now."""
        if self._watcher is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            assert self._watcher.stdin is not None
            self._watcher.stdin.close()
            self._watcher.wait()
            self._watcher = None
