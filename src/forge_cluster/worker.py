"""A Monarch worker that a host's daemon starts: the processes of a run on this machine are its children.

It reads its address from standard input, then a line for each beat of the controller. If no beat comes for longer than
the lease, it kills itself, and the kernel kills its children with it.
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
    """Run a worker until the daemon's process `parent` ends, or no beat comes for longer than the lease."""
    end_with_parent(parent)
    # Signals of terminals and schedulers are for the daemon. The processes of the run inherit that they are ignored.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    address = sys.stdin.readline().strip()
    threading.Thread(target=_end_without_beats, daemon=True).start()

    from forge.runtime.controller.hosts import serve_forever

    serve_forever(address, Path(os.environ["TMPDIR"]))


def _end_without_beats() -> None:
    # `select` returns no file after the time, and `read` no bytes once the daemon has closed its end.
    file = sys.stdin.fileno()
    while select.select([file], [], [], LEASE + 0.5)[0] and os.read(file, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve_worker(int(sys.argv[1]))
