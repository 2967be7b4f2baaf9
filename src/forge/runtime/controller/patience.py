"""Limits of time that a busy machine does not shorten.

A process that waits for a core, or gets one now and then, is slow and not lost. So what counts is the CPU time that it
uses, and the time in which it does not even ask for any.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Mapping
from typing import TypeVar

from ..cluster.process import Activity, activity_of

T = TypeVar("T")
CHECK_EVERY = 0.25  # seconds
# A process that waits for a message still has threads that wake up now and then: Monarch's take 1 to 2 % of a core.
IDLE_SHARE = 0.05


class Patience:
    """A limit of `seconds` for some processes: it is reached once one of them has used that much CPU time since, or
    none has used or wanted any for that long.

    Args:
        first: what each process does now, by its id; without any the limit is plain time.
    """

    def __init__(self, first: Mapping[int, Activity], seconds: float) -> None:
        self.seconds = seconds
        self.idle = 0.0  # seconds
        self._first = dict(first)
        self._latest, self._checked = self._first, time.monotonic()

    @classmethod
    def of(cls, pids: Iterable[int], seconds: float) -> Patience:
        """A limit for processes of this machine."""
        return cls({pid: activity_of(pid) for pid in pids}, seconds)

    @property
    def used(self) -> float:
        """CPU time since, in seconds, of the process that used most."""
        used = (self._latest[pid].cpu_seconds - first.cpu_seconds for pid, first in self._first.items())
        return max(used, default=0.0)

    def is_left(self, latest: Mapping[int, Activity] | None = None) -> bool:
        """Whether the limit is not reached; to be asked several times within it.

        Args:
            latest: what the processes do, by their ids; None looks at processes of this machine.
        """
        elapsed = time.monotonic() - self._checked
        if latest is None:
            latest = {pid: activity_of(pid) for pid in self._first}
        # A process of which nothing came does what it did.
        latest = {pid: latest.get(pid, before) for pid, before in self._latest.items()}
        shares = (latest[pid].cpu_seconds - before.cpu_seconds for pid, before in self._latest.items())
        is_active = any(share > IDLE_SHARE * elapsed for share in shares)
        wants_cpu = any(activity.wants_cpu for activity in latest.values())
        # This process may have been without a core itself: what it did not see is not silence.
        self.idle = 0.0 if is_active or wants_cpu else self.idle + min(elapsed, 4 * CHECK_EVERY)
        self._latest, self._checked = latest, time.monotonic()
        return self.idle < self.seconds and self.used < self.seconds


async def wait_for(awaitable: Awaitable[T], pids: Iterable[int], seconds: float) -> T:
    """Await something that processes do, within a `Patience`.

    Raises:
        TimeoutError: the limit is reached; what was awaited is cancelled.
    """
    future, patience = asyncio.ensure_future(awaitable), Patience.of(pids, seconds)
    try:
        while not future.done():
            await asyncio.wait([future], timeout=min(CHECK_EVERY, seconds / 4))
            if not future.done() and not patience.is_left():
                raise TimeoutError
        return future.result()
    finally:
        future.cancel()
