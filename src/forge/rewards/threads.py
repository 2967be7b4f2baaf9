"""Blocking functions beside the event loop: with a time limit, or many calls joined into batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from .verifier import Unscored

A = TypeVar("A")
B = TypeVar("B")


async def within(limit: float, call: Awaitable[A], name: str, progress: Callable[[], float | None] = lambda: None) -> A:
    """Await `call` with a time limit, which restarts as long as `progress()` changes. On timeout it is cancelled.

    Raises:
        Unscored: `limit` seconds passed without progress, or the call was cancelled.
        RuntimeError: the call raised SystemExit.
    """

    async def without_exit() -> A:
        try:
            return await call
        except SystemExit as error:  # would end the event loop
            raise RuntimeError(repr(error)) from None

    # The limit starts again whenever there was progress; without a measure of progress it never does.
    task = asyncio.create_task(without_exit())
    try:
        last = progress()
        while not (await asyncio.wait((task,), timeout=limit))[0]:
            now = progress()
            if now == last:
                raise Unscored(f"{name} {'took more than' if now is None else 'made no progress for'} {limit:g} s")
            last = now
        if task.cancelled():
            raise Unscored(f"{name} was cancelled")
        return task.result()
    finally:
        task.cancel()


class ThreadLimiter:
    """Runs functions in threads, at most `limit` at a time in an event loop, first come first served.

    Python cannot stop a thread: a function that never returns keeps its thread until the process ends.

    Attributes:
        progress: number of functions that returned, raised or timed out. A function whose call was cancelled does not
            count, so that a hanging one is not progress.
    """

    def __init__(self, limit: int = 4) -> None:
        self.progress = 0
        self._limit = limit

    async def __call__(self, function: Callable[[], A], *, limit: float, name: str) -> A:
        """The function's result. Unscored: it took more than `limit` seconds, not counting the wait for a turn."""
        turns = _SEMAPHORES.setdefault(asyncio.get_running_loop(), WeakKeyDictionary())
        async with turns.setdefault(self, asyncio.Semaphore(self._limit)):
            with self.counted():
                return await in_own_thread(function, limit=limit, name=name)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the block as one function in `progress`, unless it is cancelled."""
        try:
            yield
        except Exception:
            self.progress += 1
            raise
        self.progress += 1


# Semaphores belong to an event loop. They are kept outside of `ThreadLimiter`, which may be pickled to another process.
_SEMAPHORES: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[ThreadLimiter, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)

in_thread = ThreadLimiter()  # shared by callers without one


async def in_own_thread(function: Callable[[], A], *, limit: float, name: str) -> A:
    """`ThreadLimiter` without waiting for a turn: for functions that wait more than they compute."""
    outcome: Future[A] = Future()

    def work() -> None:
        try:
            value = function()
        except BaseException as raised:
            # SystemExit would end the loop, and a future cannot carry StopIteration.
            carried = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if carried else RuntimeError(repr(raised))
            with suppress(InvalidStateError):  # timed out or cancelled
                outcome.set_exception(error)
        else:
            with suppress(InvalidStateError):
                outcome.set_result(value)

    # Not a pool's thread, which the interpreter would wait for at its end.
    waiting = asyncio.wrap_future(outcome)
    Thread(target=work, name=f"verifier {name}", daemon=True).start()
    return await within(limit, waiting, name)


@dataclass(eq=False)
class _Call(Generic[A, B]):
    """One call of a `Batcher`: its items, the outcomes so far by position, and the future of the complete list."""

    items: Sequence[A]
    outcomes: dict[int, B] = field(default_factory=dict)
    future: Future[list[B]] = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):  # it is complete or cancelled
            self.future.set_exception(error)


class Batcher(Generic[A, B]):
    """Joins calls into batches: those that arrive while a batch is computed form the next one, in order of arrival.

    A call returns as soon as its last item has an outcome. Items of cancelled calls are omitted.

    Args:
        compute: called with the items and a function `is_pending(index)`; yields (index of the item, outcome) in any
            order, for all items that are still pending (their call was not cancelled). It runs in one thread, one batch
            at a time.
        name: of the thread.
        max_items: maximum items of a batch, unless a single call has more.

    Attributes:
        progress: number of outcomes so far.
    """

    def __init__(
        self,
        compute: Callable[[list[A], Callable[[int], bool]], Iterable[tuple[int, B]]],
        name: str,
        *,
        max_items: int = 1024,
    ) -> None:
        self._compute = compute
        self._name = name
        self._max_items = max_items
        self._waiting: deque[_Call[A, B]] = deque()
        self._lock, self._closed = Lock(), False
        self._pool = ThreadPoolExecutor(1, f"verify {name}")
        self.progress = 0

    async def __call__(self, items: Sequence[A]) -> list[B]:
        """The outcome of each item. RuntimeError: the batcher is closed; else the exception of `compute`."""
        call = _Call[A, B](items)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the verifier {self._name} was closed")
            if not items:
                return []
            self._pool.submit(self._next)
            self._waiting.append(call)
        return await asyncio.wrap_future(call.future)

    def close(self) -> None:
        """Fail all waiting calls; the batch that is being computed ends on its own."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for call in waiting:
            call.fail(RuntimeError(f"the verifier {self._name} was closed"))

    def _next(self) -> None:
        # Every call submits one `_next`. The first takes all waiting calls along, so that later ones may find none.
        calls: list[_Call[A, B]] = []
        with self._lock:
            size = 0
            while self._waiting and (not calls or size + len(self._waiting[0].items) <= self._max_items):
                call = self._waiting.popleft()
                if not call.future.done():
                    calls.append(call)
                    size += len(call.items)
        if not calls:
            return
        # One batch of all items; each outcome goes to its call, which completes with the last one.
        items = [item for call in calls for item in call.items]
        positions = [(call, index) for call in calls for index in range(len(call.items))]
        error: BaseException = RuntimeError(f"the verifier {self._name} left responses out")
        try:
            for number, outcome in self._compute(items, lambda number: not positions[number][0].future.done()):
                call, index = positions[number]
                call.outcomes[index] = outcome
                if len(call.outcomes) == len(call.items):
                    with suppress(InvalidStateError):  # it was cancelled
                        call.future.set_result([call.outcomes[index] for index in range(len(call.items))])
                self.progress += 1
        except BaseException as raised:
            error = raised
        for call in calls:
            call.fail(error)
