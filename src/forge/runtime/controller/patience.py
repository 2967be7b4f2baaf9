"""Limits of time that a busy machine does not shorten.

A process that waits for a core, or gets one now and then, is slow and not lost. So what counts is the CPU time that it
uses, and the time in which it does not even ask for any.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
CHECK_EVERY = 0.25  # seconds
# A process that waits for a message still has threads that wake up now and then: Monarch's take 1 to 2 % of a core.
IDLE_SHARE = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU time that a process of this machine has used; 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def wants_cpu(pid: int) -> bool:
    """Whether a thread of a process runs, waits for a core, or for memory that was swapped out."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(_state(f"/proc/{pid}/task/{thread}/stat") in ("R", "D") for thread in threads)


class Patience:
    """A limit of `seconds` for some processes: it is reached once one of them has used that much CPU time since, or
    none has used or wanted any for that long.

    Args:
        pids: of this machine; without any the limit is plain time.
    """

    def __init__(self, pids: Iterable[int], seconds: float) -> None:
        self.seconds = seconds
        self.idle = 0.0  # seconds
        self._first = {pid: cpu_seconds(pid) for pid in pids}
        self._latest, self._checked = dict(self._first), time.monotonic()

    @property
    def used(self) -> float:
        """CPU time since, in seconds, of the process that used most."""
        return max((self._latest[pid] - first for pid, first in self._first.items()), default=0.0)

    def is_left(self) -> bool:
        """Whether the limit is not reached; to be asked several times within it."""
        elapsed = time.monotonic() - self._checked
        latest = {pid: cpu_seconds(pid) for pid in self._first}
        active = any(latest[pid] - used > IDLE_SHARE * elapsed for pid, used in self._latest.items())
        # This process may have been without a core itself: what it did not see is not silence.
        self.idle = 0.0 if active or any(map(wants_cpu, self._first)) else self.idle + min(elapsed, 4 * CHECK_EVERY)
        self._latest, self._checked = latest, time.monotonic()
        return self.idle < self.seconds and self.used < self.seconds


async def wait_for(awaitable: Awaitable[T], pids: Iterable[int], seconds: float) -> T:
    """Await something that processes do, within a `Patience`.

    Raises:
        TimeoutError: the limit is reached; what was awaited is cancelled.
    """
    future, patience = asyncio.ensure_future(awaitable), Patience(pids, seconds)
    try:
        while not future.done():
            await asyncio.wait([future], timeout=min(CHECK_EVERY, seconds / 4))
            if not future.done() and not patience.is_left():
                raise TimeoutError
        return future.result()
    finally:
        future.cancel()


def _state(path: str) -> str:
    try:
        return Path(path).read_text().rsplit(")", 1)[1].split()[0]
    except OSError:  # the thread ended
        return ""
