"""Plain functions beside the event loop: with a time limit, or many calls as one batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from .verifier import Unscored

A = TypeVar("A")
B = TypeVar("B")

_AT_ONCE = 4  # functions that share their turns, in a loop


async def within(limit: float, call: Awaitable[A], what: str, progress: Callable[[], float | None] = lambda: None) -> A:
    """Wait for it. Unscored: `limit` seconds have passed and `progress()` has not changed in them, or it was cancelled.

    What takes too long is cancelled, and not waited for any more. RuntimeError: it called exit().
    """

    async def held() -> A:
        try:
            return await call
        except SystemExit as error:  # the loop would end with it
            raise RuntimeError(repr(error)) from None

    task = asyncio.create_task(held())
    try:
        before = progress()
        while not (await asyncio.wait((task,), timeout=limit))[0]:
            now = progress()
            if now == before:
                raise Unscored(f"{what} {'took more than' if now is None else 'stood still for'} {limit:g} s")
            before = now
        if task.cancelled():
            raise Unscored(f"{what} was cancelled")
        return task.result()
    finally:
        task.cancel()


class Turns:
    """Functions in threads, at most `most` at a time in a loop; who asks first is served first.

    Python cannot end a thread: one that never returns keeps its thread, and what that holds, until the process ends.

    Attributes:
        progress: functions that are done with: they have returned, raised or run into their limit. One whose call was
            cancelled is not, so that what hangs is no progress.
    """

    def __init__(self, most: int = _AT_ONCE) -> None:
        self.progress, self._most = 0, most

    async def __call__(self, function: Callable[[], A], *, limit: float, what: str) -> A:
        """What the function gives or raises. Unscored: it took more than `limit` seconds, waiting for a turn aside."""
        turns = _TURNS.setdefault(asyncio.get_running_loop(), WeakKeyDictionary())
        async with turns.setdefault(self, asyncio.Semaphore(self._most)):
            with self.counted():
                return await in_own_thread(function, limit=limit, what=what)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What happens within is a function too, for `progress`."""
        try:
            yield
        except Exception:
            self.progress += 1
            raise
        self.progress += 1


# Not in the object, which may go to another process.
_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[Turns, asyncio.Semaphore]] = WeakKeyDictionary()

in_thread = Turns()  # of all that has none of its own


async def in_own_thread(function: Callable[[], A], *, limit: float, what: str) -> A:
    """The same without a turn: for what waits for others more than it computes."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[A] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if outcome.done():  # timed out or cancelled
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
        except StopIteration as raised:  # which a future cannot carry
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
    """Joins calls into batches: those that arrive while one is computed go into the next, in the order they came.

    A call has its outcomes as soon as the last of its own is there. Items of calls that were cancelled are
    left out.

    Args:
        compute: yields the number of an item with its outcome, in any order, all but those
            for which `wanted(number)` is False (their call was cancelled); it runs in a thread of its own, one batch at
            a time.
        name: of the thread.
        most: items of a batch, unless a single call has more.

    Attributes:
        progress: outcomes so far.
    """

    def __init__(
        self,
        compute: Callable[[list[A], Callable[[int], bool]], Iterable[tuple[int, B]]],
        name: str,
        *,
        most: int = 1024,
    ) -> None:
        self._compute, self._name, self._most = compute, name, most
        self._waiting: deque[_Call[A, B]] = deque()
        self._lock, self._closed = Lock(), False
        self._pool = ThreadPoolExecutor(1, f"verify {name}")
        self.progress = 0

    async def __call__(self, items: Sequence[A]) -> list[B]:
        """The outcome of each item. RuntimeError: it was closed; else what `compute` raises."""
        call = _Call[A, B](items)
        with self._lock:
            if self._closed:
                raise self._end()
            self._pool.submit(self._next)
            self._waiting.append(call)
        return await asyncio.wrap_future(call.future)

    def close(self) -> None:
        """Calls that wait fail; the batch that is computed ends on its own."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for call in waiting:
            call.fail(self._end())

    def _end(self) -> RuntimeError:
        return RuntimeError(f"the verifier {self._name} was closed")

    def _next(self) -> None:
        # Each call asks for a turn; the first one takes along all that wait, and the others may find nothing.
        calls: list[_Call[A, B]] = []
        with self._lock:
            size = 0
            while self._waiting and (not calls or size + len(self._waiting[0].items) <= self._most):
                call = self._waiting.popleft()
                if call.wanted():
                    calls.append(call)
                    size += len(call.items)
        if not calls:
            return
        places = [(call, place) for call in calls for place in range(len(call.items))]
        error: BaseException = RuntimeError(f"the verifier {self._name} left responses out")
        try:
            items = [call.items[place] for call, place in places]
            for number, outcome in self._compute(items, lambda number: places[number][0].wanted()):
                call, place = places[number]
                call.take(place, outcome)
                self.progress += 1
        except BaseException as raised:
            error = raised
        for call in calls:
            call.fail(error)


class _Call(Generic[A, B]):
    """Items of one call, and what is known of them. `future` has all outcomes in the items' order."""

    def __init__(self, items: Sequence[A]) -> None:
        self.items = items
        self.future: Future[list[B]] = Future()
        self._found: dict[int, B] = {}
        if not items:
            self.future.set_result([])

    def wanted(self) -> bool:
        return not self.future.done()

    def take(self, place: int, outcome: B) -> None:
        self._found[place] = outcome
        if len(self._found) == len(self.items):
            with suppress(InvalidStateError):  # it was cancelled
                self.future.set_result([self._found[place] for place in range(len(self.items))])

    def fail(self, error: BaseException) -> None:
        """Unless all is known."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)
