"""The controller's side of the trackers: their process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from ..lines import Row
from .deliver import END_TIMEOUT

log = logging.getLogger(__name__)


class TrackerProcess:
    """The process that feeds the trackers of the run in `folder`.

    Args:
        metrics: the section of the configuration, with passwords that config.yaml does not have.
        start: the step that the run starts at.
    """

    def __init__(self, folder: Path, metrics: Row, start: int) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self._process: subprocess.Popen | None = subprocess.Popen(
            [sys.executable, "-m", str(__package__), str(folder), "--follow", str(start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # Trackio prints there
            env=os.environ | {"PYTHONPATH": path},
            close_fds=False,  # it inherits the lock on the run's folder
            start_new_session=True,  # out of reach of a terminal's Ctrl-C
        )
        assert self._process.stdin is not None
        # Other users may read the arguments of a process.
        self._process.stdin.write(json.dumps(metrics).encode() + b"\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Warn, once, if the process has ended."""
        if self._process is not None and self._process.poll() is not None:
            log.warning("the process of the trackers ended with code %s; training continues", self._process.returncode)
            self._process = None

    def close(self) -> None:
        """Wait until it has delivered the last rows and ended."""
        self.check()
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT + 15)  # it limits itself; the rest is for its start and exit
        except subprocess.TimeoutExpired:
            self._process.kill()
            log.warning("the process of the trackers did not end and was killed")
