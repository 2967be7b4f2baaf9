"""A Monarch worker that a host's daemon starts: the processes of a run on this machine are its children.

It reads its address from standard input, then a line for each sign of life of the controller. Without one for longer
than the lease it ends, and its processes with it: the kernel kills them with their parent.
"""

import os
import select
import signal
import sys
import threading
from pathlib import Path

from forge.runtime.process import end_with_parent

from .wire import LEASE


def serve_worker(parent: int) -> None:
    """Run a worker until the process `parent` ends or is silent for longer than the lease."""
    end_with_parent(parent)
    # The daemon handles the signals of terminals and schedulers. The run's processes inherit this.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    address = sys.stdin.readline().strip()
    threading.Thread(target=_end_without_signs_of_life, daemon=True).start()

    from forge.runtime.controller.hosts import serve_forever

    serve_forever(address, Path(os.environ["TMPDIR"]))


def _end_without_signs_of_life() -> None:
    file = sys.stdin.fileno()
    while select.select([file], [], [], LEASE + 0.5)[0] and os.read(file, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve_worker(int(sys.argv[1]))
