"""Limits of time that a busy machine does not shorten.

A process that waits for a core, or gets one now and then, is slow and not lost. So what counts is the CPU time that it
uses, and the time in which it does not even ask for any.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ..process import Activity, Watched

T = TypeVar("T")
CHECK_EVERY = 0.25  # seconds
# A process that waits for a message still has threads that wake up now and then: Monarch's take 1 to 2 % of a core.
IDLE_SHARE = 0.05
# Seconds for a process of which nothing tells whether it gets a core, as on a host of a user's job that is lost:
# Monarch gives it up after a minute.
UNSEEN_PATIENCE = 30.0


class Patience:
    """A limit of `seconds` for one process: it is reached once that has used as much CPU time, or has neither used nor
    wanted any for that long. Of a process that nothing is known of, the limit is plain time.

    Args:
        first: what the process does now.
        idle_only: CPU time does not count, as where a process also does what others ask for.
    """

    def __init__(self, first: Activity | None, seconds: float, idle_only: bool = False) -> None:
        self._idle_only = idle_only
        self.seconds = seconds if first is not None else max(seconds, UNSEEN_PATIENCE)
        self._first = self._latest = first
        self._checked = time.monotonic()
        self._idle = 0.0  # seconds

    def is_left(self, latest: Activity | None) -> bool:
        """Return whether the limit is not reached; to be asked several times within it."""
        now = time.monotonic()
        elapsed = now - self._checked
        self._checked = now
        used = 0.0
        is_active = False
        if latest is not None and self._latest is not None and self._first is not None:
            used = latest.cpu_seconds - self._first.cpu_seconds
            share = latest.cpu_seconds - self._latest.cpu_seconds
            is_active = latest.wants_cpu or share > IDLE_SHARE * elapsed
            self._latest = latest
        # This process may have been without a core itself: what it did not see is not silence.
        self._idle = 0.0 if is_active else self._idle + min(elapsed, 4 * CHECK_EVERY)
        return self._idle < self.seconds and (self._idle_only or used < self.seconds)


async def wait_for(
    awaitable: Awaitable[T],
    processes: Sequence[Watched],
    seconds: float,
    is_answered: Callable[[], Any] = bool,
    idle_only: bool = False,
) -> T | None:
    """Await something that processes do, with a `Patience` for each; None once `is_answered` in another way.

    Raises:
        TimeoutError: the limit of one is reached; what was awaited is cancelled.
    """
    future = asyncio.ensure_future(awaitable)
    limits: list[Patience] = []
    deadline = time.monotonic() + seconds  # where there is no process to look at

    try:
        while not future.done() and not is_answered():
            # A call that is answered at once costs no look at /proc.
            await asyncio.wait([future], timeout=min(CHECK_EVERY, seconds / 4))
            if future.done():
                break
            activities = await asyncio.gather(*(process.activity() for process in processes))
            if not limits:
                limits = [Patience(activity, seconds, idle_only) for activity in activities]
            left = [limit.is_left(activity) for limit, activity in zip(limits, activities, strict=True)]
            if not all(left) or (not left and time.monotonic() > deadline):
                raise TimeoutError

        return future.result() if future.done() else None
    finally:
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # no other caller asks for it
        future.cancel()
