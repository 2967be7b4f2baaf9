"""A host, as one process: `python -m forge.controller.host_worker ADDRESS PARENT`. Ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(address: str, parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this process asked to follow it
        return
    # Ctrl-C in a terminal is the controller's to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from ._monarch import run_worker_loop_forever

    run_worker_loop_forever(address=address, ca="trust_all_connections")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
