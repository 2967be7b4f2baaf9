"""Plain functions beside the event loop: with a time limit, or many calls as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

from .verifier import Unscored

A = TypeVar("A")
B = TypeVar("B")


async def within(limit: float, call: Awaitable[A], what: str) -> A:
    """Wait for it. Unscored: it took more than `limit` seconds."""
    try:
        async with asyncio.timeout(limit) as clock:
            return await call
    except TimeoutError:
        if not clock.expired():  # its own
            raise
        raise Unscored(f"{what} took more than {limit:g} s") from None


async def in_thread(function: Callable[[], A], *, limit: float, what: str) -> A:
    """What the function gives or raises. Unscored: it took more than `limit` seconds.

    Python cannot end a thread: one that never returns keeps its thread, and what that holds, until the process ends.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[A] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if outcome.done():  # nobody waits any more
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(value)

    def work() -> None:
        value: A | None = None
        error: Exception | None = None
        try:
            value = function()
        except StopIteration as raised:  # which a future refuses
            error = RuntimeError(f"StopIteration: {raised}")
        except Exception as raised:
            error = raised
        except BaseException as raised:  # exit() in a rule ends the rule alone
            error = RuntimeError(repr(raised))
        with suppress(RuntimeError):  # the loop has ended before the function
            loop.call_soon_threadsafe(settle, value, error)

    # A thread of a pool would be waited for when the interpreter ends.
    Thread(target=work, name=f"verifier {what}", daemon=True).start()
    return await within(limit, outcome, what)


class Batcher(Generic[A, B]):
    """Joins calls into batches: those that arrive while one is computed go into the next.

    Args:
        compute: one outcome for each item; it runs in a thread of its own, one batch at a time.
        most: items of a batch, unless a single call has more.
        name: of the thread.
    """

    def __init__(self, compute: Callable[[list[A]], Sequence[B]], *, most: int, name: str) -> None:
        self._compute, self._most = compute, most
        self._waiting: list[tuple[Sequence[A], Future[list[B]]]] = []
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(1, name)

    async def __call__(self, items: Sequence[A]) -> list[B]:
        """The outcome of each item. RuntimeError after `close`; else what `compute` raises."""
        call: Future[list[B]] = Future()
        with self._lock:
            self._pool.submit(self._next)
            self._waiting.append((items, call))
        return await asyncio.wrap_future(call)

    def close(self) -> None:
        """Calls that wait are cancelled; the batch that is computed ends on its own."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for _, call in self._waiting:
                call.cancel()
            self._waiting.clear()

    def _next(self) -> None:
        # Each call asks for a turn; the first one takes along all that wait, and the others may find nothing.
        calls: list[tuple[Sequence[A], Future[list[B]]]] = []
        with self._lock:
            size = 0
            while self._waiting and (not calls or size + len(self._waiting[0][0]) <= self._most):
                items, call = self._waiting.pop(0)
                if call.set_running_or_notify_cancel():
                    calls.append((items, call))
                    size += len(items)
        if not calls:
            return
        try:
            outcomes = list(self._compute([item for items, _ in calls for item in items]))
        except BaseException as error:
            for _, call in calls:
                call.set_exception(error)
            return
        start = 0
        for items, call in calls:
            call.set_result(outcomes[start : start + len(items)])
            start += len(items)
