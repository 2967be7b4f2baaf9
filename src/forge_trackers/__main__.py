"""`python -m forge_trackers FOLDER`: deliver the rows that the trackers of an ended run lack."""

from __future__ import annotations

import sys
from pathlib import Path

from forge.observability.console import configure_logging
from forge.observability.folder import RunLock

from .deliver import deliver_ended_run

if __name__ == "__main__":
    configure_logging()
    lock = RunLock(sys.argv[1])
    is_complete = deliver_ended_run(Path(sys.argv[1]))
    lock.close()
    sys.exit(0 if is_complete else 1)
