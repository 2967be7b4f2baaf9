"""The process of the trackers: `python -m forge.observability.trackers FOLDER [--follow STEP]`."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

from ...system.masking import MaskedStream
from ...system.scratch import Scratch
from ..lock import RunLock
from .deliver import deliver


def main() -> None:
    """Deliver the rows of a run: of one that has ended, or with --follow of one that runs."""
    folder = Path(sys.argv[1])
    start = int(sys.argv[3]) if "--follow" in sys.argv else None
    if start is None:
        lock = RunLock(folder)  # noqa: F841  (until the process ends)
    else:
        # The process ends with the controller, whatever a terminal or scheduler sends to all.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    # Files that the packages leave in the folder for temporary files are removed however this process ends.
    scratch = Scratch("forge-trackers-")
    sys.stderr = MaskedStream(sys.stderr)  # also for the packages' messages
    os.environ["TMPDIR"] = str(scratch.path)
    tempfile.tempdir = str(scratch.path)
    try:
        complete = deliver(folder, start)
    except ValueError as error:
        scratch.close()
        raise SystemExit(f"error: {error}") from None
    scratch.close()
    sys.stderr.flush()
    os._exit(0 if complete else 1)  # without waiting for threads of a tracker that hangs


if __name__ == "__main__":
    main()
