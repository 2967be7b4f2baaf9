"""Time limits for processes that a busy machine does not shorten.

A process that waits for a core, or gets one now and then, is slow and not lost. So a limit counts the CPU time that the
process uses, and the time in which it does not even ask for a core.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ..process import Activity, Process

T = TypeVar("T")
CHECK_EVERY = 0.25  # seconds
# A process that waits for a message still has threads that wake up now and then: Monarch's take 1 to 2 % of a core.
IDLE_SHARE = 0.05
# Seconds for a process whose activity cannot be seen, such as one on a lost host of a user's job: the least limit, in
# plain time. Monarch gives such a process up after a minute.
UNSEEN_PATIENCE = 30.0


class Patience:
    """Time limit for one process, measured by its CPU time and idle time.

    It is reached once the process has used `seconds` of CPU time since the start, or has been idle for `seconds`: it
    neither used CPU time nor waited for a core. For a process whose activity cannot be seen it is plain time.

    Args:
        first: the activity of the process at the start; None if it cannot be seen.
        seconds: the limit; at least UNSEEN_PATIENCE if the activity cannot be seen.
        idle_only: do not count used CPU time: for a process that also works for others.
    """

    def __init__(self, first: Activity | None, seconds: float, idle_only: bool = False) -> None:
        self._idle_only = idle_only
        self.seconds = seconds if first is not None else max(seconds, UNSEEN_PATIENCE)
        self._first = self._latest = first
        self._checked = time.monotonic()
        self._idle = 0.0  # seconds since the process was last seen active

    def is_left(self, latest: Activity | None) -> bool:
        """Return whether time is left; to be called every CHECK_EVERY seconds with the process's current activity."""
        now = time.monotonic()
        elapsed = now - self._checked
        self._checked = now

        used = 0.0
        is_active = False
        if latest is not None and self._latest is not None and self._first is not None:
            used = latest.cpu_seconds - self._first.cpu_seconds
            used_since_check = latest.cpu_seconds - self._latest.cpu_seconds
            is_active = latest.wants_cpu or used_since_check > IDLE_SHARE * elapsed
            self._latest = latest

        # After a late call this process was itself without a core. Of the time that it did not see, little counts.
        self._idle = 0.0 if is_active else self._idle + min(elapsed, 4 * CHECK_EVERY)
        return self._idle < self.seconds and (self._idle_only or used < self.seconds)


async def wait_for(
    awaitable: Awaitable[T],
    processes: Sequence[Process],
    seconds: float,
    is_answered: Callable[[], Any] = bool,
    idle_only: bool = False,
) -> T | None:
    """Await a result that depends on other processes; return it, or None once `is_answered()` is true instead.

    Args:
        processes: those that must work for the result; each has a `Patience`.
        seconds: the limit of each process; plain time if there are none.
        is_answered: whether there is another sign that the processes work, so that the result is no longer needed.
        idle_only: see `Patience`.

    Raises:
        TimeoutError: a process reached its limit; `awaitable` is cancelled.
    """
    future = asyncio.ensure_future(awaitable)
    limits: list[Patience] = []
    deadline = time.monotonic() + seconds  # only for a wait without processes

    try:
        while not future.done() and not is_answered():
            # The first look at the processes (in /proc) comes after a pause: most calls are answered before it.
            await asyncio.wait([future], timeout=min(CHECK_EVERY, seconds / 4))
            if future.done():
                break

            activities = await asyncio.gather(*(process.activity() for process in processes))
            if not limits:
                limits = [Patience(activity, seconds, idle_only) for activity in activities]
            are_left = [limit.is_left(activity) for limit, activity in zip(limits, activities, strict=True)]
            if not all(are_left) or (not processes and time.monotonic() > deadline):
                raise TimeoutError

        return future.result() if future.done() else None
    finally:
        # A late exception must be retrieved, or asyncio logs it.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        future.cancel()
