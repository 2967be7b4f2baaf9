"""A Monarch worker that a host's daemon starts: the processes of a run on this machine are its children.

It reads its address from standard input, then a line for each sign of life of the controller. Without one for longer
than the lease it ends, and its processes with it: the kernel kills them with their parent.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from pathlib import Path

from .wire import LEASE

# The option of prctl that ends a process with its parent.
PR_SET_PDEATHSIG = 1


def serve(parent: int) -> None:
    """Run a worker until the process `parent` ends or is silent for longer than the lease."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above, whose signal never comes then
        return
    # The daemon handles the signals of terminals and schedulers. The run's processes inherit this.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    address = sys.stdin.readline().strip()
    threading.Thread(target=_end_without_signs_of_life, daemon=True).start()

    from ..controller.hosts import serve_forever

    serve_forever(address, Path(os.environ["TMPDIR"]))


def _end_without_signs_of_life() -> None:
    file = sys.stdin.fileno()
    while select.select([file], [], [], LEASE + 0.5)[0] and os.read(file, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
