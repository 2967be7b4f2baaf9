"""A line for what takes long before a run begins, when nothing else would say anything."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from .user_errors import innermost

log = logging.getLogger(__name__)

REPORT_EVERY = 30.0  # seconds


@contextmanager
def reported(activity: str, every: float = REPORT_EVERY) -> Iterator[None]:
    """Log how long the block has taken, again and again, with the line of the user's own code that it is in."""
    ended = threading.Event()
    begun = time.monotonic()
    caller = threading.get_ident()

    def report() -> None:
        while not ended.wait(every):
            stack = traceback.extract_stack(sys._current_frames()[caller])
            log.warning("%s: %.0f s so far%s", activity, time.monotonic() - begun, innermost(stack))

    # A thread: what blocks may be a system call of the data, which no event loop interrupts.
    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
