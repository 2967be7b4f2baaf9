"""Virtual time: an event loop whose clock jumps to the next timer, so that real coroutines run unchanged.

asyncio asks a selector to wait until the next timer is due. Here no file is ever ready, and waiting moves the clock.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
RESOLUTION = time.get_clock_info("monotonic").resolution  # asyncio's, in seconds


class NothingLeft(RuntimeError):
    """Every coroutine waits for another, and no timer is set: the run would never go on."""


class _Timers(selectors.BaseSelector):
    """A selector of no files."""

    def __init__(self) -> None:
        self.now = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Accept a file, of which nothing is ever reported: the loop's own, for wake-ups from other threads."""
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Forget a file."""
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """No files."""
        return {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Move the clock by `timeout` seconds.

        Raises:
            NothingLeft: there is no timer.
        """
        if timeout is None:
            raise NothingLeft(f"at {self.now:g} s everything waits for something that nothing will bring")
        self.now += max(0.0, timeout)
        # asyncio counts a timer as due within a resolution. After four months that is less than the clock can tell, and
        # a timer of this moment would never be due.
        if self.now + RESOLUTION == self.now:
            self.now = math.nextafter(self.now, math.inf)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which begins at 0 seconds."""

    def __init__(self) -> None:
        self._timers = _Timers()
        super().__init__(self._timers)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._timers.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, as `asyncio.run` does in real time.

    Raises:
        NothingLeft: it waits for something that never comes.
        what the coroutine raises.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
